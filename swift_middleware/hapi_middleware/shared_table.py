"""Numbers that all processes of one Swift server know, by key.

Swift's servers load their filters once before they fork.  A table that is made
then lies in anonymous memory that the children share: no file is left behind,
and no other user can read it.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

_ENTRIES = 8
"""Entries of a bucket.  With half of a table in use, one bucket in fifty has
more keys; the entry that ends first is then lost."""
_ENTRY = struct.Struct("=Qdd")
_BUCKET_BYTES = _ENTRIES * _ENTRY.size


class SlotEntry(NamedTuple):
    """A number that a table has for a key.

    Attributes:
        until: end of its use, in seconds of the caller's clock.
        value: a number.
    """

    until: float
    value: float


class SharedTable:
    """Numbers by key; the memory of each is taken when it is first used.

    Args:
        num_buckets: each has room for eight keys, of 24 bytes.
    """

    def __init__(self, num_buckets: int) -> None:
        self._num_buckets = num_buckets
        self._file = os.memfd_create("hapi")
        os.ftruncate(self._file, num_buckets * _BUCKET_BYTES)
        self._bytes = mmap.mmap(self._file, num_buckets * _BUCKET_BYTES)

    def get(self, key: str) -> SlotEntry | None:
        """The entry of a key, whether it has ended or not."""
        start, number = self._place(key)
        for stored, until, value in self._bucket(start):
            if stored == number:
                return SlotEntry(until, value)
        return None

    def put(self, key: str, until: float, value: float = 0.0) -> None:
        """Replaces the entry of a key."""
        start, number = self._place(key)
        with self._locked(start):
            self._write(start, number, until, value)

    def put_new(self, key: str, until: float, now: float) -> bool:
        """Adds a key, unless it has an entry that has not ended.

        Args:
            key: the key.
            until: end of the new entry.
            now: the time.

        Returns:
            True for one caller among all processes.
        """
        start, number = self._place(key)
        with self._locked(start):
            for stored, end, _ in self._bucket(start):
                if stored == number and end > now:
                    return False
            self._write(start, number, until, 0.0)
        return True

    def _place(self, key: str) -> tuple[int, int]:
        """Offset of the bucket, and the number that stands for the key."""
        digest = hashlib.blake2b(key.encode(), digest_size=12).digest()
        bucket = int.from_bytes(digest[8:], "big") % self._num_buckets
        # 0 is a free entry.
        return bucket * _BUCKET_BYTES, int.from_bytes(digest[:8], "big") or 1

    def _bucket(self, start: int) -> Iterator[tuple[int, float, float]]:
        return _ENTRY.iter_unpack(self._bytes[start : start + _BUCKET_BYTES])

    def _write(
        self, start: int, number: int, until: float, value: float
    ) -> None:
        entries = list(self._bucket(start))
        ends = [
            float("-inf") if stored == number else end * bool(stored)
            for stored, end, _ in entries
        ]
        offset = start + _ENTRY.size * ends.index(min(ends))
        _ENTRY.pack_into(self._bytes, offset, number, until, value)

    @contextmanager
    def _locked(self, start: int) -> Iterator[None]:
        """Holds a bucket for microseconds; a process that dies frees it."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, start)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, start)


@cache
def shared_table(name: str, num_buckets: int) -> SharedTable:
    """The table of a name, the same one in all processes that fork later."""
    del name
    return SharedTable(num_buckets)
