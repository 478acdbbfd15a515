"""Placement: the order in which devices are tried for a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SPREAD_JOBS = 2
"""A device without the model is preferred if it has this many jobs fewer: the
copy costs less than waiting for them."""


@dataclass(frozen=True)
class DeviceState:
    """The state of a device.

    Attributes:
        in_service: the device takes jobs.
        has_model: the model is in its memory.
        num_jobs: number of jobs that hold models there.
        has_late_pass: a pass runs there for longer than ``pass_seconds``.
    """

    in_service: bool
    has_model: bool
    num_jobs: int
    has_late_pass: bool = False


def devices_in_order(devices: Sequence[DeviceState]) -> list[int]:
    """Returns the numbers of the devices to try, the best first.

    First comes the least busy one that has the model, unless another one is
    less busy by :data:`SPREAD_JOBS`; then the others, the least busy first.
    Devices with a late pass come last: the pass may never end.
    """

    def rank(number: int) -> tuple[bool, float, int]:
        device = devices[number]
        return device.has_late_pass, _cost(device), number

    usable = [n for n, device in enumerate(devices) if device.in_service]
    return sorted(usable, key=rank)


def _cost(device: DeviceState) -> float:
    # Half a job less: at equal cost a device with the model comes first.
    missing = 0.0 if device.has_model else SPREAD_JOBS - 0.5
    return device.num_jobs + missing
