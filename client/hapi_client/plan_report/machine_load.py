"""CPU use of other processes during a measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
_BUSY_FIELDS = (1, 2, 3, 6, 7)
"""Columns user, nice, system, irq and softirq; see proc(5). Time that a host
takes from a virtual machine (steal) is not counted."""


@dataclass
class BackgroundLoad:
    """CPU use of all other processes.

    Attributes:
        cores: mean number of cores in use; 0 if the system does not report
            it.
    """

    cores: float = 0.0


@contextmanager
def background_load() -> Iterator[BackgroundLoad]:
    """Measures the load inside the context; set when it ends."""
    load = BackgroundLoad()
    started, before, own = time.monotonic(), _machine_seconds(), _own_seconds()
    yield load
    seconds = time.monotonic() - started
    cpu_seconds = _machine_seconds() - before - (_own_seconds() - own)
    if seconds > 0:
        load.cores = max(0.0, cpu_seconds / seconds)


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _machine_seconds() -> float:
    """Returns CPU seconds of all processes since boot; 0 if unknown."""
    try:
        fields = STAT.read_text().splitlines()[0].split()
    except OSError:
        return 0.0
    ticks = sum(int(fields[column]) for column in _BUSY_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")
