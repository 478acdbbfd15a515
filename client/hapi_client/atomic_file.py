"""Atomic writes, file locks and checks for free space."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from hapi_protocol.errors import ClientError

logger = logging.getLogger(__name__)

TRIAL_BYTES = 1 << 20
_POLL_SECONDS = 0.02


@contextmanager
def write_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Opens a ``.part`` file that replaces ``path`` if the block succeeds.

    It is synced to disk first.  If the block fails, nothing is left of it.

    Raises:
        ClientError: ``bad_configuration`` if it cannot be written.
    """
    path = path.resolve()
    part = path.with_name(f"{path.name}.part")
    with _naming_file(path):
        try:
            with part.open("wb") as file:
                yield file
                _sync(file)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    """Turns an OSError of the block into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise ClientError(
            "bad_configuration",
            f"{path} cannot be written: {error}; make room, or choose a "
            "folder that you may write to",
        ) from error


@contextmanager
def file_lock(
    path: Path, wait_seconds: float = 0.0, *, required: bool = True
) -> Iterator[bool]:
    """Locks a file against other runs.

    Also on other machines, if its file system has locks.  The lock ends with
    the process; a lock file (``.lock``) left behind by a crash blocks nobody.
    Yields True, or False without the lock.

    Args:
        path: the file.
        wait_seconds: longest wait for another run that has the lock.
        required: False to go on without the lock.

    Raises:
        ClientError: ``bad_configuration`` if another run has the lock, or
            the folder cannot be written to.
    """
    lock_path = path.with_name(f"{path.name}.lock")
    deadline = time.monotonic() + wait_seconds
    while True:
        with _naming_file(path):
            file = lock_path.open("wb")
        with file:
            if _acquire(file, lock_path):
                try:
                    yield True
                finally:
                    lock_path.unlink(missing_ok=True)
                return
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_SECONDS)
    if required:
        raise ClientError(
            "bad_configuration",
            f"another run uses {path}; wait until it ends, or choose "
            "another file",
        )
    yield False


def _acquire(file: IO[bytes], lock_path: Path) -> bool:
    """Returns True if the lock is acquired, or locks are not supported."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous owner may have removed the file in the meantime.
        return os.path.samestat(os.fstat(file.fileno()), lock_path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:
        logger.warning(
            "%s cannot be locked: %s; make sure that no other run uses the "
            "same file",
            lock_path,
            error,
        )
        return True


def check_writable(path: Path, num_bytes: int = TRIAL_BYTES) -> None:
    """Writes ``num_bytes`` to a temporary file in the folder of ``path``.

    Call it before hours of work.

    Raises:
        ClientError: ``bad_configuration`` if it cannot be written.
    """
    path = path.resolve()
    if not path.parent.is_dir():
        raise ClientError(
            "bad_configuration", f"{path.parent} is not a folder"
        )
    if path.exists() and not path.is_file() and not path.is_dir():
        # Replacing a device such as /dev/null would break the machine.
        raise ClientError(
            "bad_configuration", f"{path} is no regular file; give another"
        )
    with _naming_file(path), tempfile.TemporaryFile(dir=path.parent) as file:
        for start in range(0, num_bytes, TRIAL_BYTES):
            file.write(bytes(min(TRIAL_BYTES, num_bytes - start)))
        _sync(file)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
