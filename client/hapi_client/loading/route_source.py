"""Chooses the route of each span.

:meth:`RoutingSource.task` decides, in this order: features that Swift has
cached, and samples that this host has stored, are used outside the weights;
spans that were read early are decoded here if the link limits; the scheduler
follows the plan's weights, and avoids routes that lag behind.  A pushed span
is read raw after all if push-down fails: see :meth:`.FeatureSource.load`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from hapi_client.caching.feature_cache import SampleCache
from hapi_client.loading.circuit_breaker import (
    PushdownCircuitBreaker,
    PushdownConcurrency,
)
from hapi_client.loading.decode_pool import DecodePool
from hapi_client.loading.early_reads import EarlyReads
from hapi_client.loading.feature_fetcher import FeatureFetcher
from hapi_client.loading.feature_request import FeatureRequestSpec
from hapi_client.loading.feature_source import FeatureSource
from hapi_client.loading.raw_source import RawSource
from hapi_client.loading.read_concurrency import ReadConcurrency
from hapi_client.loading.read_config import ReadConfig
from hapi_client.loading.span_source import (
    CACHE_QUEUE,
    PUSHDOWN_QUEUE,
    RAW_QUEUE,
    LoadedSpan,
    SpanTask,
)
from hapi_client.metrics.job_recorder import JobRecorder
from hapi_client.model.client_region import ClientRegion
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.planning.route_scheduler import (
    RouteScheduler,
    straggling_routes,
)
from hapi_client.reports.epoch_recorder import EpochRecorder
from hapi_client.swift.connection import Connection
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import Span
from hapi_protocol.headers import ModelPath
from hapi_protocol.transforms import Training
from hapi_splitter.planner.problem import RAW_ROUTE, Route


class SourceRegistry:
    """Sources of all routes, made when they are first needed.

    Args:
        connection: connection to the account.
        region: computes frozen layers on the client.
        pool: decodes samples.
        options: options of reading.
        recorder: recorder of the job.
        tracker: tracker of the store's cache.
        span_read: called when a raw read is nearly complete, so that another
            one may begin.
        stored: as :class:`.RawSource` takes it.
        early: spans that were read early.
        link_limits: returns True if the link limits the present plan.

    Attributes:
        early: as given.
        tracker: tracker of the store's cache.
        model: path of the package; must be set before push-down.
        num_threads: maximum number of concurrent reads of a queue.
        pushdown_concurrency: limit of concurrent feature reads.
        read_concurrency: limit of concurrent raw reads.
        link_limits: as given.
    """

    def __init__(
        self,
        connection: Connection,
        region: ClientRegion,
        pool: DecodePool,
        options: ReadConfig,
        recorder: JobRecorder,
        tracker: CacheTracker,
        span_read: Callable[[], None],
        stored: Callable[[Training | None], SampleCache | None],
        early: EarlyReads,
        link_limits: Callable[[], bool],
    ) -> None:
        self.early = early
        self.link_limits = link_limits
        self.tracker = tracker
        self.model: ModelPath | None = None
        self._connection = connection
        self._region = region
        self._limits = options.span_limits
        self._counters = recorder.counters
        self.num_threads = options.num_threads
        self.read_concurrency = ReadConcurrency(
            options.num_threads,
            lambda: connection.traffic.count().received_bytes,
            span_read,
        )
        self._raw = RawSource(
            connection,
            pool,
            region.form,
            self._limits,
            recorder,
            self.read_concurrency,
            region.transform.medium,
            stored,
            early,
        )
        # One breaker for all cuts: they share the worker.
        self._breaker = PushdownCircuitBreaker(time.monotonic)
        self.pushdown_concurrency = PushdownConcurrency(options.num_threads)
        self._feature_sources: dict[Route, FeatureSource] = {}

    def __call__(self, route: Route) -> RawSource | FeatureSource:
        if route == RAW_ROUTE:
            return self._raw
        if route not in self._feature_sources:
            self._feature_sources[route] = self._make_source(route)
        return self._feature_sources[route]

    def _make_source(self, route: Route) -> FeatureSource:
        assert self.model is not None, "set before anything is pushed"
        cut, encoding = route
        spec = FeatureRequestSpec(
            self.model,
            cut,
            encoding,
            self._region.cut_shape(cut),
            self.tracker.mode,
        )
        return FeatureSource(
            FeatureFetcher(
                self._connection,
                spec,
                self._limits.seconds,
                self._counters,
                self.tracker,
            ),
            self._raw,
            self._breaker,
            self.pushdown_concurrency,
            self._limits,
            self._counters,
        )


class RoutingSource:
    """Loads spans on the routes of a scheduler.

    Cached features, and bytes that were read early on a slow link, are used
    outside the route weights, because they use neither worker nor link.

    Args:
        scheduler: schedules spans on routes.
        sources: sources by route.
        recorder: records the epoch.
        training: seed and epoch of random changes; None for evaluation.
    """

    def __init__(
        self,
        scheduler: RouteScheduler[Route],
        sources: SourceRegistry,
        recorder: EpochRecorder,
        training: Training | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._sources = sources
        self._recorder = recorder
        self._training = training

    def concurrency_limit(self, read_queue: str) -> int:
        """Returns the maximum number of spans being read in a queue."""
        if read_queue == PUSHDOWN_QUEUE:
            return self._sources.pushdown_concurrency.limit
        if read_queue == RAW_QUEUE:
            return self._sources.read_concurrency.limit
        return self._sources.num_threads

    def task(
        self,
        span: Span,
        has_room: Callable[[str], bool],
        samples_left: int,
    ) -> SpanTask | None:
        """Returns the task of a span: cached, or of a scheduled route."""
        cached = self._sources.tracker.cached_route(span, self._training)
        if cached is not None:
            source = self._sources(cached)
            assert isinstance(source, FeatureSource), (
                "only features are cached"
            )
            task = source.task(span, self._training, expect_hit=True)
            return self._recorded(cached, span, task)
        if RAW_ROUTE in self._scheduler.weights:
            task = self._sources(RAW_ROUTE).task(span, self._training)
            if task.read_queue == CACHE_QUEUE:
                return self._recorded(RAW_ROUTE, span, task)
        if (
            self._sources.early.holds(span)
            and self._sources.link_limits()
            and has_room(RAW_QUEUE)
        ):
            task = self._sources(RAW_ROUTE).task(span, self._training)
            return self._recorded(RAW_ROUTE, span, task)
        route = self._scheduler.choose(
            len(span.rows),
            lambda route: has_room(queue_of(route)),
            self._stragglers(span, samples_left),
        )
        if route is None:
            return None
        if route != RAW_ROUTE:
            self._sources.early.stop()
        return self._recorded(
            route, span, self._sources(route).task(span, self._training)
        )

    def _recorded(self, route: Route, span: Span, task: SpanTask) -> SpanTask:
        """Wraps a task so that its time and samples are recorded."""
        recorder = self._recorder

        def load(scope: CancelScope) -> LoadedSpan:
            # Cached reads do not use the worker.
            waited_for = (
                nullcontext()
                if task.read_queue == CACHE_QUEUE
                else recorder.job.in_flight(route)
            )
            with recorder.span(route, len(span.rows)) as arrived, waited_for:
                loaded = task.load(scope)
                arrived(loaded.costs)
            return loaded

        return replace(task, load=load)

    def _stragglers(self, span: Span, samples_left: int) -> set[Route]:
        job, count = self._recorder.job, len(span.rows)
        weights = self._scheduler.weights
        return straggling_routes(
            weights,
            {route: job.span_seconds(route, count) for route in weights},
            job.samples_per_second,
            samples_left,
            {route: job.pending_samples(route, count) for route in weights},
        )


def queue_of(route: Route) -> str:
    return RAW_QUEUE if route == RAW_ROUTE else PUSHDOWN_QUEUE
