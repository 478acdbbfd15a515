"""The routes of a job's spans: planned and revised, or of a fixed cut."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial

import torch

from hapi_client.data.splits import TRAIN
from hapi_client.job.opened_data import OpenedData
from hapi_client.job.options import JobConfig
from hapi_client.loading.decode_pool import DecodePool
from hapi_client.loading.feature_request import FeatureRequestSpec
from hapi_client.loading.loader_factory import LoaderFactory
from hapi_client.metrics.events import WindowMetrics
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.model.split_arguments import AUTO
from hapi_client.planning.cache_listing import CacheListing
from hapi_client.planning.cost_estimators import CostEstimators
from hapi_client.planning.device_profile import LocalFacts, measure
from hapi_client.planning.inputs import PlannerInputs, RemainingWork
from hapi_client.planning.job_planner import JobPlanner
from hapi_client.planning.observed_costs import observed_facts
from hapi_client.planning.replanner import ReplanOptions
from hapi_client.planning.sample_probe import ProbeSamples, read_samples
from hapi_client.sampling.augmentation_schedule import AugmentationSchedule
from hapi_protocol.feature_reader import read_features
from hapi_protocol.headers import ModelPath
from hapi_splitter.cuts import Cut
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.reference_image import reference_image
from hapi_splitter.planner.problem import LINK, Route

PROBE_SECONDS = 60.0
"""Deadline for reading the samples that are measured."""
REFERENCE_DECODES = 4
PAUSE_SECONDS = 5.0
"""Maximum wait until the decode threads are idle."""
REPLAN = ReplanOptions()


class JobPlan:
    """The routes of a job's spans.

    Args:
        frozen: frozen region of the model.
        config: options of the job.

    Attributes:
        cut: number of the cut, or ``"auto"``.
        planner: makes and revises the plan; None if the cut is fixed, and
            before :meth:`start`.

    Raises:
        ClientError: ``bad_configuration`` naming cut or encoding.
    """

    def __init__(self, frozen: FrozenRegion, config: JobConfig) -> None:
        frozen.check_encodings(config.plan.encodings)
        self.cut: int | str = (
            AUTO if config.cut == AUTO else frozen.cut_number(config.cut)
        )
        self.planner: JobPlanner | None = None
        self._frozen = frozen
        self._config = config
        self._num_ranks = 1
        self._samples_at_load = 0

    def start(
        self,
        opened: OpenedData,
        factory: LoaderFactory,
        augmented: AugmentationSchedule,
    ) -> None:
        """Begins to plan, or stores the package of a fixed cut.

        Raises:
            HapiError: if the package of a fixed cut cannot be stored.
        """
        self._opened = opened
        self._factory = factory
        if self.cut == AUTO:
            self.planner = self._make_planner()
        elif self.cut:
            assert isinstance(self.cut, int), "planned otherwise"
            route = Route(self.cut, self.encodings[0])
            factory.scheduler.change({route: 1.0})
            factory.prepare_reading(
                opened.splits[TRAIN], augmented.training(0), self._push
            )

    @property
    def encodings(self) -> Sequence[str]:
        """Encodings that features may have on the wire."""
        cuts: Sequence[Cut] = self._frozen.device_graph.cuts
        if isinstance(self.cut, int) and self.cut:
            cuts = [cuts[self.cut - 1]]
        texts = (
            encoding
            for cut in cuts
            for encoding in self._config.plan.encodings(cut.dtype)
        )
        return tuple(dict.fromkeys(texts))

    def link_limits(self) -> bool:
        """True if the link limits the plan, or there is none."""
        plan = self.planner.plan if self.planner else None
        return plan is None or LINK in plan.binding

    def begin(self, *, num_ranks: int | None) -> None:
        """Notes the start of an epoch.

        Args:
            num_ranks: number of ranks that share it; None for evaluation.
        """
        if num_ranks is not None:
            self._num_ranks = num_ranks
        if self.planner is not None:
            self.planner.begin(is_training=num_ranks is not None)

    def span_arrived(self) -> None:
        """Notes that a span has arrived, in the training loop's thread."""
        if self.planner is not None:
            self.planner.span_arrived()

    def state_loaded(self) -> None:
        """Notes that the job continues another run from here."""
        self._samples_at_load = self._samples_so_far()

    def close(self) -> None:
        if self.planner is not None:
            self.planner.close()

    def _samples_so_far(self) -> int:
        """Samples delivered to the training loops of all ranks."""
        return (
            self._num_ranks * self._factory.recorder.counters.count().samples
        )

    def _early_samples(self) -> int:
        """Samples that all ranks have read before their turn."""
        return self._num_ranks * self._factory.sources.early.num_samples

    def _earlier_samples(self) -> int:
        """Samples delivered by the run that this one continues, or 0."""
        loaded = self._opened.epochs.loaded
        if loaded is None:
            return 0
        steps = loaded.step * self._opened.options.batch_size
        done = loaded.epoch * self._opened.num_samples + steps
        return done - self._samples_at_load

    def _push(self) -> None:
        """Stores the package."""
        connection = self._opened.connection
        connection.require_hapi()
        self._package_stored(
            *self._frozen.store(connection, self._config.models_container)
        )

    def _read(self, max_bytes: float) -> ProbeSamples:
        return read_samples(
            self._opened.connection,
            self._opened.splits[TRAIN].spans,
            medium=self._frozen.transform.medium,
            seconds=PROBE_SECONDS,
            max_bytes=max_bytes,
        )

    def _measure(self, probe: ProbeSamples) -> LocalFacts:
        # Concurrent decoding would distort the measurement.
        with self._factory.pool.paused(PAUSE_SECONDS):
            return measure(self._frozen, probe, self._config.plan.encodings)

    def _observe(self, window: WindowMetrics | None) -> LocalFacts | None:
        region = self._frozen
        if isinstance(region.transform, ArrayTransform):
            return None
        observe = partial(
            observed_facts,
            region,
            window,
            self._config.plan.encodings,
            self._opened.splits[TRAIN].spans,
        )
        if window is None:
            return observe(1.0)
        # By a decode thread: reference_seconds() would change the number of
        # torch's threads, in which the loop computes.  By one of its own: the
        # others have spans to decode first.
        pixels = torch.empty(region.form.shape, dtype=region.form.dtype)
        image = reference_image()
        with closing(DecodePool(region.decode, 1)) as pool:
            seconds = [
                pool.result(pool.submit(image, pixels), PROBE_SECONDS)
                for _ in range(REFERENCE_DECODES)
            ]
        return observe(min(seconds))

    def _package_stored(self, model: ModelPath, sent_bytes: int) -> None:
        self._factory.recorder.counters.add(package_bytes=sent_bytes)
        self._factory.set_routes(model)

    def _try_push(self, model: ModelPath) -> None:
        region, last = self._frozen, self._frozen.num_cuts
        span = self._opened.splits[TRAIN].spans[0].part(0, 1)
        dtype = region.device_graph.cuts[-1].dtype
        spec = FeatureRequestSpec(
            model,
            last,
            self._config.plan.encodings(dtype)[0],
            region.cut_shape(last),
        )
        connection = self._opened.connection
        with spec.open(connection, span, seconds=PROBE_SECONDS) as body:
            for _ in read_features(body):
                pass
            body.drain()

    def _make_planner(self) -> JobPlanner:
        opened, factory = self._opened, self._factory
        train = opened.splits[TRAIN]
        sources = factory.sources
        splits = [data.spans for data in opened.splits.values()]
        return JobPlanner(
            PlannerInputs(
                connection=opened.connection,
                region=self._frozen,
                models_container=self._config.models_container,
                read=self._read,
                measure=self._measure,
                observe=self._observe,
                remaining_work=RemainingWork(
                    train.num_samples,
                    self._config.plan.epochs,
                    lambda: factory.coverage(train),
                ),
                options=REPLAN,
                package_stored=self._package_stored,
                try_push=self._try_push,
                samples_so_far=self._samples_so_far,
                earlier_samples=self._earlier_samples,
                early_rate=lambda: sources.early.bytes_per_second,
                early_samples=self._early_samples,
                tracker=sources.tracker,
                listing=CacheListing(
                    opened.connection, splits, sources.tracker
                ),
            ),
            CostEstimators(
                pushdown_concurrency=lambda: (
                    sources.pushdown_concurrency.limit
                ),
                train_on_cpu=self._frozen.device.type == "cpu",
                read_concurrency=self._config.read.num_threads,
            ),
            factory.scheduler,
            factory.recorder,
        )
