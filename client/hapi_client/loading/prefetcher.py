"""Reads spans ahead of the training loop, within a memory limit."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

from hapi_client.loading.read_config import ReadConfig
from hapi_client.loading.span_source import (
    PUSHDOWN_QUEUE,
    RAW_QUEUE,
    READ_QUEUES,
    LoadedSpan,
    SpanSource,
    SpanTask,
)
from hapi_client.swift.connection import Connection
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import Span
from hapi_protocol.errors import ClientError, TooSlowError
from hapi_splitter.units import bytes_text

logger = logging.getLogger(__name__)

# Requests are cancelled at once; a thread in a decoder cannot be.
JOIN_SECONDS = 5.0
"""Longest wait for the threads at the end of a loader."""
# Longer than usual spans of slow links, and soon enough for who watches.
QUIET_SECONDS = 20.0
"""Wait for features after which a warning is logged."""
# As many as are read at a time by default: if more arrive while one is
# missing, that one is far behind, and waiting costs less than memory.
MAX_EARLY_SPANS = 4
"""Raw spans that the loop may get out of order: their features stay in memory
until it is their turn."""
AHEAD_SPANS = 64
"""Spans that are read ahead; ``ahead_bytes`` limits them before, unless
samples are tiny."""
WAIT_SECONDS = 900.0
"""Deadline of a span for the training loop, all tries and the fallback to a
raw read included, in addition to ``retry_seconds``."""


@dataclass(eq=False)
class _Pending:
    position: int
    span: Span
    task: SpanTask
    future: Future[LoadedSpan]
    is_early: bool = False

    @property
    def may_be_early(self) -> bool:
        """True if the span has arrived and the client computes its layers."""
        return (
            self.task.read_queue == RAW_QUEUE
            and self.future.done()
            and not self.future.cancelled()
            and self.future.exception() is None
        )


class Prefetcher:
    """Iterates over loaded spans; close it to end its threads at once.

    The route of a span is chosen when a thread is free for it, so that a
    changed plan applies to all spans that are not being read yet.

    Args:
        connection: connection whose requests are cancelled on closing.
        source: chooses how spans are loaded.
        spans: spans in order.
        options: options of reading.
    """

    def __init__(
        self,
        connection: Connection,
        source: SpanSource,
        spans: Sequence[Span],
        options: ReadConfig,
    ) -> None:
        self._connection = connection
        self._source = source
        self._todo = deque(spans)
        self._samples_left = sum(len(span.rows) for span in spans)
        self._options = options
        self._scope = CancelScope()
        self._pools = {
            read_queue: ThreadPoolExecutor(
                options.num_threads, thread_name_prefix=f"hapi-{read_queue}"
            )
            for read_queue in READ_QUEUES
        }
        self._lock = threading.Lock()
        self._head: SpanTask | None = None
        self._pending: deque[_Pending] = deque()
        self._num_started = 0
        # One item for each span that arrives.  A SimpleQueue, because the
        # garbage collector may call its put from within put.
        self._arrivals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._busy: Counter[str] = Counter()
        self._ahead_bytes = 0
        self._closed = False
        self._has_warned = False
        self._threads: set[threading.Thread] = set()

    def __iter__(self) -> Iterator[tuple[int, LoadedSpan]]:
        """Yields each span with its position.

        In order, except that a raw span that has arrived comes before one
        that has not.

        Raises:
            HapiError: if a span cannot be loaded, when it is its turn.
            TooSlowError: if a span does not arrive within
                :data:`WAIT_SECONDS` more than ``retry_seconds``.
            ClientError: ``not_connected`` if it was closed meanwhile.
        """
        while True:
            pending = self._next()
            if pending is None:
                if self._todo and self._closed:
                    raise _closed_meanwhile()
                return
            try:
                yield pending.position, pending.future.result()
            except CancelledError:
                raise _closed_meanwhile() from None
            with self._lock:
                self._samples_left -= len(pending.span.rows)
                if not pending.is_early:
                    self._ahead_bytes -= pending.task.cost_bytes

    def _next(self) -> _Pending | None:
        """Waits for a span; returns None after the last one."""
        started = time.monotonic()
        received_bytes = self._received_bytes()
        while True:
            with self._lock:
                self._top_up()
                # If nothing is pending, all read queues are free, so that
                # any span left would have been started.
                if not self._pending:
                    return None
                first = self._pending[0]
                arrived = self._take()
            if arrived is not None:
                return arrived
            waited = time.monotonic() - started
            self._wait(first, waited, received_bytes)

    def _received_bytes(self) -> int:
        return self._connection.traffic.count().received_bytes

    def _take(self) -> _Pending | None:
        """Returns the first span if it has arrived, or one out of order."""
        first = self._pending[0]
        if first.future.done():
            self._pending.popleft()
            while self._pending and self._pending[0].is_early:
                self._ahead_bytes -= self._pending.popleft().task.cost_bytes
            return first
        if (
            sum(pending.is_early for pending in self._pending)
            < MAX_EARLY_SPANS
        ):
            for pending in self._pending:
                if not pending.is_early and pending.may_be_early:
                    pending.is_early = True
                    return pending
        return None

    def _wait(
        self, first: _Pending, waited: float, received_bytes: int
    ) -> None:
        """Waits until some span arrives.

        Args:
            first: the first pending span.
            waited: seconds waited so far.
            received_bytes: bytes received before the wait.
        """
        seconds = WAIT_SECONDS + self._options.retry_seconds
        quiet_seconds = min(QUIET_SECONDS, seconds)
        limit = quiet_seconds if waited < quiet_seconds else seconds
        try:
            self._arrivals.get(timeout=max(0.0, limit - waited))
        except queue.Empty:
            if limit == seconds:
                raise _too_slow(first.span, seconds) from None
            self._note_silence(first, self._received_bytes() - received_bytes)

    def top_up(self) -> None:
        """Starts the spans for which there is room; thread-safe."""
        with self._lock:
            self._top_up()

    def _top_up(self) -> None:
        """Starts the spans for which there is room, under the lock."""
        while self._todo and not self._closed:
            task = self._head or self._source.task(
                self._todo[0], self._has_room, self._samples_left
            )
            self._head = task
            if task is None or not self._has_room_for(task):
                return
            self._head = None
            span = self._todo.popleft()
            self._ahead_bytes += task.cost_bytes
            self._busy[task.read_queue] += 1
            try:
                future = self._pools[task.read_queue].submit(self._load, task)
            except RuntimeError:  # closed meanwhile
                self._todo.appendleft(span)
                if not self._closed:
                    raise
                return
            self._pending.append(
                _Pending(self._num_started, span, task, future)
            )
            self._num_started += 1
            future.add_done_callback(_notice(self._arrivals))

    def _has_room(self, read_queue: str) -> bool:
        limit = self._source.concurrency_limit(read_queue)
        return self._busy[read_queue] < min(limit, self._options.num_threads)

    def _has_room_for(self, task: SpanTask) -> bool:
        if not self._has_room(task.read_queue):
            return False
        if not self._pending:
            return True
        more_bytes = self._ahead_bytes + task.cost_bytes
        return (
            len(self._pending) < AHEAD_SPANS
            and more_bytes <= self._options.ahead_bytes
        )

    def _load(self, task: SpanTask) -> LoadedSpan:
        self._threads.add(threading.current_thread())
        try:
            with self._connection.working_for(self._scope):
                return task.load(self._scope)
        finally:
            with self._lock:
                self._busy[task.read_queue] -= 1
                self._top_up()

    def _note_silence(self, pending: _Pending, num_bytes: int) -> None:
        if self._has_warned or pending.task.read_queue != PUSHDOWN_QUEUE:
            return
        self._has_warned = True
        logger.warning(
            "no features of %s %s for %.0f s, %s received; %s; the samples "
            "are read raw after about %.0f s",
            pending.span.shard,
            pending.span.samples,
            QUIET_SECONDS,
            bytes_text(num_bytes) if num_bytes else "no bytes",
            "the link may be slow"
            if num_bytes
            else "the worker is busy (large images, others' jobs) or hangs",
            self._options.span_limits.seconds,
        )

    def close(self) -> None:
        """Ends all requests, and waits for the threads for a short time."""
        # Without the lock: the garbage collector may close a prefetcher from
        # any thread, also from one of its own, or one that holds a lock.
        self._closed = True
        self._connection.cancel(self._scope)
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


def _notice(
    arrivals: queue.SimpleQueue[None],
) -> Callable[[Future[LoadedSpan]], None]:
    """Returns a callback without a reference to the prefetcher."""
    return lambda future: arrivals.put(None)


def _too_slow(span: Span, seconds: float) -> TooSlowError:
    return TooSlowError(
        "too_slow",
        f"samples {span.samples} of shard {span.shard} did not arrive within "
        f"{seconds:g} s",
        object_name=span.shard,
    )


def _closed_meanwhile() -> ClientError:
    return ClientError("not_connected", "the loader was closed")
