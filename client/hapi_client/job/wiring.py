"""The planner of a job, of the parts that the job has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hapi_client.data.splits import DataSet
from hapi_client.loading.loader_factory import LoaderFactory
from hapi_client.loading.prefetcher import ReadConfig
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.planning.cache_listing import CacheListing
from hapi_client.planning.cost_estimators import CostEstimators
from hapi_client.planning.device_profile import LocalFacts, measure
from hapi_client.planning.inputs import PlannerInputs, RemainingWork
from hapi_client.planning.planner import JobPlanner
from hapi_client.planning.replanner import ReplanOptions
from hapi_client.planning.sample_probe import ProbeSamples, read_samples
from hapi_client.swift.connection import Connection
from hapi_protocol.data_index import Span
from hapi_protocol.headers import ModelPath

PROBE_SECONDS = 60.0
"""To read the samples that are measured."""
PAUSE_SECONDS = 5.0
"""For the images that are just being decoded."""


def make_planner(
    connection: Connection,
    region: FrozenRegion,
    feeder: LoaderFactory,
    data: DataSet,
    splits: Iterable[Sequence[Span]],
    *,
    models_container: str,
    encodings: Sequence[str],
    epochs: float | None,
    options: ReadConfig,
    replan: ReplanOptions,
    samples_so_far: Callable[[], int],
    earlier_samples: Callable[[], int],
) -> JobPlanner:
    """A planner that deals the feeder's spans.

    Args:
        connection: of the job.
        region: of its model.
        feeder: of its loaders.
        data: that it trains on.
        splits: the spans of all splits, evaluated ones included.
        models_container: where packages are stored.
        encodings: that a plan may choose from.
        epochs: as of :class:`hapi_client.job.transfer_job.TransferJob`.
        options: likewise.
        replan: likewise.
        samples_so_far: as of
        :class:`hapi_client.planning.inputs.PlannerInputs`.
        earlier_samples: likewise.
    """

    def read(most_bytes: float) -> ProbeSamples:
        return read_samples(
            connection,
            data.container,
            data.spans,
            medium=region.transform.medium,
            seconds=PROBE_SECONDS,
            most_bytes=most_bytes,
        )

    def measured(probe: ProbeSamples) -> LocalFacts:
        # What is decoded meanwhile would make all else look slow.
        with feeder.pool.paused(PAUSE_SECONDS):
            return measure(region, probe, encodings)

    def stored(model: ModelPath, sent_bytes: int) -> None:
        feeder.counters.add(package_bytes=sent_bytes)
        feeder.push(model)

    tracker = feeder.sources.tracker
    return JobPlanner(
        PlannerInputs(
            connection=connection,
            region=region,
            models_container=models_container,
            read=read,
            measure=measured,
            horizon=RemainingWork(data.num_samples, epochs),
            options=replan,
            package_stored=stored,
            samples_so_far=samples_so_far,
            earlier_samples=earlier_samples,
            tracker=tracker,
            listing=CacheListing(connection, data.container, splits, tracker),
        ),
        CostEstimators(
            push_width=lambda: feeder.sources.push_width.limit,
            train_on_cpu=region.device.type == "cpu",
            stream_width=options.num_threads,
        ),
        feeder.mixer,
        feeder.meter,
    )
