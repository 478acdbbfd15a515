"""Stores of splits: a folder of files, and the memory of a process.

A file appears complete or not at all, whichever process ends when, and its
reader checks it; so reading takes no lock.  One process at a time makes a
split, such as the first of a job's ranks on a host; the others wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from hapi_splitter.private_folder import (
    LOCK_SUFFIX,
    PART_SUFFIX,
    PrivateFolder,
    unlink,
)

logger = logging.getLogger(__name__)

MAX_BYTES = 512 << 20
"""Most bytes of all splits on disk."""
MAX_MEMORY_BYTES = 64 << 20
MAX_MEMORY_ENTRIES = 4
MAX_WAIT_SECONDS = 60.0
"""Longest wait for another process that makes the same split."""
FORMAT_VERSION = 3


class DiskStore(PrivateFolder):
    """Splits as files of a folder that only its owner may write to.

    Args:
        parent: parent of the folder, which is created on the first write.
        max_bytes: most bytes of all files.
    """

    def __init__(self, parent: Path, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(parent, "splits", FORMAT_VERSION, ".split", max_bytes)

    def read(self, key: str) -> bytes | None:
        """Returns an entry, None if there is none."""
        try:
            with self.opened() as folder:
                flags = os.O_RDONLY | os.O_NOFOLLOW
                file = os.open(key + self.suffix, flags, dir_fd=folder)
                with open(file, "rb") as content:
                    with contextlib.suppress(OSError):  # a read-only disk
                        os.utime(file)
                    return content.read()
        except FileNotFoundError:
            return None

    def write(self, key: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Stores an entry, unless it is larger than all may be."""
        self.make()
        part = f"{key}.{secrets.token_hex(8)}{PART_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with self.opened() as folder:
            file = os.open(part, flags, 0o600, dir_fd=folder)
            try:
                with open(file, "wb") as content:
                    content.writelines(pieces)
                    length = content.tell()
                if length <= self.limit_bytes:
                    os.replace(
                        part,
                        key + self.suffix,
                        src_dir_fd=folder,
                        dst_dir_fd=folder,
                    )
            finally:
                unlink(part, folder)
        self.evict()

    @contextlib.contextmanager
    def making(self, key: str) -> Iterator[bool]:
        """Waits while another process makes an entry, at most for a minute.

        Without locks in the file system nobody waits.

        Yields:
            True if there was one to wait for.
        """
        name = key + LOCK_SUFFIX
        with contextlib.ExitStack() as stack:
            has_waited = False
            try:
                self.make()
                lock = self.locked(name, MAX_WAIT_SECONDS)
                has_waited = stack.enter_context(lock)
                folder = stack.enter_context(self.opened())
                stack.callback(unlink, name, folder)
            except OSError as error:  # The lock only saves work.
                has_waited = isinstance(error, TimeoutError)
                logger.info("splits are not locked: %s", error)
            yield has_waited


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
