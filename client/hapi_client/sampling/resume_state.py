"""State of a training run's position in its data, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from hapi_protocol.errors import ClientError

STATE_VERSION = 2
"""Version 1 had another order of the samples at the start of an epoch."""
KINDS = {"str": str, "int": int, "bool": bool}
FROM_ZERO = ("seed", "epoch", "step")


@dataclass(frozen=True)
class DataState:
    """The next step of an epoch, and everything its order depends on.

    A step counts once its samples are *delivered*, not when they are
    prefetched.  After the last step of an epoch the state is step 0 of the
    next one.  A run may resume with another number of ranks, because the
    partition of the epoch is kept.  The names of the fields are those of the
    state dict.

    Attributes:
        data: digest of the data set's index.
        seed: seed of the order.
        batch_size: samples of a step, of all ranks together.
        batch_partitions: as in
            :class:`hapi_client.sampling.partition.EpochPartition`.
        step_partitions: as in the same class.
        buffer_spans: width of the shuffle buffer, in spans.
        drop_last: True if a short last batch is left out.
        epoch: epoch to resume.
        step: next step of that epoch.
    """

    data: str
    seed: int
    batch_size: int
    batch_partitions: int
    step_partitions: int
    buffer_spans: int
    drop_last: bool
    epoch: int
    step: int

    def after(self, step: int, num_steps: int) -> DataState:
        """Returns the state after the delivery of a step."""
        if step + 1 < num_steps:
            return replace(self, step=step + 1)
        return replace(self, epoch=self.epoch + 1, step=0)

    def to_dict(self) -> dict[str, Any]:
        return {"version": STATE_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> DataState:
        """Reads the result of :meth:`to_dict`.

        Raises:
            ClientError: ``bad_state`` naming the invalid field.
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
            minimum = 0 if field.name in FROM_ZERO else 1
            if type(value) is not kind or (kind is int and value < minimum):
                raise bad_state(f"its {field.name} is {value!r}")
            values[field.name] = value
        return cls(**values)


def bad_state(why: str) -> ClientError:
    """Makes the error for a state that cannot be loaded."""
    return ClientError(
        "bad_state",
        f"the data state cannot be loaded: {why}; give the state_dict() of a "
        "training run with this data set",
    )
