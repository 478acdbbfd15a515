"""Spans in the order asked for, a bounded number of bytes ahead."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

from hapi_client.connection import Connection
from hapi_client.order import DEFAULT_BUFFER_SPANS
from hapi_client.retry import Backoff
from hapi_client.sources import LoadedSpan, SpanLimits, SpanSource
from hapi_client.transport import CancelScope
from hapi_protocol.errors import TooSlowError
from hapi_protocol.index import Span


@dataclass(frozen=True)
class FetchOptions:
    """How a job fetches.

    Attributes:
        num_threads: requests at the same time.
        ahead_bytes: memory of spans that wait for the training loop or
            are under way; at least one span is always fetched.
        decode_threads: None for one on each available core.
        forward_samples: of one forward of the frozen layers here; None
            for what suits the device.
        buffer_spans: width of the shuffle buffer, in spans.
        span_seconds: for one try of one span.
        wait_seconds: for which the training loop waits for a span, all
            tries and the fall-back included.
        backoff: of failed tries of a span.
        pause_seconds: of push-down after a fall-back; doubles up to
            ``most_pause_seconds`` while it keeps failing.
        most_pause_seconds: see there.
    """

    num_threads: int = 4
    ahead_bytes: int = 256 * 1024 * 1024
    decode_threads: int | None = None
    forward_samples: int | None = None
    buffer_spans: int = DEFAULT_BUFFER_SPANS
    span_seconds: float = 120.0
    wait_seconds: float = 900.0
    backoff: Backoff = field(default_factory=Backoff)
    pause_seconds: float = 5.0
    most_pause_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("num_threads", "ahead_bytes", "buffer_spans"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; at least 1"
                )

    @property
    def span_limits(self) -> SpanLimits:
        return SpanLimits(self.span_seconds, self.backoff)


class Fetcher:
    """Iterates over loaded spans; close it to end its threads at once.

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
        options: FetchOptions,
    ) -> None:
        self._connection = connection
        self._source = source
        self._todo = deque(spans)
        self._options = options
        self._scope = CancelScope()
        self._pool = ThreadPoolExecutor(
            options.num_threads, thread_name_prefix="hapi-fetch"
        )
        self._pending: deque[tuple[Span, Future[LoadedSpan]]] = deque()
        self._ahead_bytes = 0

    def __iter__(self) -> Iterator[LoadedSpan]:
        """
        Raises:
            HapiError: of the first span, in order, that cannot be had.
            TooSlowError: when a span does not come in ``wait_seconds``.
        """
        while True:
            self._top_up()
            if not self._pending:
                return
            span, future = self._pending.popleft()
            yield self._await(span, future)
            self._ahead_bytes -= self._source.cost_bytes(span)

    def _top_up(self) -> None:
        while self._todo:
            cost = self._source.cost_bytes(self._todo[0])
            is_first = not self._pending
            if not is_first and (
                self._ahead_bytes + cost > self._options.ahead_bytes
            ):
                return
            span = self._todo.popleft()
            self._ahead_bytes += cost
            self._pending.append((span, self._pool.submit(self._load, span)))

    def _load(self, span: Span) -> LoadedSpan:
        with self._connection.working_for(self._scope):
            return self._source.load(span, self._scope)

    def _await(self, span: Span, future: Future[LoadedSpan]) -> LoadedSpan:
        seconds = self._options.wait_seconds
        with contextlib.suppress(FutureTimeoutError):
            return future.result(seconds)
        raise TooSlowError(
            "too_slow",
            f"samples {span.samples} of shard {span.shard} did not come in "
            f"{seconds:g} s",
            object_name=span.shard,
        )

    def close(self) -> None:
        """Ends all requests under way and waits for the threads."""
        self._connection.cancel(self._scope)
        self._pool.shutdown(wait=True, cancel_futures=True)
