"""The training process of a testbed's client tier.

``python -m benchmarks.suite.client_process`` answers questions on its
standard input (:mod:`benchmarks.testbed.remote`) until that ends.  It holds
one model and any number of named jobs.  One process runs all contenders, one
after the other, so that none of them competes for the core.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.networks import NETWORKS, build
from benchmarks.opponents.measurement import Meter, between, follow
from benchmarks.suite.fixed_cuts import outlook
from benchmarks.testbed.process_resources import client_device
from benchmarks.testbed.remote import serve
from hapi_client.caching.cache_config import CacheConfig
from hapi_client.data.upload import upload
from hapi_client.job.options import JobConfig, PlanConfig
from hapi_client.job.transfer_job import TransferJob
from hapi_client.loading.read_config import ReadConfig
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.model.package_store import DEFAULT_MODELS_CONTAINER
from hapi_client.plan_report.plan_study import advise
from hapi_client.plan_report.study_inputs import PlanRequest
from hapi_client.progress import SilentReporter
from hapi_client.sampling.partition import EpochPartition
from hapi_client.swift.cache_admin import CacheAdminClient
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.headers import CACHE_OFF
from hapi_splitter.inputs.image_transform import ImageTransform

SEED = 0
LEARNING_RATE = 1e-4
MOMENTUM = 0.9
STEADY_EPOCHS = 100_000
"""So many epochs that no startup cost matters to the plan."""
# The steady state is measured, and a wide shuffle buffer fills slowly.
# A partition for each rank, as narrow as the shuffle buffer.
READ_CONFIG = ReadConfig(
    buffer_spans=1,
    partition=EpochPartition(int(os.environ.get("WORLD_SIZE", "1"))),
)


class ClientTier:
    """Answers the questions of the experiments."""

    def __init__(self) -> None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self._stack = contextlib.ExitStack()
        self._jobs: dict[str, TransferJob] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._arguments: dict[str, Any] = {}
        self._model: torch.nn.Module | None = None
        self._plan = PlanConfig()
        self._memory_format = torch.contiguous_format

    def upload(self, shards: list[str], container: str) -> None:
        """Stores tar files as a data set."""
        with Connection() as connection:
            upload(
                connection,
                Location(container, ""),
                [Path(shard) for shard in shards],
                SilentReporter(),
            )

    def prepare(
        self,
        model: str,
        freeze: str,
        container: str,
        floor: str,
        epochs: int | None,
        channels_last: bool = False,
    ) -> None:
        """Chooses the model, with seeded random weights, and the data.

        ``epochs`` are those that the jobs plan for, None for
        :data:`STEADY_EPOCHS`; ``channels_last`` is about the tail.
        """
        network = NETWORKS[model]
        self._model = build(model).train()
        self._memory_format = (
            torch.channels_last if channels_last else torch.contiguous_format
        )
        self._arguments = {
            "freeze": freeze,
            "data": f"swift://{container}",
            "batch_size": network.batch_size,
            "labels": position_of,
            "transform": ImageTransform(
                resize_size=network.resize_size, crop_size=network.crop_size
            ),
            "seed": SEED,
        }
        self._plan = PlanConfig(
            min_precision=floor,
            epochs=STEADY_EPOCHS if epochs is None else epochs,
        )

    def open(
        self,
        name: str,
        cut: int | str,
        encoding: str | None = None,
        store_cache: str = CACHE_OFF,
        container: str | None = None,
        cache_memory_bytes: int | None = 0,
        cache_directory: str | None = None,
        split_directory: str = "",
    ) -> None:
        """Creates a job with a connection of its own.

        Without ``container`` it reads the prepared one.  No cache on the
        client by default: most experiments compare epochs of a fixed cut.
        """
        assert self._model is not None
        arguments = dict(self._arguments)
        if container is not None:
            arguments["data"] = f"swift://{container}"
        connection = self._stack.enter_context(Connection())
        job = self._stack.enter_context(
            TransferJob(
                self._model,
                config=JobConfig(
                    cut=cut,
                    device=client_device(),
                    plan=replace(self._plan, encoding=encoding),
                    read=READ_CONFIG,
                    cache=CacheConfig(
                        cache_memory_bytes,
                        cache_directory,
                        store=store_cache,
                        split_directory=split_directory,
                    ),
                    connection=connection,
                ),
                **arguments,
            )
        )
        job.tail.to(memory_format=self._memory_format)
        self._jobs[name] = job
        self._optimizers[name] = torch.optim.SGD(
            job.tail.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )

    def epochs(
        self,
        name: str,
        first: int,
        count: int,
        interface: str | None,
        storage_sessions: Sequence[int],
    ) -> list[dict[str, Any]]:
        """Trains whole epochs and measures them as opponents do.

        Adds ``fallbacks``, ``cached`` samples and ``package_bytes``.
        """
        job = self._jobs[name]
        meter = Meter(interface, storage_sessions)
        epochs = []
        for epoch in range(first, first + count):
            before, begin = job.stats, meter.read()
            exhaust(train_epoch(job, self._optimizers[name], epoch))
            gained = job.stats - before
            epochs.append(
                {
                    "samples": gained.samples,
                    **between(begin, meter.read(), gained.samples),
                    "fallbacks": gained.fallbacks,
                    "cached": gained.cached,
                    "package_bytes": gained.package_bytes,
                }
            )
        return epochs

    def follow(
        self, name: str, epoch: int, until: float
    ) -> list[tuple[float, int]]:
        """Answers :func:`benchmarks.opponents.measurement.follow`."""
        job, optimizer = self._jobs[name], self._optimizers[name]
        return follow(
            lambda number: train_epoch(job, optimizer, number), epoch, until
        )

    def ready(self) -> None:
        """Answers when all modules are imported."""

    def package_bytes(self, name: str) -> int:
        """Bytes of packages that a job has sent so far."""
        return self._jobs[name].stats.package_bytes

    def clear_store(self) -> None:
        """Deletes cached features and the packages of models."""
        with Connection() as connection:
            exhaust(CacheAdminClient(connection).purge())
            connection.put_container(DEFAULT_MODELS_CONTAINER)
            for model in connection.list(DEFAULT_MODELS_CONTAINER, ""):
                connection.delete(DEFAULT_MODELS_CONTAINER, model.name)

    def outlook(self, link: float | None, container: str) -> dict[str, Any]:
        """Cuts to measure; see :mod:`benchmarks.suite.fixed_cuts`.

        Also stores the package and has the worker profile it.

        Args:
            link: bytes per second of the cell; None measures it.
            container: of the data set.
        """
        assert self._model is not None
        region = FrozenRegion(
            self._model,
            self._arguments["freeze"],
            self._arguments["transform"],
            torch.device(client_device()),
        )
        question = PlanRequest(
            min_precision=self._plan.min_precision,
            epochs=STEADY_EPOCHS,
            batch_size=self._arguments["batch_size"],
            link=link,
            num_samples=None,
            upload=True,
            name="model",
        )
        with Connection() as connection:
            advice = advise(
                region,
                question,
                SilentReporter(),
                connection,
                Location(container, ""),
            )
        return outlook(
            advice,
            batch_size=self._arguments["batch_size"],
            input_bytes=region.form.num_bytes,
        )

    def plan(self, name: str) -> dict[str, Any]:
        """The present plan of a job with ``cut="auto"``.

        ``is_decided`` is true if there is a plan, or will be none.
        """
        job = self._jobs[name]
        plan, planner = job.plan, job.pipeline.plan.planner
        return {
            "label": plan.label if plan else None,
            "samples_per_second": plan.samples_per_second if plan else None,
            "is_decided": planner is None or planner.wait(0),
        }

    def close(self) -> None:
        """Ends all jobs and their connections."""
        self._stack.close()


def exhaust(steps: Iterator[object]) -> None:
    """Consumes an iterator."""
    for _ in steps:
        pass


def train_epoch(
    job: TransferJob, optimizer: torch.optim.Optimizer, epoch: int
) -> Generator[torch.Tensor, None, None]:
    """Trains one epoch, a step for each batch.

    Yields:
        The labels of each batch after its step.
    """
    criterion = torch.nn.CrossEntropyLoss()
    job.tail.train()
    for features, labels in job.pipeline.loader(epoch):
        outputs = job.tail(features)
        # There are more samples than classes; see position_of.
        loss = criterion(outputs, labels % outputs.shape[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield labels


def position_of(key: str) -> int:
    """Position of a sample in the data set, by its key.

    As a label it identifies the sample; see
    :func:`benchmarks.testbed.shards.write_shards`.
    """
    return int(key.partition("-")[0])


def main() -> NoReturn:
    tier = ClientTier()
    questions = (
        tier.upload,
        tier.prepare,
        tier.open,
        tier.epochs,
        tier.follow,
        tier.ready,
        tier.package_bytes,
        tier.clear_store,
        tier.outlook,
        tier.plan,
    )
    with contextlib.closing(tier):
        serve({question.__name__: question for question in questions})
    # Freeing graphs and weights one by one takes seconds of the core that
    # the next process shares.
    os._exit(0)


if __name__ == "__main__":
    main()
