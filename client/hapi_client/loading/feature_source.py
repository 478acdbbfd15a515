"""Loads spans as features from the store, with fallback to raw reads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hapi_client.loading.circuit_breaker import (
    PushdownCircuitBreaker,
    PushdownConcurrency,
    can_fall_back,
)
from hapi_client.loading.feature_request import (
    FeatureRequestSpec,
    check_objects,
)
from hapi_client.loading.raw_source import RawSource, delay_seconds
from hapi_client.loading.span_source import (
    CACHE_QUEUE,
    PUSHDOWN_QUEUE,
    RAW_QUEUE,
    LoadedSpan,
    SpanLimits,
    SpanTask,
    check_keys,
)
from hapi_client.metrics.events import JobStats, SpanEvent
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.sums import ThreadTotal
from hapi_client.swift.connection import Connection
from hapi_client.swift.read_errors import unreadable
from hapi_client.swift.retry import is_retryable
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import Span
from hapi_protocol.encodings import Encoding
from hapi_protocol.errors import ClientError, HapiError, SourceChangedError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.feature_stream import STAGES, FeatureBatch
from hapi_protocol.headers import (
    CACHE_HIT,
    CACHE_MISS,
    CACHE_OFF,
    HEADER_CACHE,
    HEADER_WORKER,
)
from hapi_protocol.transforms import Training
from hapi_splitter.encodings import decode as decode_features
from hapi_splitter.planner.problem import Route

logger = logging.getLogger(__name__)


class FeatureSource:
    """Loads spans as features, or at cut 0 after a fallback.

    A span is delivered completely or not at all: a stream that breaks off is
    requested again, and after the last attempt the span is read raw.

    Args:
        connection: connection to the account.
        spec: features to request.
        raw: source of the fallback.
        breaker: stops push-down after failures.
        concurrency: limit of concurrent feature reads.
        limits: time limits of each span.
        counters: counters of the job.
        tracker: records the cache states of responses.
    """

    def __init__(
        self,
        connection: Connection,
        spec: FeatureRequestSpec,
        raw: RawSource,
        breaker: PushdownCircuitBreaker,
        concurrency: PushdownConcurrency,
        limits: SpanLimits,
        counters: ThreadTotal[JobStats],
        tracker: CacheTracker | None = None,
    ) -> None:
        self._connection = connection
        self._tracker = tracker or CacheTracker()
        self._spec = spec
        self._raw = raw
        self._breaker = breaker
        self._concurrency = concurrency
        self._limits = limits
        self._counters = counters
        self._has_warned = False

    def task(
        self,
        span: Span,
        training: Training | None = None,
        *,
        expect_hit: bool = False,
    ) -> SpanTask:
        """Returns the task of loading a span.

        It is a raw read while the breaker is open, and if the store cannot
        decode a sample that the client can.

        Args:
            span: the span.
            training: seed and epoch of random changes; None for evaluation.
            expect_hit: True if its features are known to be cached.
        """
        if self._raw.decodes_more(span, training):
            return self._raw_task(span, training, self._load_without_fault)
        if self._breaker.is_open():
            return self._raw_task(span, training, self._fall_back)
        return SpanTask(
            CACHE_QUEUE if expect_hit else PUSHDOWN_QUEUE,
            self.cost_bytes(span),
            lambda scope: self.load(
                span, scope, training, expect_hit=expect_hit
            ),
        )

    def _raw_task(
        self,
        span: Span,
        training: Training | None,
        load: Callable[[Span, CancelScope, Training | None], LoadedSpan],
    ) -> SpanTask:
        return SpanTask(
            RAW_QUEUE,
            self._raw.cost_bytes(span),
            lambda scope: load(span, scope, training),
        )

    def cost_bytes(self, span: Span) -> int:
        """Returns the maximum memory of a loaded span."""
        shape = self._spec.shape
        decoded = 4 * int(torch.Size(shape).numel())
        received = Encoding.parse(self._spec.encoding).sample_bytes(shape)
        # Received and decoded together, or received twice (Arrow's copy).
        return len(span.rows) * (received + max(decoded, received))

    def load(
        self,
        span: Span,
        scope: CancelScope,
        training: Training | None = None,
        *,
        expect_hit: bool = False,
    ) -> LoadedSpan:
        """Loads a span, with retries and fallback.

        Raises:
            HapiError: if neither retries nor the fallback can help.
        """
        attempts = self._breaker.attempts(self._limits.backoff.attempts)
        if attempts:
            try:
                loaded = self._try_pushdown(
                    span, scope, training, attempts, expect_hit
                )
            except SourceChangedError:
                if not span.is_group:
                    raise
                # A request for many objects names no versions, and a replica
                # may be old.  Raw reads name them, or find the change.
                return self._load_without_fault(span, scope, training)
            if loaded is not None:
                return self._check_failures(loaded, scope, training)
        return self._fall_back(span, scope, training)

    def _check_failures(
        self,
        loaded: LoadedSpan,
        scope: CancelScope,
        training: Training | None,
    ) -> LoadedSpan:
        # The operator's limits must not change the samples of an epoch: the
        # client tries those that the store cannot decode.
        rows = sorted(loaded.failures)
        failures = self._raw.failures_of(loaded.span, rows, scope, training)
        if len(failures) < len(rows):
            logger.info(
                "the store cannot decode samples of %s that the client can",
                loaded.span,
            )
            return self._load_without_fault(loaded.span, scope, training)
        return replace(loaded, failures=failures)

    def _load_without_fault(
        self, span: Span, scope: CancelScope, training: Training | None
    ) -> LoadedSpan:
        # No failure of the worker: costs.fell_back stays 0.
        self._counters.add(fallbacks=1)
        return self._raw.load(span, scope, training)

    def _fall_back(
        self, span: Span, scope: CancelScope, training: Training | None
    ) -> LoadedSpan:
        self._counters.add(fallbacks=1)
        loaded = self._raw.load(span, scope, training)
        costs = replace(loaded.costs, fell_back=len(span.rows))
        return replace(loaded, costs=costs)

    def _try_pushdown(
        self,
        span: Span,
        scope: CancelScope,
        training: Training | None,
        attempts: int,
        expect_hit: bool,
    ) -> LoadedSpan | None:
        backoff = self._limits.backoff
        try:
            for failures in range(1, attempts + 1):
                scope.check()
                started = time.monotonic()
                try:
                    loaded = self._load(span, training)
                except HapiError as error:
                    scope.check()
                    if not can_fall_back(error):
                        raise
                    last = error
                    self._concurrency.refused(error)
                    # A timeout has cost enough time for this span.
                    if not is_retryable(error) or error.code == "too_slow":
                        break
                else:
                    if self._breaker.succeeded():
                        logger.info("push-down works again: %s arrived", span)
                    # Expected hits are not limited by the worker's capacity.
                    if not (expect_hit and loaded.costs.was_cached):
                        self._concurrency.succeeded()
                    return loaded
                if failures < attempts:
                    self._counters.add(retries=1)
                    seconds = delay_seconds(backoff, failures, last)
                    logger.info(
                        "push-down of %s: attempt %d of %d failed, next in "
                        "%.1f s: %s",
                        span,
                        failures,
                        attempts,
                        seconds,
                        last,
                    )
                    scope.wait(seconds)
        except BaseException:
            self._breaker.abandoned()
            raise
        may_log = self._breaker.failed(last, time.monotonic() - started)
        logger.log(
            logging.WARNING if may_log else logging.DEBUG,
            "push-down of %s failed, raw reads for a while: %s",
            span,
            last,
        )
        return None

    def _load(self, span: Span, training: Training | None) -> LoadedSpan:
        started, started_cpu = time.monotonic(), time.thread_time()
        try:
            body = self._spec.open(
                self._connection, span, training, seconds=self._limits.seconds
            )
        except HapiError as error:
            raise unreadable(error, span.container, span.shard) from error
        state = body.headers.get(HEADER_CACHE, CACHE_OFF)
        if not span.is_group:
            self._warn_of_no_cache(state, span)
        with body:
            reader = read_features(body)
            batches = list(reader)
            body.drain()
            loaded = self._loaded(span, batches)
        assert reader.summary is not None, "the reader raises without one"
        if reader.summary.saturated:
            self._note_saturated(reader.summary.saturated)
        self._tracker.record(
            Route(self._spec.cut, self._spec.encoding),
            span,
            training,
            # The store does not cache features with errors, although the
            # header came before them.
            CACHE_MISS if loaded.failures else state,
        )
        costs = SpanEvent(
            was_cached=state == CACHE_HIT,
            request_seconds=time.monotonic() - started,
            unpack_cpu_seconds=time.thread_time() - started_cpu,
        )
        if costs.was_cached:
            self._counters.add(cached=len(span.rows))
            return replace(loaded, costs=costs)
        costs = replace(
            costs,
            server_cpu_seconds=reader.summary.cpu_seconds,
            server_seconds={
                stage: sum(batch.timings.get(stage, 0.0) for batch in batches)
                for stage in STAGES
            },
            load=reader.summary.load,
            worker=body.headers.get(HEADER_WORKER, ""),
        )
        return replace(loaded, costs=costs)

    def _warn_of_no_cache(self, state: str, span: Span) -> None:
        is_refused = self._spec.cache != CACHE_OFF and state == CACHE_OFF
        if is_refused and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the store caches no features of %s: the operator has not "
                "enabled the cache, or the shards are large objects",
                span.container,
            )

    def _note_saturated(self, count: int) -> None:
        if not self._counters.count().saturated:
            logger.warning(
                "features beyond the range of %s were clipped (counted in "
                "stats.saturated); use encoding='float32' to avoid this",
                self._spec.encoding,
            )
        self._counters.add(saturated=count)

    def _loaded(
        self, span: Span, batches: Sequence[FeatureBatch]
    ) -> LoadedSpan:
        rows = [row for batch in batches for row in batch.rows]
        first = 0
        if span.is_group:
            first = span.rows[0].sample
            check_objects(span, rows)
        check_keys(span, [(first + row.index, row.key) for row in rows])
        failures = {
            number: row.error
            for number, row in enumerate(rows)
            if row.error is not None
        }
        num_good = len(rows) - len(failures)
        try:
            features = self._decoded(batches, num_good)
        except ValueError as error:
            raise ClientError(
                "truncated",
                f"{span.path} {span.samples}: {error}",
            ) from error
        return LoadedSpan(span, self._spec.cut, features, failures)

    def _decoded(
        self, batches: Sequence[FeatureBatch], num_good: int
    ) -> torch.Tensor:
        features = torch.empty(
            (num_good, *self._spec.shape), dtype=torch.float32
        )
        rest = features
        for batch in batches:
            if batch.features is not None:
                count = len(batch.features)
                decode_features(
                    batch.features,
                    self._spec.encoding,
                    batch.scale,
                    batch.zero,
                    out=rest[:count],
                )
                rest = rest[count:]
        if len(rest):
            raise ValueError(f"features of {len(rest)} samples are missing")
        return features
