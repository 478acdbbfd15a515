"""Reads the first spans of a job while its model is being split.

A split takes seconds of one core, in which the link would be idle.  Reading
goes on until the training loop has caught up with it, or until samples are
pushed down; so the loop never waits for a link that stood still before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeAlias

from hapi_client.loading.prefetcher import ReadConfig
from hapi_client.swift.connection import Connection
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import Span
from hapi_protocol.errors import HapiError

POLL_SECONDS = 0.1
MIN_RATE_SECONDS = 1.0
"""Minimum time of reading from which its throughput counts."""

_Key: TypeAlias = tuple[str, str, int, int]


class EarlyReads:
    """Bytes of spans, read before a loader asks for them.  Thread-safe.

    An error ends it: loaders then read by their own rules.

    Args:
        connection: connection to the account.
        container: container of the shards.
        spans: spans in the order of the first epoch.
        options: options of reading; ``ahead_bytes`` limits the memory.

    Attributes:
        was_used: True once a span was taken.
    """

    def __init__(
        self,
        connection: Connection,
        container: str,
        spans: Sequence[Span],
        options: ReadConfig,
    ) -> None:
        self._connection = connection
        self._container = container
        self._options = options
        self._scope = CancelScope()
        self._lock = threading.RLock()
        self._todo = deque(spans)
        self._room_bytes = options.ahead_bytes
        self._reads: dict[_Key, Future[bytes]] = {}
        self._rate: float | None = None
        self._started = time.monotonic()
        self._bytes_before = self._received_bytes()
        self.was_used = False
        pool = ThreadPoolExecutor(options.num_threads, "hapi-early")
        for _ in range(options.num_threads):
            pool.submit(self._run)
        pool.shutdown(wait=False)

    def _received_bytes(self) -> int:
        return self._connection.traffic.count().received_bytes

    def _run(self) -> None:
        """Reads one span after the other, in a thread."""
        while (begun := self._begin_next()) is not None:
            span, future = begun
            try:
                with self._connection.working_for(self._scope):
                    data = self._connection.get_range(
                        self._container,
                        span.shard,
                        span.byte_range,
                        if_match=span.etag,
                        seconds=self._options.span_seconds,
                    )
            except Exception as error:
                self.stop()
                future.set_exception(error)
            else:
                self._measure()
                future.set_result(data)

    def _begin_next(self) -> tuple[Span, Future[bytes]] | None:
        with self._lock:
            if not self._todo:
                return None
            span = self._todo.popleft()
            self._room_bytes -= span.byte_range.length_bytes
            if self._room_bytes < 0:
                self.stop()
                return None
            future = self._reads[_key(span)] = Future()
            return span, future

    def _measure(self) -> None:
        seconds = time.monotonic() - self._started
        if seconds >= MIN_RATE_SECONDS:
            received = self._received_bytes() - self._bytes_before
            self._rate = received / seconds

    @property
    def bytes_per_second(self) -> float | None:
        """Throughput of the reads, all together; None if they were few.

        The link has at least this much: the process was busy with the split.
        """
        return self._rate

    @property
    def num_samples(self) -> int:
        """Samples that are here or in flight, and were not taken yet."""
        with self._lock:
            return sum(count for *_, count in self._reads)

    def holds(self, span: Span) -> bool:
        """Returns True if a span is here or in flight."""
        return _key(span) in self._reads

    def take(self, span: Span, scope: CancelScope) -> bytes | None:
        """Returns the bytes of a span once; waits for a read in flight.

        Args:
            span: the span.
            scope: cancels the wait.

        Returns:
            None if the span has to be read.
        """
        with self._lock:
            future = self._reads.pop(_key(span), None)
        if future is None:
            self.stop()  # the loop has caught up
            return None
        self.was_used = True
        while not wait([future], POLL_SECONDS).done:
            scope.check()
        try:
            return future.result()
        except HapiError:
            return None

    def stop(self) -> None:
        """Begins no further reads."""
        with self._lock:
            self._todo.clear()

    def close(self) -> None:
        """Ends all reads, and frees their bytes."""
        self.stop()
        self._connection.cancel(self._scope)
        with self._lock:
            self._reads.clear()


def _key(span: Span) -> _Key:
    return span.shard, span.etag, span.rows[0].sample, len(span.rows)
