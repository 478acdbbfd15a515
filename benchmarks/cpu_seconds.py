"""CPU seconds of processes, as proc(5) has them."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path


def session_seconds(sessions: Collection[int]) -> float:
    """Of all processes of some sessions, and what they waited for."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold blanks.
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended
        if int(fields[3]) in sessions:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
