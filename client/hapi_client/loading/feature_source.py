"""Loads spans as features from the store, with fallback to raw reads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from hapi_client.loading.circuit_breaker import (
    PushdownCircuitBreaker,
    PushdownConcurrency,
    can_fall_back,
)
from hapi_client.loading.feature_fetcher import FeatureFetcher
from hapi_client.loading.raw_source import RawSource, delay_seconds
from hapi_client.loading.span_source import (
    CACHE_QUEUE,
    PUSHDOWN_QUEUE,
    RAW_QUEUE,
    LoadedSpan,
    SpanLimits,
    SpanTask,
)
from hapi_client.metrics.events import JobStats
from hapi_client.sums import ThreadTotal
from hapi_client.swift.retry import is_retryable
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import Span
from hapi_protocol.errors import HapiError, SourceChangedError
from hapi_protocol.transforms import Training

logger = logging.getLogger(__name__)


class FeatureSource:
    """Loads spans as features, or at cut 0 after a fallback.

    A span is delivered completely or not at all: a stream that breaks off is
    requested again, and after the last attempt the span is read raw.

    Args:
        fetcher: requests a span's features.
        raw: source of the fallback.
        breaker: stops push-down after failures.
        concurrency: limit of concurrent feature reads.
        limits: time limits of each span.
        counters: counters of the job.
    """

    def __init__(
        self,
        fetcher: FeatureFetcher,
        raw: RawSource,
        breaker: PushdownCircuitBreaker,
        concurrency: PushdownConcurrency,
        limits: SpanLimits,
        counters: ThreadTotal[JobStats],
    ) -> None:
        self._fetcher = fetcher
        self._raw = raw
        self._breaker = breaker
        self._concurrency = concurrency
        self._limits = limits
        self._counters = counters

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
            self._fetcher.cost_bytes(span),
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
                    loaded = self._fetcher.load(span, training)
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
