"""In-memory ``cache`` filter for a proxy that is a single process.

It has the methods of ``swift.common.memcached.MemcacheRing`` that Swift's
middleware calls, with the same behaviour: values pass through JSON (tuples
become lists), a missing count starts at the increment, no count falls below
zero.  Several proxies would need a memcached, because they do not see each
other's invalidations.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_MAX_ENTRIES = 50_000
"""Bounds the memory at tens of megabytes; a test cluster never has as many."""

WSGIApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass(eq=False)
class MemoryCache:
    """A cache that evicts the least recently used entries.

    Args:
        max_entries: maximum number of entries.
        clock: returns the time in seconds since the epoch.
    """

    max_entries: int = DEFAULT_MAX_ENTRIES
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._entries: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def set(
        self,
        key: str,
        value: Any,
        serialize: bool = True,
        time: float = 0,
        min_compress_len: int = 0,
        raise_on_error: bool = False,
    ) -> None:
        if isinstance(value, bytes):
            value = value.decode("utf-8")
        self._entries[key] = (json.dumps(value), self._expiry(time))
        self._entries.move_to_end(key)
        while len(self._entries) > self.max_entries:
            self._entries.popitem(last=False)

    def get(self, key: str, raise_on_error: bool = False) -> Any:
        text, expiry = self._entries.get(key, ("null", 0.0))
        if expiry <= self.clock():
            self._entries.pop(key, None)
            return None
        self._entries.move_to_end(key)
        return json.loads(text)

    def incr(self, key: str, delta: int = 1, time: float = 0) -> int:
        present = self.get(key)
        if present is None:
            count = max(0, int(delta))
            self.set(key, count, time=time)
            return count
        count = max(0, int(present) + int(delta))
        self._entries[key] = (json.dumps(count), self._entries[key][1])
        return count

    def decr(self, key: str, delta: int = 1, time: float = 0) -> int:
        return self.incr(key, -delta, time)

    def delete(self, key: str, server_key: str | None = None) -> None:
        self._entries.pop(key, None)

    def _expiry(self, seconds: float) -> float:
        return self.clock() + seconds if seconds > 0 else float("inf")


def filter_factory(
    global_conf: Mapping[str, str], **local_conf: str
) -> Callable[[WSGIApp], WSGIApp]:
    """Paste's filter factory: puts a cache into ``swift.cache``.

    Each loaded pipeline has its own cache.
    """
    cache = MemoryCache()

    def filter_app(app: WSGIApp) -> WSGIApp:
        def with_cache(
            environ: dict[str, Any], start_response: Callable[..., Any]
        ) -> Iterable[bytes]:
            environ["swift.cache"] = cache
            return app(environ, start_response)

        return with_cache

    return filter_app
