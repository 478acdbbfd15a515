"""Device of a tier's processes, and CPU seconds of processes (proc(5))."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

DEVICE_VARIABLE = "HAPI_BENCHMARKS_DEVICE"
CPU = "cpu"


def client_device() -> str:
    """Device of this client process: of the environment, or else the CPU."""
    return os.environ.get(DEVICE_VARIABLE, CPU)


def session_seconds(sessions: Collection[int]) -> float:
    """CPU seconds of all processes of some sessions, ended children too."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may contain blanks.
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended
        if int(fields[3]) in sessions:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def scheduled_seconds(pid: int) -> float:
    """CPU seconds of a process's threads, to the nanosecond (schedstat)."""
    nanoseconds = sum(
        int(path.read_text().split()[0])
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )
    return nanoseconds * 1e-9


def status_bytes(key: str, pid: int | str = "self") -> int:
    """A size in a process's ``/proc/PID/status``, such as ``VmHWM``.

    Raises:
        ValueError: there is no such entry.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise ValueError(f"/proc/{pid}/status has no {key}")
