"""Reads the first spans of a job while its model is being split.

A split takes seconds of one core, in which the link would be idle.  Reading
goes on until the training loop has caught up with it, or until samples are
pushed down; so the loop never waits for a link that stood still before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

from hapi_client.data.span_bytes import read_span
from hapi_client.loading.read_config import ReadConfig
from hapi_client.swift.connection import Connection
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.errors import HapiError

# Only a closed loader waits for it: a read that ends wakes the thread.
POLL_SECONDS = 0.1
"""Interval at which a closed loader is noticed."""
# The first reads connect, and TCP's slow start takes some round trips.
MIN_RATE_SECONDS = 1.0
"""Minimum time of reading from which its throughput counts."""

_Read: TypeAlias = tuple[Span, Future[bytes]]


class EarlyReads:
    """Bytes of spans, read before a loader asks for them.  Thread-safe.

    An error ends it: loaders then read by their own rules.

    Args:
        connection: connection to the account.
        spans: spans in the order of the first epoch; none to read nothing.
        options: options of reading; ``ahead_bytes`` limits the memory.
    """

    def __init__(
        self,
        connection: Connection,
        spans: Sequence[Span],
        options: ReadConfig,
    ) -> None:
        self._connection = connection
        self._options = options
        self._scope = CancelScope()
        self._lock = threading.RLock()
        self._todo = deque(spans)
        self._room_bytes = options.ahead_bytes
        # By shard, ETag and sample: an epoch may divide spans otherwise.
        self._reads: dict[tuple[str, str, int], _Read] = {}
        self._rate: float | None = None
        self._started = time.monotonic()
        self._bytes_before = self._received_bytes()
        self._was_used = False
        pool = ThreadPoolExecutor(options.num_threads, "hapi-early")
        for _ in range(min(options.num_threads, len(spans))):
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
                    data = read_span(
                        self._connection,
                        span,
                        seconds=self._options.span_limits.seconds,
                    )
            except Exception as error:
                self.stop()
                future.set_exception(error)
            else:
                self._measure()
                future.set_result(data)

    def _begin_next(self) -> _Read | None:
        with self._lock:
            if not self._todo:
                return None
            span = self._todo.popleft()
            self._room_bytes -= span.byte_range.length_bytes
            if self._room_bytes < 0:
                self.stop()
                return None
            read = span, Future[bytes]()
            self._reads.update(dict.fromkeys(_keys(span), read))
            return read

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
        return len(self._reads)

    def holds(self, span: Span) -> bool:
        """Returns True if all of a span is here or in flight."""
        return all(key in self._reads for key in _keys(span))

    def take(
        self,
        span: Span,
        scope: CancelScope,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> bytes | None:
        """Returns the bytes of a span once; waits for a read in flight.

        Args:
            span: the span.
            scope: cancels the wait.
            reading: makes a context that is entered during the wait.

        Returns:
            None if the span has to be read.
        """
        with self._lock:
            taken = [self._reads.pop(key, None) for key in _keys(span)]
        reads = [read for read in taken if read is not None]
        futures = {future for _, future in reads}
        if len(reads) < len(taken) or not all(map(Future.done, futures)):
            # The loop has caught up, and chooses its own concurrency.
            self.stop()
        if len(reads) < len(taken):
            return None
        self._was_used = True
        if not all(map(Future.done, futures)):
            with reading():
                while wait(futures, POLL_SECONDS).not_done:
                    scope.check()
        try:
            return b"".join(
                _bytes_of(row, *read)
                for row, read in zip(span.rows, reads, strict=True)
            )
        except HapiError:
            return None

    def begin_epoch(self) -> None:
        """Frees what was read, if an earlier epoch has used it."""
        if self._was_used:
            self.close()

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


def _keys(span: Span) -> list[tuple[str, str, int]]:
    return [(span.path, span.etag, row.sample) for row in span.rows]


def _bytes_of(row: IndexRow, span: Span, read: Future[bytes]) -> memoryview:
    first = row.offset - span.byte_range.first
    return memoryview(read.result())[first : first + row.length]
