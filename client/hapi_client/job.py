"""A transfer-learning job: frozen layers near the data, the tail here."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hapi_client.connection import Connection
from hapi_client.decode import DecodePool
from hapi_client.estimates import Estimates
from hapi_client.fetch import Fetcher, FetchOptions
from hapi_client.frozen import AUTO, FrozenRegion, checked_encodings
from hapi_client.horizon import Horizon
from hapi_client.index import load_index
from hapi_client.labels import Labels, span_labels
from hapi_client.loader import FeatureLoader, LoaderPlan, check_on_error
from hapi_client.location import Location, parse_location
from hapi_client.meter import STREAMED, Meter
from hapi_client.mixed import MixedSource, Sources
from hapi_client.mixing import Mixer
from hapi_client.order import index_order, shuffled_order
from hapi_client.packages import DEFAULT_MODELS_CONTAINER
from hapi_client.planning import JobPlanner, PlanningParts
from hapi_client.probe import (
    LocalFacts,
    ProbeSamples,
    measure,
    read_samples,
)
from hapi_client.replan import PlanChange, ReplanOptions
from hapi_client.sources import SpanSource
from hapi_client.stats import JobCounters, JobStats
from hapi_protocol.errors import ClientError
from hapi_protocol.headers import CACHE_MODES, CACHE_OFF, ModelPath
from hapi_protocol.index import Span
from hapi_splitter.choice import Freeze
from hapi_splitter.plan import Plan, Problem

PROBE_SECONDS = 60.0
"""To read the samples that are measured."""
PAUSE_SECONDS = 5.0
"""For the images that are just being decoded."""


class TransferJob:
    """Trains a tail on features of a data set in Swift.

    ::

        with TransferJob(model, freeze="layer4",
                         data="swift://photos/train") as job:
            optimizer = torch.optim.SGD(job.tail.parameters(), lr=0.01)
            for epoch in range(5):
                for features, labels in job.loader(epoch):
                    loss = criterion(job.tail(features), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    Args:
        model: the whole network, with the weights to use; or two modules
            ``(frozen, tail)``, where torch.fx cannot trace it.
        freeze: what is frozen, as for :func:`hapi_splitter.trace.split`:
            the name of the last frozen module, a list of modules, or a
            function; None for two modules.
        data: ``swift://container/prefix`` of an indexed data set.
        batch_size: samples of a batch.
        transform: an ``ImageTransform``, or torchvision's
            ``weights.transforms()``; None for ImageNet's evaluation
            transform.
        cut: how much of the frozen region the store computes:
            ``"auto"`` plans what is fastest and keeps the plan up with the
            conditions (:mod:`hapi_client.planning`); ``"freeze"`` for all
            of it, ``"stream"`` or 0 for none (plain reads, all computed
            here), or a cut's number.
        encoding: of features on the wire; None leaves it to the plan, and
            means float32 with a fixed cut.
        floor: what a plan may round: ``"lossless"`` nothing, ``"half"``
            to 16 bits, ``"uint8"`` to 8.
        epochs: passes over the data that there will be, evaluations of it
            included, to judge whether one-off costs pay; None expects as
            many to come as there were already.
        labels: class name or key to integer, or a function of the key;
            None for the integers of the index.
        on_error: ``"raise"`` for a sample that cannot be decoded, or
            ``"skip"``, counted in ``stats.skipped``.
        seed: of the order of samples; not negative.
        connection: None makes one from the environment.
        device: of the tail and the client's part of the frozen region.
        models_container: where packages are stored.
        cache: whether features are kept in the store, for later epochs and
            jobs with the same model, cut and encoding: ``off``, ``read``
            what is there, or ``readwrite``, which takes room in your
            account (:doc:`the operator </operating>` has to allow it).  A
            fixed cut finds all of them again; what a plan pushes changes
            with the plan.
        options: how to fetch.
        replan: how often a plan is looked at again.

    Attributes:
        cut: its number, or ``"auto"``.
        tail: the trainable rest of ``model``; its parameters are those of
            ``model``.

    Raises:
        HapiError: naming what is wrong and the remedy.
    """

    def __init__(
        self,
        model: torch.nn.Module | tuple[torch.nn.Module, torch.nn.Module],
        *,
        freeze: Freeze | None = None,
        data: str,
        batch_size: int = 32,
        transform: Any = None,
        cut: int | str = AUTO,
        encoding: str | None = None,
        floor: str = "lossless",
        epochs: float | None = None,
        labels: Labels = None,
        on_error: str = "raise",
        seed: int = 0,
        connection: Connection | None = None,
        device: torch.device | str = "cpu",
        models_container: str = DEFAULT_MODELS_CONTAINER,
        cache: str = CACHE_OFF,
        options: FetchOptions | None = None,
        replan: ReplanOptions | None = None,
    ) -> None:
        check_on_error(on_error)
        encodings = checked_encodings(encoding, floor)
        check_epochs(epochs)
        check_cache(cache)
        self._owns_connection = connection is None
        self._connection = connection or Connection()
        self._traffic_before = self._connection.traffic.count()
        self._options = options or FetchOptions()
        self._order_arguments = (batch_size, seed)
        self._counters = JobCounters()
        self._fetchers: weakref.WeakSet[Fetcher] = weakref.WeakSet()
        self._frozen = FrozenRegion(
            model,
            freeze,
            transform,
            torch.device(device),
            self._options.forward_samples,
        )
        self.tail = self._frozen.tail
        self.cut: int | str = (
            AUTO if cut == AUTO else self._frozen.cut_number(cut)
        )
        location = parse_location(data)
        self._meter = Meter(
            lambda: self._connection.traffic.count().received_bytes
        )
        self._planner: JobPlanner | None = None
        self._plan = self._make_plan(location, labels, on_error)
        self._pool = DecodePool(
            self._frozen.decode, self._options.decode_threads
        )
        self._sources = Sources(
            self._connection,
            location.container,
            self._frozen,
            self._pool,
            self._options,
            self._counters,
            self._meter,
            cache,
        )
        try:
            if self.cut == AUTO:
                self._source = self._plan_source(
                    location.container,
                    models_container,
                    encodings,
                    Horizon(self.num_samples, epochs),
                    replan or ReplanOptions(),
                )
            else:
                self._source = self._fixed_source(
                    self._frozen.cut_number(cut),
                    models_container,
                    encodings[0],
                )
        except BaseException:
            self.close()
            raise

    def _make_plan(
        self, location: Location, labels: Labels, on_error: str
    ) -> LoaderPlan:
        index = load_index(self._connection, location)
        spans = index.spans()
        return LoaderPlan(
            spans=spans,
            labels=span_labels(spans, labels, index.class_names),
            to_freeze_point=self._frozen.finish,
            on_error=on_error,
            counters=self._counters,
            meter=self._meter,
            span_came=self._span_came,
        )

    def _fixed_source(
        self, cut: int, models_container: str, encoding: str
    ) -> SpanSource:
        way = (cut, encoding) if cut else STREAMED
        if cut:
            self._connection.require_hapi()
            model, sent_bytes = self._frozen.store(
                self._connection, models_container
            )
            self._counters.add(package_bytes=sent_bytes)
            self._sources.model = model
        return MixedSource(Mixer({way: 1.0}), self._sources, self._meter)

    def _plan_source(
        self,
        container: str,
        models_container: str,
        encodings: Sequence[str],
        horizon: Horizon,
        replan: ReplanOptions,
    ) -> SpanSource:
        def read(most_bytes: float) -> ProbeSamples:
            return read_samples(
                self._connection,
                container,
                self._plan.spans,
                seconds=PROBE_SECONDS,
                most_bytes=most_bytes,
            )

        def measured(probe: ProbeSamples) -> LocalFacts:
            # What is decoded meanwhile would make all else look slow.
            with self._pool.paused(PAUSE_SECONDS):
                return measure(self._frozen, probe, encodings)

        mixer = Mixer({STREAMED: 1.0})
        self._planner = JobPlanner(
            PlanningParts(
                connection=self._connection,
                region=self._frozen,
                models_container=models_container,
                read=read,
                measure=measured,
                horizon=horizon,
                options=replan,
                package_stored=self._package_stored,
                samples_so_far=lambda: self._counters.snapshot().samples,
            ),
            Estimates(
                push_width=lambda: self._sources.width.limit,
                train_on_cpu=self._frozen.device.type == "cpu",
                stream_width=self._options.num_threads,
            ),
            mixer,
            self._meter,
        )
        return MixedSource(mixer, self._sources, self._meter)

    def _package_stored(self, model: ModelPath, sent_bytes: int) -> None:
        self._counters.add(package_bytes=sent_bytes)
        self._sources.model = model

    def _span_came(self) -> None:
        if self._planner is not None:
            self._planner.span_came()

    @property
    def plan(self) -> Plan | None:
        """The present plan; None with a fixed cut, and until there is one.

        A job streams until then.
        """
        return self._planner.plan if self._planner else None

    @property
    def no_plan_reason(self) -> str | None:
        """Why :attr:`plan` is None; None when it is not."""
        if self._planner is None:
            return "the cut is fixed"
        return None if self.plan else self._planner.no_plan_reason

    @property
    def problem(self) -> Problem | None:
        """What :attr:`plan` solves, under the present conditions."""
        return self._planner.problem if self._planner else None

    @property
    def plan_changes(self) -> Sequence[PlanChange]:
        """All plans so far, oldest first."""
        return self._planner.changes if self._planner else ()

    @property
    def num_cuts(self) -> int:
        """Cut ``num_cuts`` is the whole frozen region."""
        return self._frozen.num_cuts

    @property
    def num_samples(self) -> int:
        """Samples of the data set."""
        return sum(len(span.rows) for span in self._plan.spans)

    @property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return 1 + max(
            (int(each.max()) for each in self._plan.labels), default=-1
        )

    @property
    def stats(self) -> JobStats:
        """Figures so far."""
        traffic = self._connection.traffic.count() - self._traffic_before
        stats = self._counters.snapshot()
        return replace(
            stats,
            bytes=traffic.total_bytes - stats.package_bytes,
            retries=stats.retries + traffic.retries,
        )

    def loader(
        self, epoch: int | None = None, *, drop_last: bool = False
    ) -> FeatureLoader:
        """One pass over the data set.

        Args:
            epoch: number of the training epoch; with the job's seed it
                fixes the order.  None for the index's order, without
                shuffling, as evaluation wants it.
            drop_last: leave out a shorter last batch.
        """
        batch_size, seed = self._order_arguments
        sizes = [len(span.rows) for span in self._plan.spans]
        if epoch is None:
            order = index_order(sizes, batch_size, drop_last=drop_last)
        else:
            order = shuffled_order(
                sizes,
                batch_size,
                seed=seed,
                epoch=epoch,
                buffer_spans=self._options.buffer_spans,
                drop_last=drop_last,
            )
        if self._planner is not None:
            self._planner.begin()
        return FeatureLoader(
            self._plan, order, self._open_spans, self._frozen.device
        )

    def _open_spans(self, spans: Sequence[Span]) -> Fetcher:
        fetcher = Fetcher(self._connection, self._source, spans, self._options)
        self._fetchers.add(fetcher)
        return fetcher

    def close(self) -> None:
        """Ends all requests and threads of the job."""
        for fetcher in list(self._fetchers):
            fetcher.close()
        if self._planner is not None:
            self._planner.close()
        self._pool.close()
        if self._owns_connection:
            self._connection.close()

    def __enter__(self) -> TransferJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_cache(cache: str) -> None:
    """
    Raises:
        ClientError: ``bad_configuration`` for what is no mode of the cache.
    """
    if cache not in CACHE_MODES:
        raise ClientError(
            "bad_configuration",
            f"cache is {cache!r}; one of {', '.join(CACHE_MODES)}",
        )


def check_epochs(epochs: float | None) -> None:
    """
    Raises:
        ClientError: ``bad_configuration`` for what is no number of epochs.
    """
    if epochs is not None and not 0 < epochs < math.inf:
        raise ClientError(
            "bad_configuration",
            f"epochs is {epochs!r}; a positive number, or None",
        )
