"""Cached features and samples of this process, shared by its jobs.

Rows in memory outlive the job that computed them, so that the next job of a
notebook or a sweep finds them; the least recently used leave when another job
needs room.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

TakeMemory = Callable[[int, int], int]
"""Takes memory for at least, and at most, given numbers of rows; returns the
number, or 0."""


class Cached(Protocol):
    """Rows of features, or bytes of samples."""

    def close(self) -> None:
        """Frees memory and files."""


CachedType = TypeVar("CachedType", bound=Cached)


class CachePool:
    """Cached objects, by a key of what determines them.  Thread-safe."""

    def __init__(self) -> None:
        self._reset()
        # A forked child has its own: threads of its parent may hold the lock.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._rows: OrderedDict[str, Cached] = OrderedDict()
        self._users: Counter[str] = Counter()
        self._abandoned: deque[str] = deque()
        self._limits: dict[str, int] = {}
        # Not asked of the rows, which call this with their lock held.
        self._taken: Counter[str] = Counter()

    def open(
        self,
        key: str,
        memory_limit_bytes: int,
        row_bytes: int,
        make: Callable[[TakeMemory], CachedType],
    ) -> CachedType:
        """Returns what is cached for a key, until :meth:`release`.

        Args:
            key: what determines it; of one type of objects.
            memory_limit_bytes: memory of the whole pool up to which it may
                take some.
            row_bytes: bytes of one row.
            make: makes it if it is not there.
        """
        with self._lock:
            self._release_abandoned()
            self._limits[key] = memory_limit_bytes
            if key not in self._rows:
                self._rows[key] = make(
                    lambda least, most: self._take(key, row_bytes, least, most)
                )
            self._rows.move_to_end(key)
            self._users[key] += 1
            return cast(CachedType, self._rows[key])

    def release(self, key: str) -> None:
        """Ends one use."""
        self.abandon(key)
        with self._lock:
            self._release_abandoned()

    def abandon(self, key: str) -> None:
        """Ends one use, of a user that the garbage collector has found.

        Takes no lock, because that may run at any point of this module.
        """
        self._abandoned.append(key)

    def _release_abandoned(self) -> None:
        while self._abandoned:
            key = self._abandoned.popleft()
            self._users[key] -= 1
            if not self._users[key] and not self._taken[key]:
                self._remove(key)

    def clear(self) -> None:
        """Frees what no open job uses."""
        with self._lock:
            self._release_abandoned()
            for key in [key for key in self._rows if not self._users[key]]:
                self._remove(key)

    def free_bytes(self, key: str) -> int:
        """Returns the memory that could still be taken for a key."""
        with self._lock:
            in_use = sum(
                self._taken[each] for each, n in self._users.items() if n
            )
            return max(0, self._limits[key] - in_use)

    def _take(self, key: str, row_bytes: int, least: int, most: int) -> int:
        with self._lock:
            self._release_abandoned()
            limit = self._limits[key]
            for other in [k for k in self._rows if not self._users[k]]:
                if self._taken.total() + most * row_bytes <= limit:
                    break
                self._remove(other)
            rows = min(most, (limit - self._taken.total()) // row_bytes)
            if rows < least:
                return 0
            self._taken[key] += rows * row_bytes
            return rows

    def _remove(self, key: str) -> None:
        for each in (self._users, self._limits, self._taken):
            each.pop(key, None)
        self._rows.pop(key).close()


POOL = CachePool()
