"""Temporary folders named after their owner, and their removal.

``hapi-testbed-PID-TICKS-…``: number and start time of the owning process.  If
that process has ended, the folder is stale.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from hapi_cluster import Cluster
from hapi_cluster.errors import NotAClusterError

PREFIX = "hapi-testbed-"
_NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)-\w+")
REMOVAL_SECONDS = 5.0
POLL_SECONDS = 0.05


def memory_folder() -> Path:
    """A folder in memory, or else the temporary folder."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def new_folder() -> Path:
    """Creates a private folder of this process."""
    owner = f"{os.getpid()}-{_start_ticks(os.getpid())}-"
    return Path(tempfile.mkdtemp(prefix=PREFIX + owner, dir=memory_folder()))


def owner_lives(folder: Path) -> bool:
    """True if the process of the folder's name still runs."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        return False
    return _start_ticks(int(match[1])) == int(match[2])


def _start_ticks(pid: int) -> int | None:
    """Start time of a process, in clock ticks since boot."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in brackets, may contain spaces and brackets.
    state, *fields = stat.rpartition(") ")[2].split()
    return None if state in "ZXx" else int(fields[18])


def remove_stale() -> list[Path]:
    """Ends clusters of killed runs; removes and returns their folders."""
    stale = [
        folder
        for folder in sorted(memory_folder().glob(f"{PREFIX}*"))
        if folder.is_dir() and not owner_lives(folder)
    ]
    for folder in stale:
        for inside in folder.glob("*/"):
            with contextlib.suppress(NotAClusterError):
                Cluster(inside).stop()
        remove_folder(folder)
    return stale


def remove_folder(folder: Path) -> None:
    """Removes a folder that ending processes may still write to.

    Raises:
        OSError: it still exists after five seconds.
    """
    deadline = time.monotonic() + REMOVAL_SECONDS
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
