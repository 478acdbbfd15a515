"""Limits on the cores and memory of this process.

The affinity mask and the host's memory do not show a container's limits, so
control groups are read as well (version 2 only).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
"""File that lists the process's control groups."""
_GROUPS = Path("/sys/fs/cgroup")
"""Mount point of the control groups."""
_VERSION_2_PREFIX = "0::"


def allowed_cores() -> float:
    """Returns the number of cores that this process may use.

    The size of its affinity mask, or the quota (``cpu.max``) of a control
    group if that is lower; quotas may be fractions.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for limit in _limits("cpu.max"):
        quota, period = limit.split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    return cores


def allowed_memory_bytes() -> int:
    """Returns the memory that this process may use.

    That of the host, or the lowest ``memory.max`` of the control groups if
    that is less.
    """
    host: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = _limits("memory.max")
    return min([host, *(int(limit) for limit in limits if limit != "max")])


def _limits(name: str) -> Iterator[str]:
    """Yields the limits of the process's control group and its parents."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        if line.startswith(_VERSION_2_PREFIX):
            own = _GROUPS / line.removeprefix(_VERSION_2_PREFIX).lstrip("/")
            for folder in (own, *own.parents):
                if not folder.is_relative_to(_GROUPS):
                    return
                # The root group has no limits.
                with contextlib.suppress(OSError):
                    yield (folder / name).read_text().strip()
