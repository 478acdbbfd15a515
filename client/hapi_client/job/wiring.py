"""Connects the planner of a job with its loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

import torch

from hapi_client.data.splits import DataSet
from hapi_client.loading.decode_pool import DecodePool
from hapi_client.loading.feature_request import FeatureRequestSpec
from hapi_client.loading.loader_factory import LoaderFactory
from hapi_client.loading.prefetcher import ReadConfig
from hapi_client.metrics.events import WindowMetrics
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.planning.cache_listing import CacheListing
from hapi_client.planning.cost_estimators import CostEstimators
from hapi_client.planning.device_profile import LocalFacts, measure
from hapi_client.planning.inputs import PlannerInputs, RemainingWork
from hapi_client.planning.job_planner import JobPlanner
from hapi_client.planning.observed_costs import observed_facts
from hapi_client.planning.replanner import ReplanOptions
from hapi_client.planning.sample_probe import ProbeSamples, read_samples
from hapi_client.swift.connection import Connection
from hapi_protocol.data_index import Span
from hapi_protocol.feature_reader import read_features
from hapi_protocol.headers import ModelPath
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.reference_image import reference_image

PROBE_SECONDS = 60.0
"""Deadline for reading the samples that are measured."""
REFERENCE_DECODES = 4
PAUSE_SECONDS = 5.0
"""Maximum wait until the decode threads are idle."""


def make_planner(
    connection: Connection,
    region: FrozenRegion,
    factory: LoaderFactory,
    data: DataSet,
    splits: Iterable[Sequence[Span]],
    *,
    models_container: str,
    encodings: Callable[[str], Sequence[str]],
    epochs: float | None,
    options: ReadConfig,
    replan: ReplanOptions,
    samples_so_far: Callable[[], int],
    earlier_samples: Callable[[], int],
    early_samples: Callable[[], int],
) -> JobPlanner:
    """Returns a planner that schedules the spans of a job's loaders.

    Args:
        connection: connection of the job.
        region: frozen region of its model.
        factory: factory of its loaders.
        data: training data.
        splits: spans of all splits.
        models_container: container in which packages are stored.
        encodings: returns the encodings that a plan may choose from, from
            the dtype of a cut.
        epochs: number of epochs; None if unknown.
        options: options of reading.
        replan: options of re-planning.
        samples_so_far: returns the samples delivered by this run.
        earlier_samples: returns those of the run that it continues.
        early_samples: returns those that were read before their turn.
    """

    def read(max_bytes: float) -> ProbeSamples:
        return read_samples(
            connection,
            data.spans,
            medium=region.transform.medium,
            seconds=PROBE_SECONDS,
            max_bytes=max_bytes,
        )

    def measured(probe: ProbeSamples) -> LocalFacts:
        # Concurrent decoding would distort the measurement.
        with factory.pool.paused(PAUSE_SECONDS):
            return measure(region, probe, encodings)

    def observed(window: WindowMetrics | None) -> LocalFacts | None:
        if isinstance(region.transform, ArrayTransform):
            return None
        if window is None:
            return observed_facts(region, None, encodings, data.spans, 1.0)
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
        return observed_facts(
            region, window, encodings, data.spans, min(seconds)
        )

    def stored(model: ModelPath, sent_bytes: int) -> None:
        factory.recorder.counters.add(package_bytes=sent_bytes)
        factory.push(model)

    def try_push(model: ModelPath) -> None:
        last, span = region.num_cuts, data.spans[0].part(0, 1)
        spec = FeatureRequestSpec(
            model,
            last,
            encodings(region.device_graph.cuts[-1].dtype)[0],
            region.cut_shape(last),
        )
        with spec.open(connection, span, seconds=PROBE_SECONDS) as body:
            for _ in read_features(body):
                pass
            body.drain()

    tracker = factory.sources.tracker
    return JobPlanner(
        PlannerInputs(
            connection=connection,
            region=region,
            models_container=models_container,
            read=read,
            measure=measured,
            observe=observed,
            remaining_work=RemainingWork(
                data.num_samples, epochs, lambda: factory.coverage(data)
            ),
            options=replan,
            package_stored=stored,
            try_push=try_push,
            samples_so_far=samples_so_far,
            earlier_samples=earlier_samples,
            early_rate=lambda: factory.sources.early.bytes_per_second,
            early_samples=early_samples,
            tracker=tracker,
            listing=CacheListing(connection, splits, tracker),
        ),
        CostEstimators(
            pushdown_concurrency=lambda: (
                factory.sources.pushdown_concurrency.limit
            ),
            train_on_cpu=region.device.type == "cpu",
            read_concurrency=options.num_threads,
        ),
        factory.scheduler,
        factory.recorder,
    )
