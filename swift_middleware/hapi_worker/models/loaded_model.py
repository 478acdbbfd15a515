"""A model in a device's memory, and the limits of its forward passes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from hapi_protocol.errors import DoesNotFitError, UnsupportedError
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.profiling.memory_model import MemoryRequirement


class CutDtype(NamedTuple):
    """A cut, and the dtype of its features on the wire."""

    cut: int
    dtype: str


@dataclass
class LoadedModel:
    """A model in memory; guarded by the lock of its ``DeviceModels``.

    Attributes:
        digest: sha256 of the package.
        frozen: its layers, on the device.
        parameter_bytes: bytes of its weights.
        load_seconds: time to check the package, load it and move it to the
            device.
        leases: working bytes of one sample, by lease.
        prefixes: last used modules, by cut.
        needs: last used memory requirements.
        caps: largest batch to try, and the time until which that holds.
    """

    digest: str
    frozen: FrozenGraph
    parameter_bytes: int
    load_seconds: float = 0.0
    leases: dict[Any, int] = field(default_factory=dict)
    prefixes: OrderedDict[int, nn.Module] = field(default_factory=OrderedDict)
    needs: OrderedDict[CutDtype, MemoryRequirement] = field(
        default_factory=OrderedDict
    )
    caps: dict[CutDtype, tuple[int, float]] = field(default_factory=dict)

    @property
    def working_bytes(self) -> int:
        """Working memory of one sample at the largest leased cut."""
        return max(self.leases.values(), default=0)


@dataclass(frozen=True, eq=False)
class Reservation:
    """Working memory of one forward pass.

    Attributes:
        batch: number of samples.
        num_bytes: reserved bytes.
        loaded: model of the pass.
        started: monotonic seconds.
    """

    batch: int
    num_bytes: int
    loaded: LoadedModel
    started: float = 0.0


def check_cut(loaded: LoadedModel, cut: int) -> None:
    """Refuses a cut that the model does not have.

    Raises:
        UnsupportedError: ``cut_out_of_range``.
    """
    last = len(loaded.frozen.cuts)
    if not 1 <= cut <= last:
        raise UnsupportedError(
            "cut_out_of_range",
            f"cut is {cut}; give a number from 1 to {last}, the cuts of "
            f"{loaded.digest[:12]}",
            details={"cut": cut, "allowed": [1, last]},
        )


def touch(kept: OrderedDict[Any, Any], key: object, count: int) -> None:
    """Marks ``key`` as last used, and drops the oldest above ``count``."""
    kept.move_to_end(key)
    while len(kept) > count:
        kept.popitem(last=False)


def does_not_fit_error(
    what: str, needed: int, available: int
) -> DoesNotFitError:
    """Error for a model that can never fit, with the numbers."""
    return DoesNotFitError(
        "does_not_fit",
        f"{what} needs {needed} bytes of the device's memory, and "
        f"{available} are available",
        details={"needed_bytes": needed, "available_bytes": available},
    )
