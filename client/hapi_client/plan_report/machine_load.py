"""Whether this machine did something else while it was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
_BUSY_FIELDS = (1, 2, 3, 6, 7)
"""user, nice, system, irq and softirq; proc(5). What the host takes from a
virtual machine (steal) is not known to be another's."""


@dataclass
class BackgroundLoad:
    """Of all other processes.

    Attributes:
        cores: that they used on average; 0 where the system does not tell.
    """

    cores: float = 0.0


@contextmanager
def other_work() -> Iterator[BackgroundLoad]:
    """Measures what others compute meanwhile; set at the end."""
    found = BackgroundLoad()
    started, before, own = time.monotonic(), _machine_seconds(), _own_seconds()
    yield found
    seconds = time.monotonic() - started
    spent = _machine_seconds() - before - (_own_seconds() - own)
    if seconds > 0:
        found.cores = max(0.0, spent / seconds)


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _machine_seconds() -> float:
    """CPU seconds of all processes since the machine began; 0 if unknown."""
    try:
        fields = STAT.read_text().splitlines()[0].split()
    except OSError:
        return 0.0
    ticks = sum(int(fields[place]) for place in _BUSY_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")
