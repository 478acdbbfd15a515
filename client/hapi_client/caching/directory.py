"""A directory of cached features, shared by the processes of a host."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hapi_splitter.private_folder import PrivateFolder, is_folder
from hapi_splitter.units import bytes_text

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
FREE_SHARE = 0.5
"""Default limit: share of what is free on the disk or in the cache."""
LOCK_SECONDS = 2.0
"""Longest wait for another process to append."""
_ENTRY = re.compile("[0-9a-f]{32}")
_LOCK, _USE, _FACTS = "lock", "use", "facts.json"


@dataclass(frozen=True)
class CacheEntry:
    """Features of one model, cut and transform, as listed.

    Attributes:
        path: folder of the entry.
        num_bytes: size on the disk.
        used: Unix time at which a job last opened it.
        facts: model, data and precision; empty if they cannot be read.
    """

    path: Path
    num_bytes: int
    used: float
    facts: Mapping[str, Any]


class CacheDirectory:
    """Entries within a size limit; the least recently used leave first.

    Args:
        path: the directory; made if it is absent.
        limit_bytes: size limit; None for half of what the disk has free or
            the cache has taken.

    Raises:
        OSError: if it cannot be used.
    """

    def __init__(
        self, path: str | os.PathLike[str], limit_bytes: int | None = None
    ) -> None:
        folder = PrivateFolder(path, "samples", FORMAT_VERSION)
        folder.make()
        self.path = folder.path
        with self.locked():
            used = sum(each.num_bytes for each in self.entries())
        if limit_bytes is None:
            free = shutil.disk_usage(self.path).free
            limit_bytes = int(FREE_SHARE * (free + used))
        self.limit_bytes = limit_bytes

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Excludes other processes that make or remove entries."""
        with _locked(self.path / _LOCK):
            yield

    def entries(self) -> list[CacheEntry]:
        """Returns all entries, the least recently used first."""
        found = []
        for folder in self.path.iterdir():
            with suppress(FileNotFoundError):
                if _ENTRY.fullmatch(folder.name) and is_folder(folder):
                    found.append(_listed(folder))
        return sorted(found, key=lambda each: each.used)

    def open(self, facts: Mapping[str, Any]) -> tuple[Path, int]:
        """Returns the folder of some facts, and a handle that keeps it.

        Made if it is absent or its facts are damaged.  It is not removed by
        others until the handle, a file descriptor, is closed.

        Raises:
            OSError: if it cannot be made.
        """
        text = json.dumps(facts, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        folder = self.path / name
        with self.locked():
            file = folder / _FACTS
            if is_folder(folder) and not _holds(file, text):
                logger.warning(
                    "%s is damaged; its features are computed again",
                    folder,
                )
                _remove(folder)
            folder.mkdir(mode=0o700, exist_ok=True)
            if not file.exists():
                file.write_text(text)
            os.utime(file)
            handle = os.open(folder / _USE, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                raise
        return folder, handle

    def room_bytes(self, wanted_bytes: int) -> int:
        """Removes unused entries for a new file; returns how much it may have.

        The caller is :meth:`locked`.
        """
        entries = self.entries()
        used = sum(each.num_bytes for each in entries)
        for entry in entries:
            if used + wanted_bytes <= self.limit_bytes:
                break
            if _remove_unused(entry.path):
                used -= entry.num_bytes
        return max(0, min(wanted_bytes, self.limit_bytes - used))

    def warn_full(self) -> None:
        """Tells that nothing can be removed for what a job computes."""
        logger.warning(
            "the cache %s is full: its limit is %s, and running jobs use all "
            "of it; what does not fit is read again",
            self.path,
            bytes_text(self.limit_bytes),
        )

    def purge(self) -> tuple[int, int]:
        """Removes all entries that no job uses.

        Returns:
            Numbers of the entries removed and of those in use.
        """
        with self.locked():
            removed = [_remove_unused(each.path) for each in self.entries()]
        return sum(removed), len(removed) - sum(removed)


def unusable_message(path: str | os.PathLike[str], error: Exception) -> str:
    """Returns the warning of a directory that cannot be used."""
    reason = getattr(error, "strerror", None) or error
    return (
        f"no features are cached in {os.fspath(path)}: {reason}; make room, "
        "or give another cache_directory"
    )


@contextmanager
def folder_locked(folder: Path) -> Iterator[None]:
    """Excludes other processes that append to an entry.

    Raises:
        TimeoutError: if one does so for longer than :data:`LOCK_SECONDS`.
        OSError: if the file system has no locks.
    """
    with _locked(folder / _LOCK):
        yield


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        errno.ETIMEDOUT,
                        f"another process holds {path}",
                    ) from None
                time.sleep(0.005)
        yield
    finally:
        os.close(file)  # which also unlocks it


def _listed(folder: Path) -> CacheEntry:
    file = folder / _FACTS
    facts: Any = {}
    with suppress(OSError, ValueError):
        facts = json.loads(file.read_text())
    used = (file if file.exists() else folder).stat().st_mtime
    num_bytes = sum(512 * each.lstat().st_blocks for each in folder.iterdir())
    return CacheEntry(
        folder, num_bytes, used, facts if isinstance(facts, dict) else {}
    )


def _holds(file: Path, text: str) -> bool:
    try:
        return file.read_bytes() == text.encode()
    except FileNotFoundError:
        return False


def _remove_unused(folder: Path) -> bool:
    """Removes an entry; returns False if it is in use.

    The caller is :meth:`CacheDirectory.locked`, so nobody opens it meanwhile.
    """
    handle = os.open(folder / _USE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        # First, as NFS keeps a file that is open, under another name.
        os.close(handle)
    return _remove(folder)


def _remove(folder: Path) -> bool:
    """Removes a folder; returns False if NFS keeps files that are open."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True
