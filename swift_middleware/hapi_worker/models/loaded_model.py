"""A model in a device's memory, and what is remembered of its passes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hapi_protocol.errors import DoesNotFitError, UnsupportedError
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.profiling.memory_model import Needs

Site = tuple[int, str]
"""Cut, and dtype of the features."""


@dataclass
class LoadedModel:
    """A model in memory; guarded by the residency's lock.

    Attributes:
        load_seconds: to check the package, load it and move it to the device.
        leases: jobs that hold it, by the working bytes of one sample.
        prefixes: the last used, by cut.
        needs: the last used.
        caps: largest batch that is tried, and until when.
    """

    digest: str
    frozen: FrozenGraph
    parameter_bytes: int
    load_seconds: float = 0.0
    leases: dict[Any, int] = field(default_factory=dict)
    prefixes: OrderedDict[int, nn.Module] = field(default_factory=OrderedDict)
    needs: OrderedDict[Site, Needs] = field(default_factory=OrderedDict)
    caps: dict[Site, tuple[int, float]] = field(default_factory=dict)

    @property
    def working_bytes(self) -> int:
        return max(self.leases.values(), default=0)


@dataclass(frozen=True, eq=False)
class Reservation:
    """Working memory of one forward pass.

    Attributes:
        batch: samples that it is for.
        resident: whose pass it is.
        started: monotonic seconds.
    """

    batch: int
    num_bytes: int
    loaded: LoadedModel
    started: float = 0.0


def check_cut(loaded: LoadedModel, cut: int) -> None:
    """
    Raises:
        UnsupportedError: ``cut_out_of_range``.
    """
    last = len(loaded.frozen.cuts)
    if not 1 <= cut <= last:
        raise UnsupportedError(
            "cut_out_of_range",
            f"cut {cut}: {loaded.digest[:12]} has cuts 1 to {last}",
            details={"cut": cut, "allowed": [1, last]},
        )


def touch(kept: OrderedDict[Any, Any], key: object, count: int) -> None:
    """Makes ``key`` the last used, and drops the first ones."""
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
