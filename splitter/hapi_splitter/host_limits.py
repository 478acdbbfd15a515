"""What this process may use of its host: cores and memory.

A container's limits are those of its control groups, and the affinity mask
and the size of the host's memory know nothing of them. Control groups of
version 2 are read; those of version 1 are not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_UNIFIED = "0::"
"""Begins the line of version 2."""


def allowed_cores(
    membership: Path = _MEMBERSHIP, groups: Path = _GROUPS
) -> float:
    """Cores that this process may use.

    As many as its affinity mask has, or fewer, and maybe a fraction, where a
    control group has a quota (``cpu.max``).

    Args:
        membership: the process's list of control groups.
        groups: where they are mounted.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for limit in _limits("cpu.max", membership, groups):
        quota, period = limit.split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    return cores


def allowed_memory_bytes(
    membership: Path = _MEMBERSHIP, groups: Path = _GROUPS
) -> int | None:
    """The least ``memory.max`` of the control groups; None without one.

    Args:
        membership, groups: as for :func:`allowed_cores`.
    """
    limits = _limits("memory.max", membership, groups)
    return min((int(each) for each in limits if each != "max"), default=None)


def _limits(name: str, membership: Path, groups: Path) -> Iterator[str]:
    """Of the process's own group and of those that it lies in."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        if line.startswith(_UNIFIED):
            own = groups / line.removeprefix(_UNIFIED).lstrip("/")
            for folder in (own, *own.parents):
                if not folder.is_relative_to(groups):
                    return
                # The outermost group has none, nor has one of version 1.
                with contextlib.suppress(OSError):
                    yield (folder / name).read_text().strip()
