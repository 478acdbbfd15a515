"""Spans in the order asked for or sooner, a bounded number of bytes ahead."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from hapi_client.loading.span_source import (
    PUSHDOWN_QUEUE,
    RAW_QUEUE,
    READ_QUEUES,
    LoadedSpan,
    SpanLimits,
    SpanSource,
    SpanTask,
)
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
"""Of waiting for features, after which the log says so."""
MAX_EARLY_SPANS = 4
"""Streamed spans that the loop may be given out of turn: what it makes of
them stays in its memory until their turn comes."""


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
        decode_threads: None for one on each available core.
        forward_samples: samples of one forward pass of the frozen layers on
            the client; None for what suits the device.
        buffer_spans: width of the shuffle buffer, in spans.
        partition: division of an epoch, which says how many ranks and loader
            workers can share it, also after a resume with other numbers of
            them; None for what suits.
        on_error: ``"raise"`` for a sample that cannot be decoded, or
            ``"skip"``, counted in ``stats.skipped``.
        progress: True shows a progress bar on standard error (first rank
            only), False none; None leaves it to ``HAPI_PROGRESS`` (0 or 1),
            or else to whether there is a terminal or a notebook.
        span_seconds: deadline of one try of one span.
        wait_seconds: deadline of a span for the training loop, all tries and
            the fallback to a raw read included.
        backoff: between tries of a span.
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
    decode_threads: int | None = None
    forward_samples: int | None = None
    buffer_spans: int = DEFAULT_BUFFER_SPANS
    partition: EpochPartition | None = None
    on_error: str = ON_ERROR[0]
    progress: bool | None = None
    span_seconds: float = 120.0
    wait_seconds: float = 900.0
    backoff: Backoff = field(default_factory=Backoff)
    pause_seconds: float = 5.0
    max_pause_seconds: float = 20.0

    def __post_init__(self) -> None:
        for name in (
            "num_threads",
            "ahead_bytes",
            "ahead_spans",
            "buffer_spans",
        ):
            if getattr(self, name) < 1:
                raise ClientError(
                    "bad_configuration",
                    f"{name} is {getattr(self, name)}; at least 1",
                )
        if self.on_error not in ON_ERROR:
            raise ClientError(
                "bad_configuration",
                f"on_error is {self.on_error!r}; allowed: "
                f"{', '.join(ON_ERROR)}",
            )

    @property
    def span_limits(self) -> SpanLimits:
        return SpanLimits(self.span_seconds, self.backoff)


@dataclass(eq=False)
class _Pending:
    position: int
    span: Span
    task: SpanTask
    future: Future[LoadedSpan]
    is_early: bool = False

    @property
    def may_be_early(self) -> bool:
        """Whether it has come well, and work is left for the loop."""
        return (
            self.task.read_queue == RAW_QUEUE
            and self.future.done()
            and not self.future.cancelled()
            and self.future.exception() is None
        )


class Prefetcher:
    """Iterates over loaded spans; close it to end its threads at once.

    A span's way is chosen when a thread of its lane is free for it, not
    before: a plan that changes reaches all spans not yet under way.

    Args:
        connection: whose requests are cancelled on closing.
        source: loads a span.
        spans: in the order wanted.
        options: bounds.
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
        self._num_dealt = 0
        # Told of each span that comes; its put may be called again from
        # within itself, by Python's collector.
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._busy: Counter[str] = Counter()
        self._ahead_bytes = 0
        self._closed = False
        self._has_warned = False
        self._threads: set[threading.Thread] = set()

    def __iter__(self) -> Iterator[tuple[int, LoadedSpan]]:
        """Each with its position among the spans.

        In order, but that a streamed one that is here comes before one that
        would have to be waited for.

        Raises:
            HapiError: of the first span, in order, that cannot be had.
            TooSlowError: when a span does not come in ``wait_seconds``.
            ClientError: ``not_connected`` when it was closed meanwhile.
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
        """What has come; waits for it."""
        started = time.monotonic()
        received_bytes = self._received_bytes()
        while True:
            with self._lock:
                self._top_up()
                # All lanes are free when nothing is pending, so that a span
                # has been started if any was left.
                if not self._pending:
                    return None
                first = self._pending[0]
                found = self._take()
            if found is not None:
                return found
            waited = time.monotonic() - started
            self._wait(first, waited, received_bytes)

    def _received_bytes(self) -> int:
        return self._connection.traffic.count().received_bytes

    def _take(self) -> _Pending | None:
        """The first if it has come, or one that may come early."""
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
        """Until some span comes.

        Args:
            first: in order of those that are waited for.
            waited: seconds so far.
            received_bytes: when that began.
        """
        seconds = self._options.wait_seconds
        quiet_seconds = min(QUIET_SECONDS, seconds)
        limit = quiet_seconds if waited < quiet_seconds else seconds
        try:
            self._came.get(timeout=max(0.0, limit - waited))
        except queue.Empty:
            if limit == seconds:
                raise _too_slow(first.span, seconds) from None
            self._note_silence(first, self._received_bytes() - received_bytes)

    def top_up(self) -> None:
        """Starts spans for which there is room by now; from any thread."""
        with self._lock:
            self._top_up()

    def _top_up(self) -> None:
        """Starts as many spans as there is room for; under the lock."""
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
            self._pending.append(_Pending(self._num_dealt, span, task, future))
            self._num_dealt += 1
            future.add_done_callback(_notice(self._came))

    def _has_room(self, read_queue: str) -> bool:
        width = self._source.concurrency_limit(read_queue)
        return self._busy[read_queue] < min(width, self._options.num_threads)

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
            "no features of %s %s for %.0f s, in which %s came; %s: what does "
            "not come is streamed after about %.0f s",
            pending.span.shard,
            pending.span.samples,
            QUIET_SECONDS,
            bytes_text(num_bytes) if num_bytes else "no byte",
            "the link may be slow" if num_bytes else "the worker may hang",
            self._options.span_seconds,
        )

    def close(self) -> None:
        """Ends all requests under way, and waits for the threads a little."""
        # Without the lock, and not for long: Python's collector may close a
        # forgotten fetcher from any thread at any moment, also from one of
        # its own, or from one that holds what they wait for.
        self._closed = True
        self._connection.cancel(self._scope)
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


def _notice(
    came: queue.SimpleQueue[None],
) -> Callable[[Future[LoadedSpan]], None]:
    """Without the fetcher: its futures must not keep it."""
    return lambda future: came.put(None)


def _too_slow(span: Span, seconds: float) -> TooSlowError:
    return TooSlowError(
        "too_slow",
        f"samples {span.samples} of shard {span.shard} did not come in "
        f"{seconds:g} s",
        object_name=span.shard,
    )


def _closed_meanwhile() -> ClientError:
    return ClientError("not_connected", "the loader was closed")
