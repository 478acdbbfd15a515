"""Reads spans ahead of the training loop, within a memory limit."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from hapi_client.caching.feature_caches import CacheOptions
from hapi_client.loading.span_source import (
    PUSHDOWN_QUEUE,
    RAW_QUEUE,
    READ_QUEUES,
    LoadedSpan,
    SpanLimits,
    SpanSource,
    SpanTask,
)
from hapi_client.number_checks import check_integers, check_seconds
from hapi_client.sampling.partition import EpochPartition
from hapi_client.sampling.sampler import DEFAULT_BUFFER_SPANS
from hapi_client.swift.connection import Connection
from hapi_client.swift.retry import Backoff
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import Span
from hapi_protocol.errors import ClientError, TooSlowError
from hapi_splitter.units import bytes_text

logger = logging.getLogger(__name__)

JOIN_SECONDS = 5.0
QUIET_SECONDS = 20.0
"""Wait for features after which a warning is logged."""
MAX_EARLY_SPANS = 4
"""Raw spans that the loop may get out of order: their features stay in memory
until it is their turn."""
ON_ERROR = ("raise", "skip")


@dataclass(frozen=True)
class ReadConfig:
    """Options of reading, decoding and progress.

    A span is a run of consecutive samples of a shard, read by one request.

    Attributes:
        num_threads: concurrent requests of each kind: raw reads, feature
            reads, and reads of cached features.
        ahead_bytes: memory of spans that are read ahead of the training
            loop; at least one span is always read.
        ahead_spans: number of spans that are read ahead.
        read_early: read the first spans while the model is split, up to
            ``ahead_bytes``, if the job begins with raw reads.  False saves
            these bytes if only ``DataLoader`` workers read, which cannot use
            them.
        decode_threads: None for one on each available core.
        max_pixels: largest image that the client decodes, height times
            width; the worker has the operator's ``max_pixels``.
        forward_samples: samples of one forward pass of the frozen layers on
            the client; None for what suits the device.
        buffer_spans: width of the shuffle buffer, in spans.
        partition: division of an epoch, which says how many ranks and loader
            workers can share it, also after a resume with other numbers of
            them; None for what suits.
        on_error: ``"raise"`` for a sample that cannot be decoded, or
            ``"skip"``, counted in ``stats.skipped``.
        cache_memory_bytes: memory in which features are cached for later
            epochs and jobs of this process; 0 for none.  None for a quarter
            of what this process may use, divided among the ranks of its host.
            Ranks that torchrun has started on a host share theirs.
        cache_directory: directory in which features are cached for later
            runs, and for all ranks and loader workers of this host; None for
            none.
        cache_directory_bytes: its size limit, beyond which features that were
            not used for longest are removed; None for half of what the disk
            has free.
        progress: True shows a progress bar on standard error (first rank
            only), False none; None leaves it to ``HAPI_PROGRESS`` (0 or 1),
            or else to whether there is a terminal or a notebook.
        span_seconds: deadline of one try of one span.
        wait_seconds: deadline of a span for the training loop, all tries and
            the fallback to a raw read included.
        backoff: between tries of a span.
        retry_seconds: longest wait for a Swift that does not answer, as while
            its proxy restarts; then the job ends with an error.
        pause_seconds: pause of push-down after a fallback; doubles up to
            ``max_pause_seconds`` while push-down keeps failing.
        max_pause_seconds: longest pause of push-down.

    Raises:
        ClientError: ``bad_configuration`` naming the option, its value and
            what is allowed.
    """

    num_threads: int = 4
    ahead_bytes: int = 256 * 1024 * 1024
    ahead_spans: int = 64
    read_early: bool = True
    decode_threads: int | None = None
    max_pixels: int = 1 << 26
    forward_samples: int | None = None
    buffer_spans: int = DEFAULT_BUFFER_SPANS
    partition: EpochPartition | None = None
    on_error: str = ON_ERROR[0]
    cache_memory_bytes: int | None = None
    cache_directory: str | os.PathLike[str] | None = None
    cache_directory_bytes: int | None = None
    progress: bool | None = None
    span_seconds: float = 120.0
    wait_seconds: float = 900.0
    backoff: Backoff = field(default_factory=Backoff)
    retry_seconds: float = 300.0
    pause_seconds: float = 5.0
    max_pause_seconds: float = 20.0

    def __post_init__(self) -> None:
        check_integers(
            self,
            1,
            "num_threads",
            "ahead_bytes",
            "ahead_spans",
            "decode_threads",
            "max_pixels",
            "forward_samples",
            "buffer_spans",
        )
        check_integers(self, 0, "cache_memory_bytes", "cache_directory_bytes")
        check_seconds(
            self,
            "span_seconds",
            "wait_seconds",
            "retry_seconds",
            "pause_seconds",
            "max_pause_seconds",
        )
        if self.cache_directory_bytes is not None and (
            self.cache_directory is None
        ):
            raise ClientError(
                "bad_configuration",
                f"cache_directory_bytes is {self.cache_directory_bytes}, but "
                "there is no cache_directory; give both, or neither",
            )
        if self.on_error not in ON_ERROR:
            raise ClientError(
                "bad_configuration",
                f"on_error is {self.on_error!r}; allowed: "
                f"{', '.join(ON_ERROR)}",
            )

    @property
    def cache_options(self) -> CacheOptions:
        return CacheOptions(
            self.cache_memory_bytes,
            self.cache_directory,
            self.cache_directory_bytes,
        )

    @property
    def span_limits(self) -> SpanLimits:
        return SpanLimits(self.span_seconds, self.backoff, self.retry_seconds)


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
            TooSlowError: if a span does not arrive within ``wait_seconds``.
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
        if sum(each.is_early for each in self._pending) < MAX_EARLY_SPANS:
            for each in self._pending:
                if not each.is_early and each.may_be_early:
                    each.is_early = True
                    return each
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
        seconds = self._options.wait_seconds
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
            len(self._pending) < self._options.ahead_spans
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
            self._options.span_seconds,
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
