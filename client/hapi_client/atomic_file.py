"""Files that are whole or not there, and whether there is room for them."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from hapi_protocol.errors import ClientError

logger = logging.getLogger(__name__)

TRIAL_BYTES = 1 << 20


@contextmanager
def write_atomically(path: Path) -> Iterator[IO[bytes]]:
    """A file beside (``.part``), moved to its place where the block ends well.

    It is on the disk then; else nothing of it is left.

    Raises:
        ClientError: ``bad_configuration`` where it cannot be written.
    """
    beside = path.with_name(f"{path.name}.part")
    with _writing(path):
        try:
            with beside.open("wb") as file:
                yield file
                _to_disk(file)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Errors of the system in its block name the file."""
    try:
        yield
    except OSError as error:
        raise ClientError(
            "bad_configuration",
            f"{path} cannot be written: {error}; make room, or give a file "
            "in a folder that you may write to",
        ) from error


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """No other run on this machine has a file meanwhile.

    The lock ends with its process, in whatever way; a lock file (``.lock``)
    that is left behind hinders nobody.

    Raises:
        ClientError: ``bad_configuration`` where another run has it, or the
            folder cannot be written to.
    """
    place = path.with_name(f"{path.name}.lock")
    with _writing(path):
        file = place.open("wb")
    with file:
        if not _is_locked(file, place):
            raise ClientError(
                "bad_configuration",
                f"another run has {path} at present; wait for its end, or "
                "give this one another file",
            )
        try:
            yield
        finally:
            place.unlink(missing_ok=True)


def _is_locked(file: IO[bytes], place: Path) -> bool:
    """Whether the lock is had; where there are none, nobody is kept off."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had it may have removed the file in between.
        return os.path.samestat(os.fstat(file.fileno()), place.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:
        logger.warning(
            "%s cannot be locked: %s; see to it that no other run has the "
            "same file",
            place,
            error,
        )
        return True


def check_writable(path: Path, num_bytes: int = TRIAL_BYTES) -> None:
    """Tries to write so much where a file shall be, and leaves nothing.

    Raises:
        ClientError: ``bad_configuration``, before hours of work.
    """
    if not path.parent.is_dir():
        raise ClientError("bad_configuration", f"{path.parent} is no folder")
    with _writing(path), tempfile.TemporaryFile(dir=path.parent) as file:
        for start in range(0, num_bytes, TRIAL_BYTES):
            file.write(bytes(min(TRIAL_BYTES, num_bytes - start)))
        _to_disk(file)


def _to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
