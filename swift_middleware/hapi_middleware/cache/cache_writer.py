"""Keeping what a worker computes, while it goes to the client.

* An entry has no timings, and no rows with errors: these may differ elsewhere.
* It costs the answer nothing but a look: an entry is stored behind the
  answer's end, and given up where it would take too much memory.
"""

from __future__ import annotations

from collections.abc import Callable

from hapi_middleware.cache.entries import pack
from hapi_middleware.cache.store import FeatureCache
from hapi_middleware.concurrency import Task
from hapi_middleware.worker.feature_stream import FeatureStream
from hapi_protocol.errors import HapiError, InternalError
from hapi_protocol.tee_stream import BOTH, CLIENT, KEPT, TeeReader


class CacheWriter:
    """Holds what may be kept until it is known to be whole.

    Args:
        cache: whose limits it keeps.
        key: of the entry.
        store: what to do with its content, in a green thread of its own.
    """

    def __init__(
        self, cache: FeatureCache, key: str, store: Callable[[bytes], None]
    ) -> None:
        self._cache = cache
        self._key = key
        self._store = store
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._is_open = True

    def add(self, data: bytes) -> None:
        """Take some more, or give it all up."""
        if not self._is_open:
            return
        cache = self._cache
        limit = cache.config.cache_max_entry_bytes
        if self._held_bytes + len(data) > limit:
            cache.count("too_large")
            self.give_up()
        elif not cache.buffer.take(len(data)):
            cache.count("no_buffer")
            self.give_up()
        else:
            self._pieces.append(data)
            self._held_bytes += len(data)

    def finish(self, errors: int) -> None:
        """The stream has ended well; returns at once."""
        if self._is_open and errors:
            self._cache.count("with_errors")
        elif self._is_open:
            self._is_open = False
            Task(self._store_all)
        self.give_up()

    def give_up(self) -> None:
        """Nothing is kept; harmless behind :meth:`finish`."""
        if self._is_open:
            self._is_open = False
            self._free()

    def _store_all(self) -> None:
        try:
            content = pack(self._key, self._pieces)
            self._pieces.clear()
            self._store(content)
        finally:
            self._free()

    def _free(self) -> None:
        self._pieces.clear()
        self._cache.buffer.free(self._held_bytes)
        self._held_bytes = 0


class KeptStream:
    """The client's part of a split stream, while a keeper takes the other.

    Args:
        stream: of the worker.
        keeper: for what may be kept.

    Raises:
        InternalError: while iterating, where the stream is not whole.
    """

    def __init__(self, stream: FeatureStream, keeper: CacheWriter) -> None:
        self._stream = stream
        self._keeper = keeper
        self._reader = TeeReader()

    def __iter__(self) -> KeptStream:
        return self

    def __next__(self) -> bytes:
        try:
            while not (data := self._take(next(self._stream))):
                pass
            return data
        except StopIteration:
            self._end()
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._keeper.give_up()
        self._stream.close()

    def _take(self, data: bytes) -> bytes:
        mine = []
        try:
            for kind, piece in self._reader.feed(data):
                if kind in (BOTH, KEPT):
                    self._keeper.add(piece)
                if kind in (BOTH, CLIENT):
                    mine.append(piece)
        except HapiError as error:
            raise self._stream.broken(error) from None
        return b"".join(mine)

    def _end(self) -> None:
        if self._reader.errors is None:
            self.close()
            raise InternalError(
                "internal", "the worker's split stream has no last frame"
            )
        self._keeper.finish(self._reader.errors)
