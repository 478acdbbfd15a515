"""Makes loaders that share connection, threads, plan and counters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hapi_client.caching.cache_config import CacheConfig
from hapi_client.caching.host_cache import HostCache
from hapi_client.data.splits import DataSet, changed_shards
from hapi_client.loading.decode_pool import DecodePool
from hapi_client.loading.early_reads import EarlyReads
from hapi_client.loading.feature_loader import FeatureLoader
from hapi_client.loading.loader_plan import (
    EmptySteps,
    LoaderPlan,
    skip_remedy,
)
from hapi_client.loading.prefetcher import Prefetcher
from hapi_client.loading.read_config import ReadConfig
from hapi_client.loading.route_source import RoutingSource, SourceRegistry
from hapi_client.loading.skipped_samples import SkippedSamples
from hapi_client.loading.span_source import SpanSource
from hapi_client.metrics.job_recorder import JobRecorder
from hapi_client.model.client_region import ClientRegion
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.planning.route_scheduler import RouteScheduler
from hapi_client.reports.epoch_recorder import EpochRecorder
from hapi_client.sampling.epochs import ReaderShare
from hapi_client.swift.connection import Connection
from hapi_protocol.data_index import Span
from hapi_protocol.encodings import Encoding
from hapi_protocol.errors import ClientError
from hapi_protocol.headers import ModelPath
from hapi_protocol.transforms import Training
from hapi_splitter.numerics import numerics_tag
from hapi_splitter.planner.problem import RAW_ROUTE, Route


def open_host_cache(
    connection: Connection,
    region: ClientRegion,
    splits: Collection[DataSet],
    options: CacheConfig,
    encodings: Sequence[str],
    variants: int | None,
) -> HostCache:
    """Returns the features of a job that are cached on this host.

    Args:
        connection: connection of the job.
        region: frozen region of its model.
        splits: its data sets.
        options: where features are cached.
        encodings: those in which features may arrive: rounded ones are no
            features of a job that wants them exact.
        variants: number of epochs after which random changes of the images
            repeat; None if they never do.
    """
    last = region.num_cuts

    def facts() -> dict[str, Any]:
        return {
            "storage": connection.storage_url,
            "model": region.digest,
            "encodings": sorted({Encoding.parse(e).dtype for e in encodings}),
            "numerics": numerics_tag(region.device.type),
            "batch": region.forward_samples,
            # Samples that are larger are cached as failures.
            "max_pixels": region.max_pixels,
        }

    return HostCache(
        facts,
        region.cut_shape(last),
        region.cut_dtype(last),
        splits,
        options,
        variants,
        lambda data: changed_shards(connection, data),
    )


class LoaderFactory:
    """Makes loaders that share connection, threads, plan and counters.

    Args:
        connection: connection to the account; the caller closes it.
        region: computes frozen layers on the client.
        options: options of reading.
        tracker: tracker of the store's cache.
        host_cache: features that are cached on this host; None for none.
        early: spans that were read early; None for none.
        skipped: samples that the job leaves out; None for none so far.
        link_limits: returns True if the link limits the present plan.

    Attributes:
        skipped: samples that the job leaves out.
        recorder: records all loaders.
        pool: decodes samples.
        scheduler: schedules spans on routes; it begins with raw reads.
        sources: sources of all routes.
    """

    def __init__(
        self,
        connection: Connection,
        region: ClientRegion,
        options: ReadConfig,
        tracker: CacheTracker,
        host_cache: HostCache | None = None,
        early: EarlyReads | None = None,
        skipped: SkippedSamples | None = None,
        link_limits: Callable[[], bool] = lambda: True,
    ) -> None:
        self._host_cache = host_cache
        self._connection = connection
        self._region = region
        self._options = options
        self._is_closed = False
        self._prepare: Callable[[], None] | None = None
        self._preparing = threading.Lock()
        # Reentrant: the garbage collector may close a job in this thread.
        self._lock = threading.RLock()
        self._prefetchers: weakref.WeakSet[Prefetcher] = weakref.WeakSet()
        self.skipped = skipped or SkippedSamples()
        self.recorder = JobRecorder(connection.traffic)
        self.scheduler: RouteScheduler[Route] = RouteScheduler(
            {RAW_ROUTE: 1.0}
        )
        self.pool = DecodePool(region.decode)
        self.sources = SourceRegistry(
            connection,
            region,
            self.pool,
            options,
            self.recorder,
            tracker,
            self._top_up,
            host_cache.samples if host_cache else lambda training: None,
            early or EarlyReads(connection, (), options),
            link_limits,
        )

    def set_routes(
        self, model: ModelPath | None, mix: Mapping[Route, float] | None = None
    ) -> None:
        """Sets the package and the weights for further spans.

        Args:
            model: path of the stored package; None without push-down.
            mix: weights by route; None leaves them.
        """
        self.sources.model = model
        if mix is not None:
            self.scheduler.change(mix)

    def loader(
        self,
        data: DataSet,
        share: ReaderShare,
        training: Training | None,
        *,
        on_error: str,
        empty_steps: EmptySteps = "skip",
        span_arrived: Callable[[], None] = lambda: None,
        remedy: Callable[[Span, int], str] = skip_remedy,
        recorder: EpochRecorder | None = None,
        device: torch.device | None = None,
    ) -> FeatureLoader:
        """Returns a loader of one epoch.

        Args:
            data: the data set.
            share: the reader's share of it.
            training: seed and epoch of random changes; None for none.
            on_error: as :attr:`LoaderPlan.on_error`.
            empty_steps: as :attr:`LoaderPlan.empty_steps`.
            span_arrived: as :attr:`LoaderPlan.span_arrived`.
            remedy: as :attr:`LoaderPlan.remedy`.
            recorder: records the epoch.
            device: device of the batches; None for the region's.
        """
        recorder = recorder or EpochRecorder(self.recorder)
        self.sources.early.begin_epoch()
        cache = None
        if self._host_cache is not None:
            cache = self._host_cache.of(data, training)
        plan = LoaderPlan(
            spans=data.spans,
            labels=data.labels,
            run_suffix=self._region.run_suffix,
            batch_samples=self._region.batch_samples,
            on_error=on_error,
            recorder=recorder,
            span_arrived=span_arrived,
            empty_steps=empty_steps,
            remedy=remedy,
            cache=cache,
            skipped=self.skipped,
        )
        source = RoutingSource(
            self.scheduler, self.sources, recorder, training
        )
        return FeatureLoader(
            plan,
            share.read_plan,
            partial(self._prefetcher, source),
            device or self._region.device,
            share.delivered,
            share.num_steps,
        )

    def prepare_reading(
        self,
        data: DataSet,
        training: Training | None,
        prepare: Callable[[], None],
    ) -> None:
        """Runs a function before anything is read.

        At once, so that a mistake is found early; but if a data set is cached
        on this host, not before a loader needs anything else.

        Args:
            data: the data set.
            training: random changes of the images; None for none.
            prepare: called once, unless it raises.
        """
        cache = (
            self._host_cache.of(data, training) if self._host_cache else None
        )
        if cache is not None and cache.num_cached() == data.num_samples:
            self._prepare = prepare
        else:
            prepare()

    def coverage(self, data: DataSet) -> tuple[float, float]:
        """Returns :meth:`.HostCache.coverage` of a data set."""
        return (
            self._host_cache.coverage(data) if self._host_cache else (0.0, 0.0)
        )

    def _prefetcher(
        self, source: SpanSource, spans: Sequence[Span]
    ) -> Prefetcher:
        if self._is_closed:
            raise ClientError("not_connected", "closed before this loop began")
        with self._preparing:
            if spans and self._prepare is not None:
                self._prepare()
                self._prepare = None
        prefetcher = Prefetcher(self._connection, source, spans, self._options)
        with self._lock:
            self._prefetchers.add(prefetcher)
        return prefetcher

    def _top_up(self) -> None:
        for prefetcher in self._open_fetchers():
            prefetcher.top_up()

    def _open_fetchers(self) -> list[Prefetcher]:
        with self._lock:
            return list(self._prefetchers)

    def interrupt(self) -> None:
        """Ends the requests of all loaders."""
        for prefetcher in self._open_fetchers():
            prefetcher.close()

    def close(self) -> None:
        """Ends all threads; the connection stays open."""
        self._is_closed = True
        self.interrupt()
        self.pool.close()
        if self._host_cache is not None:
            self._host_cache.close()
