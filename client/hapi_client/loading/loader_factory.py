"""What feeds loaders: decoding threads, the ways of spans, counters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from hapi_client.data.splits import DataSet
from hapi_client.loading.decode_pool import DecodePool
from hapi_client.loading.feature_loader import (
    FeatureLoader,
    LoaderPlan,
    leave_them_out,
)
from hapi_client.loading.prefetcher import Fetcher, ReadConfig
from hapi_client.loading.route_source import RoutingSource, SourceRegistry
from hapi_client.loading.span_source import SpanSource
from hapi_client.metrics.counters import JobCounters
from hapi_client.metrics.window_collector import MetricsCollector
from hapi_client.model.client_region import ClientRegion
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.planning.route_scheduler import RouteScheduler
from hapi_client.reports.epoch_recorder import EpochRecorder
from hapi_client.sampling.epochs import ReaderShare
from hapi_client.swift.connection import Connection
from hapi_protocol.data_index import Span
from hapi_protocol.errors import ClientError
from hapi_protocol.headers import ModelPath
from hapi_protocol.transforms import Training
from hapi_splitter.planner.problem import RAW_ROUTE, Route


class LoaderFactory:
    """Makes loaders that share connection, threads, plan and figures.

    Args:
        connection: to the account; it stays the caller's.
        region: what is computed here.
        container: of the shards.
        options: how to fetch.
        tracker: of the store's cache.

    Attributes:
        counters: of all loaders.
        meter: likewise.
        pool: decodes here.
        mixer: deals spans to ways; it begins with streaming alone.
        sources: of the ways.
    """

    def __init__(
        self,
        connection: Connection,
        region: ClientRegion,
        container: str,
        options: ReadConfig,
        tracker: CacheTracker,
    ) -> None:
        self._connection = connection
        self._region = region
        self._options = options
        self._is_closed = False
        # Python's collector may close a forgotten job in this very thread.
        self._lock = threading.RLock()
        self._fetchers: weakref.WeakSet[Fetcher] = weakref.WeakSet()
        self.counters = JobCounters()
        self.meter = MetricsCollector(
            lambda: connection.traffic.count().received_bytes
        )
        self.mixer: RouteScheduler[Route] = RouteScheduler({RAW_ROUTE: 1.0})
        self.pool = DecodePool(region.decode, options.decode_threads)
        self.sources = SourceRegistry(
            connection,
            container,
            region,
            self.pool,
            options,
            self.counters,
            self.meter,
            tracker,
            self._top_up,
        )

    def push(
        self, model: ModelPath | None, mix: Mapping[Route, float] | None = None
    ) -> None:
        """From now on.

        Args:
            model: the package that is there; None where nothing is pushed.
            mix: weights of the ways; None leaves them.
        """
        self.sources.model = model
        if mix is not None:
            self.mixer.change(mix)

    def loader(
        self,
        data: DataSet,
        share: ReaderShare,
        training: Training | None,
        *,
        on_error: str,
        needs_every_step: bool = False,
        span_came: Callable[[], None] = lambda: None,
        remedy: Callable[[Span, int], str] = leave_them_out,
        tally: EpochRecorder | None = None,
    ) -> FeatureLoader:
        """A pass over a share of some data.

        Args:
            data: what there is.
            share: of it.
            training: seed and epoch of random changes; None for none.
            on_error: as
            :attr:`hapi_client.loading.feature_loader.LoaderPlan.on_error`.
            needs_every_step: likewise.
            span_came: likewise.
            remedy: likewise.
            tally: of the pass.
        """
        tally = tally or EpochRecorder()
        plan = LoaderPlan(
            spans=data.spans,
            labels=data.labels,
            to_freeze_point=self._region.run_suffix,
            on_error=on_error,
            counters=self.counters,
            meter=self.meter,
            span_came=span_came,
            needs_every_step=needs_every_step,
            remedy=remedy,
            tally=tally,
        )
        source = RoutingSource(
            self.mixer, self.sources, self.meter, tally, training
        )
        return FeatureLoader(
            plan,
            share.read_plan,
            partial(self._fetcher, source),
            self._region.device,
            share.delivered,
            share.num_steps,
        )

    def _fetcher(self, source: SpanSource, spans: Sequence[Span]) -> Fetcher:
        if self._is_closed:
            raise ClientError(
                "not_connected", "the job was closed before this loop began"
            )
        fetcher = Fetcher(self._connection, source, spans, self._options)
        with self._lock:
            self._fetchers.add(fetcher)
        return fetcher

    def _top_up(self) -> None:
        for fetcher in self._open_fetchers():
            fetcher.top_up()

    def _open_fetchers(self) -> list[Fetcher]:
        with self._lock:
            return list(self._fetchers)

    def interrupt(self) -> None:
        """Ends what loaders have under way."""
        for fetcher in self._open_fetchers():
            fetcher.close()

    def close(self) -> None:
        """Ends all threads; the connection stays open."""
        self._is_closed = True
        self.interrupt()
        self.pool.close()
