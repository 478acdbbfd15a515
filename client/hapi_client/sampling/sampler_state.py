"""Where a training run stands in its data: small, and fit for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from hapi_protocol.errors import ClientError

STATE_VERSION = 1
KINDS = {"str": str, "int": int, "bool": bool}
FROM_ZERO = ("seed", "epoch", "step")


@dataclass(frozen=True)
class DataState:
    """The next step of an epoch, and what the epoch's order depends on.

    Samples count that were *delivered*, not those that were fetched ahead.
    Behind the last step of an epoch it is step 0 of the next one.

    Attributes:
        data: digest of the data set's index.
        seed: of the order.
        batch_size: samples of a step, of all ranks together.
        parts: see :class:`hapi_client.sampling.partition.EpochPartition`.
        turns: likewise.
        buffer_spans: width of the shuffle buffer.
        drop_last: whether a short last batch is left out.
        epoch: in which to go on.
        step: with which to go on.
    """

    data: str
    seed: int
    batch_size: int
    parts: int
    turns: int
    buffer_spans: int
    drop_last: bool
    epoch: int
    step: int

    def behind(self, step: int, num_steps: int) -> DataState:
        """The state when a step has been delivered."""
        if step + 1 < num_steps:
            return replace(self, step=step + 1)
        return replace(self, epoch=self.epoch + 1, step=0)

    def to_dict(self) -> dict[str, Any]:
        return {"version": STATE_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> DataState:
        """Reads what :meth:`to_dict` wrote.

        Raises:
            ClientError: ``bad_state`` naming what is wrong with it.
        """
        if not isinstance(state, Mapping):
            raise bad_state(f"it is a {type(state).__name__}, not a mapping")
        version = state.get("version")
        if version != STATE_VERSION:
            raise bad_state(
                f"its version is {version!r}; this release reads "
                f"{STATE_VERSION}"
            )
        values: dict[str, Any] = {}
        for field in fields(cls):
            kind: Any = KINDS[str(field.type)]
            value: Any = state.get(field.name)
            least = 0 if field.name in FROM_ZERO else 1
            if type(value) is not kind or (kind is int and value < least):
                raise bad_state(f"its {field.name} is {value!r}")
            values[field.name] = value
        return cls(**values)


def bad_state(why: str) -> ClientError:
    return ClientError(
        "bad_state",
        f"the state of the data cannot be loaded: {why}; it has to be what "
        "state_dict() of this data set's training run gave",
    )
