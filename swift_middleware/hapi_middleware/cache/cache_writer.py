"""Stores computed features in the cache while they are sent to the client.

* An entry has no timings and no rows with errors, which may differ next time.
* It delays the answer only by the lookup: an entry is stored after the
  answer's end, and dropped if it would take too much memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from hapi_middleware.cache.entries import Entry, pack
from hapi_middleware.cache.store import StoreCache
from hapi_middleware.concurrency import Task
from hapi_middleware.worker.feature_stream import WorkerStream
from hapi_protocol.errors import HapiError, InternalError
from hapi_protocol.tee_stream import BOTH, CACHE, CLIENT, TeeReader


class CacheWriter:
    """Buffers the features of an entry until the stream has ended well.

    Args:
        cache: feature cache with the limits.
        entry: the entry; stored in a green thread of its own.
        payer: account whose share of the buffer the entry takes.
    """

    def __init__(self, cache: StoreCache, entry: Entry, payer: str) -> None:
        self._cache = cache
        self._entry = entry
        self._pieces: list[bytes] = []
        self._memory = cache.buffer.reservation(payer)
        self._is_open = True

    def add(self, data: bytes) -> None:
        """Buffers more data, or drops the entry if a limit is exceeded."""
        if not self._is_open:
            return
        cache = self._cache
        limit = cache.config.cache_max_entry_bytes
        if self._memory.num_bytes + len(data) > limit:
            cache.count("too_large")
            self.drop()
        elif not self._memory.grow(len(data)):
            cache.count("no_buffer")
            self.drop()
        else:
            self._pieces.append(data)

    def finish(self, errors: int) -> None:
        """Stores the entry in the background, unless rows have errors."""
        if self._is_open and errors:
            self._cache.count("with_errors")
        elif self._is_open:
            self._is_open = False
            Task(self._store_all)
        self.drop()

    def drop(self) -> None:
        """Drops the entry; does nothing after :meth:`finish`."""
        if self._is_open:
            self._is_open = False
            self._free()

    def _store_all(self) -> None:
        try:
            content = pack(self._entry.key, self._pieces)
            self._pieces.clear()
            self._cache.store(self._entry, content)
        finally:
            self._free()

    def _free(self) -> None:
        self._pieces.clear()
        self._memory.free()


@dataclass(eq=False)
class CachingStream:
    """The client's part of a tee stream; the other part goes to the cache.

    Args:
        stream: tee stream of the worker.
        writer: takes the data for the cache.

    Raises:
        InternalError: while iterating, if the stream has no last frame.
    """

    stream: WorkerStream
    writer: CacheWriter

    def __post_init__(self) -> None:
        self._reader = TeeReader()

    def __iter__(self) -> CachingStream:
        return self

    def __next__(self) -> bytes:
        try:
            while not (data := self._client_data(next(self.stream))):
                pass
            return data
        except StopIteration:
            self._end()
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.writer.drop()
        self.stream.close()

    def _client_data(self, data: bytes) -> bytes:
        client_pieces = []
        try:
            for kind, piece in self._reader.feed(data):
                if kind in (BOTH, CACHE):
                    self.writer.add(piece)
                if kind in (BOTH, CLIENT):
                    client_pieces.append(piece)
        except HapiError as error:
            raise self.stream.fail(error) from None
        return b"".join(client_pieces)

    def _end(self) -> None:
        if self._reader.errors is None:
            self.close()
            raise InternalError(
                "internal", "the worker's tee stream has no last frame"
            )
        self.writer.finish(self._reader.errors)
