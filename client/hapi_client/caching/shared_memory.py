"""A cache directory in memory, shared by the ranks of a run on a host.

Each rank trains on another part of the samples in each epoch, so ranks that
cache for themselves compute what others have computed.  ``/dev/shm`` is
memory; a process of its own removes the directory when the last rank has
ended, even if all of them were killed, and a later run does if that was, too.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hapi_client.caching.directory import FORMAT_VERSION
from hapi_splitter.private_folder import PrivateFolder

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (owners are checked)
FREE_SHARE = 0.5
"""Largest share of what is free there."""
JOIN_SECONDS = 10.0
"""Longest wait for the end of an earlier run's directory."""
_RUN = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
_USE = "use"


def local_ranks(environ: Mapping[str, str]) -> int:
    """Returns the ranks on this host, as torchrun states them; at least 1."""
    with suppress(ValueError):
        return max(1, int(environ.get("LOCAL_WORLD_SIZE") or 1))
    return 1


def shared_directory(
    environ: Mapping[str, str], rank_bytes: int
) -> tuple[Path, int] | None:
    """Joins the directory of this run, which is made if it is absent.

    It exists until this process and all other ranks have ended.

    Args:
        environ: environment, with the variables of torchrun or without.
        rank_bytes: memory that each rank may take.

    Returns:
        The directory and its size limit in bytes.  None for a single rank,
        or if there is no shared memory, too little of it, or no ``flock``
        command; the ranks then cache for themselves.
    """
    ranks = local_ranks(environ)
    if ranks == 1 or not rank_bytes:
        return None
    run = " ".join(environ.get(name, "") for name in _RUN)
    name = hashlib.sha256(run.encode()).hexdigest()[:16]
    folder = SHARED_MEMORY / f"hapi-{os.geteuid()}-{name}-{FORMAT_VERSION}"
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
        limit = min(ranks * rank_bytes, int(FREE_SHARE * free))
        if limit >= rank_bytes and shutil.which("flock"):
            _join(folder)
            return folder, limit
        reason = f"{free} bytes are free there"
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error)
    logger.info(
        "each rank caches for itself, not in %s: %s", SHARED_MEMORY, reason
    )
    return None


@functools.cache
def _join(folder: Path) -> int:
    """Returns a locked descriptor, which this process keeps open."""
    for other in SHARED_MEMORY.glob(f"hapi-{os.geteuid()}-*-{FORMAT_VERSION}"):
        _remove_unused(other)
    use = folder / _USE
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        # Without its mark, or gone, if an earlier run of the same name is just
        # being removed.
        with suppress(FileNotFoundError, FileExistsError):
            PrivateFolder.at(folder).make()
            is_new = not use.exists()
            handle = os.open(use, os.O_RDWR | os.O_CREAT, 0o600)
            if _locked(handle, use, fcntl.LOCK_SH):
                if is_new:
                    _remove_after_run(folder, use)
                return handle
            os.close(handle)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder} does not end, or is not HAPI's")
        time.sleep(0.05)


def _locked(handle: int, use: Path, how: int) -> bool:
    """Locks a file; False if others hold it, or it was removed meanwhile."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return use.exists() and use.stat().st_ino == os.fstat(handle).st_ino


def _remove_unused(folder: Path) -> None:
    """Removes the directory of a run that ended with all its processes."""
    use = folder / _USE
    with suppress(OSError), PrivateFolder.at(folder).opened() as opened:
        handle = os.open(_USE, os.O_RDWR | os.O_NOFOLLOW, dir_fd=opened)
        try:
            if _locked(handle, use, fcntl.LOCK_EX):
                shutil.rmtree(folder)
        finally:
            os.close(handle)


def _remove_after_run(folder: Path, use: Path) -> None:
    """Starts a process that waits for the end of all ranks.

    Ranks that begin together may start one each; the first to get the lock
    removes the folder.
    """
    subprocess.run(
        ["sh", "-c", 'flock -x "$1" rm -rf "$2" &', "sh", use, folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
    )
