"""Stores of splits: a folder of files, and the memory of a process.

A file appears complete or not at all, whichever process ends when, and its
reader checks it; so reading takes no lock.  One process at a time makes a
split, such as the first of a job's ranks on a host; the others wait for it.
The least recently used go first.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import filelock

from hapi_splitter.private_folder import PrivateFolder

logger = logging.getLogger(__name__)

MAX_BYTES = 512 << 20
"""Most bytes of all splits on disk."""
MAX_MEMORY_BYTES = 64 << 20
MAX_MEMORY_ENTRIES = 4
MAX_WAIT_SECONDS = 60.0
"""Longest wait for another process that makes the same split."""
FORMAT_VERSION = 3
_NAME = re.compile("[0-9a-z]+[.]")
_SUFFIX = ".split"
_PART_SUFFIX = ".part"
_LOCK_SUFFIX = ".lock"
_MAX_PART_SECONDS = 3600.0


class SplitStore(Protocol):
    """Bytes by key.  Methods raise ``OSError``."""

    def read(self, key: str) -> bytes | None: ...

    def write(self, key: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Stores an entry, unless it is larger than all may be."""

    def remove(self, key: str) -> None: ...

    def making(self, key: str) -> AbstractContextManager[bool]:
        """Waits while another process makes an entry.

        Yields:
            True if there was one to wait for.
        """


@dataclass(frozen=True)
class StoredSplit:
    """A split on disk.

    Args:
        key: hexadecimal.
        length_bytes: size of the file.
        used: time of the last use, seconds since 1970.
    """

    key: str
    length_bytes: int
    used: float


class DiskStore:
    """Splits as files of a folder that only its owner may write to.

    Args:
        parent: of the folder, which is created on the first write.
        max_bytes: most bytes of all files.
    """

    def __init__(self, parent: Path, max_bytes: int = MAX_BYTES) -> None:
        self._private = PrivateFolder(parent, "splits", FORMAT_VERSION)
        self.folder = self._private.path
        self._max_bytes = max_bytes

    def read(self, key: str) -> bytes | None:
        """Returns an entry, None if there is none."""
        try:
            with self._private.opened() as folder:
                flags = os.O_RDONLY | os.O_NOFOLLOW
                file = os.open(key + _SUFFIX, flags, dir_fd=folder)
                with open(file, "rb") as content:
                    with contextlib.suppress(OSError):  # a read-only disk
                        os.utime(file)
                    return content.read()
        except FileNotFoundError:
            return None

    def write(self, key: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Stores an entry, unless it is larger than all may be."""
        self._private.make()
        part = f"{key}.{secrets.token_hex(8)}{_PART_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with self._private.opened() as opened:
            file = os.open(part, flags, 0o600, dir_fd=opened)
            try:
                with open(file, "wb") as content:
                    for piece in pieces:
                        content.write(piece)
                    length = content.tell()
                if length <= self._max_bytes:
                    os.replace(
                        part,
                        key + _SUFFIX,
                        src_dir_fd=opened,
                        dst_dir_fd=opened,
                    )
            finally:
                _unlink(part, opened)
            self._evict(opened)

    def remove(self, key: str) -> None:
        with self._private.opened() as folder:
            _unlink(key + _SUFFIX, folder)

    @contextlib.contextmanager
    def making(self, key: str) -> Iterator[bool]:
        """Waits while another process makes an entry, at most for a minute.

        Without locks in the file system nobody waits.

        Yields:
            True if there was one to wait for.
        """
        path = self.folder / (key + _LOCK_SUFFIX)
        lock = filelock.FileLock(path)
        has_waited = False
        try:
            self._private.make()
            with self._private.opened():
                lock.acquire(timeout=0)
        except filelock.Timeout:
            has_waited = True
            logger.info("another process splits the same model; waiting")
            try:
                lock.acquire(timeout=MAX_WAIT_SECONDS)
            except OSError as error:  # a timeout is one, too
                logger.info("this process splits as well: %s", error)
        except (OSError, NotImplementedError) as error:
            # The lock only saves work; filelock's error without locks in the
            # file system is the second one.
            logger.info("splits are not locked: %s", error)
        try:
            yield has_waited
        finally:
            if lock.is_locked:
                with contextlib.suppress(OSError):
                    path.unlink()
            lock.release()

    def entries(self) -> list[StoredSplit]:
        """Returns all splits, the most recently used first.

        Raises:
            OSError: if the folder is not the user's own.
        """
        try:
            with self._private.opened() as folder:
                return _entries(folder)
        except FileNotFoundError:
            return []

    def purge(self) -> int:
        """Deletes all splits and returns their number.

        Raises:
            OSError: if they cannot be deleted.
        """
        entries = self.entries()
        for each in entries:
            self.remove(each.key)
        return len(entries)

    def _evict(self, folder: int) -> None:
        total = 0
        for each in _entries(folder):
            total += each.length_bytes
            if total > self._max_bytes:
                _unlink(each.key + _SUFFIX, folder)
        # Processes that were killed leave these.
        for suffix in (_PART_SUFFIX, _LOCK_SUFFIX):
            for each in _files(folder, suffix):
                if time.time() - each.used > _MAX_PART_SECONDS:
                    _unlink(each.key + suffix, folder)


def disk_store(cache_directory: str | Path | None = None) -> DiskStore | None:
    """Returns the splits on disk; None if they are not stored there.

    The folder is ``splits-3`` in ``HAPI_CACHE_DIR``, else in ``hapi`` in the
    user's cache directory (``XDG_CACHE_HOME`` or ``~/.cache``, as in the XDG
    Base Directory Specification).

    Args:
        cache_directory: instead of ``HAPI_CACHE_DIR``; either may be "", for
            none.
    """
    if cache_directory is None:
        cache_directory = os.environ.get("HAPI_CACHE_DIR")
    if cache_directory is not None:
        return DiskStore(Path(cache_directory)) if cache_directory else None
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():
        try:
            caches = Path.home() / ".cache"
        except RuntimeError:  # no home directory
            return None
    return DiskStore(caches / "hapi")


class MemoryStore:
    """The last few splits of this process."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}

    def read(self, key: str) -> bytes | None:
        return self._entries.get(key)

    def write(self, key: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Stores an entry, unless it is larger than all may be."""
        self._entries[key] = b"".join(pieces)
        for oldest in list(self._entries):
            total = sum(map(len, self._entries.values()))
            is_over = len(self._entries) > MAX_MEMORY_ENTRIES
            if is_over or total > MAX_MEMORY_BYTES:
                self._entries.pop(oldest, None)

    def remove(self, key: str) -> None:
        self._entries.pop(key, None)

    def making(self, key: str) -> AbstractContextManager[bool]:
        """Does not wait: no other process reads this memory."""
        return contextlib.nullcontext(False)


@functools.cache
def memory_store() -> MemoryStore:
    """Returns the store of this process."""
    return MemoryStore()


def _entries(folder: int) -> list[StoredSplit]:
    found = _files(folder, _SUFFIX)
    return sorted(found, key=lambda each: each.used, reverse=True)


def _files(folder: int, suffix: str) -> list[StoredSplit]:
    found = []
    for name in os.listdir(folder):
        # Nothing else is deleted.
        if _NAME.match(name) and name.endswith(suffix):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                key = name.removesuffix(suffix)
                used = status.st_mtime
                found.append(StoredSplit(key, status.st_size, used))
    return found


def _unlink(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
