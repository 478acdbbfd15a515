"""The training process of a testbed's client tier.

``python -m benchmarks.client_tier`` answers questions on its standard input
(see :mod:`benchmarks.remote`) until that ends.  It holds one model and, under
names, any number of jobs on it: all contenders are measured by one process,
one after the other, so that they share its warmth and no two of them ever
compete for its core.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torchvision
from benchmarks.cells import FETCH_OPTIONS, NETWORKS
from benchmarks.contenders import more_cuts, outlook, problem_json
from benchmarks.devices import client_device
from benchmarks.opponents.diary import follow
from benchmarks.opponents.window import Meter, between
from benchmarks.regret import AUTO
from benchmarks.remote import serve

from hapi_client.data.index import update_index
from hapi_client.data.upload import upload
from hapi_client.job.transfer_job import TransferJob
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.model.package_store import DEFAULT_MODELS_CONTAINER
from hapi_client.plan_report.plan_study import PlanRequest, advise
from hapi_client.planning.replanner import ReplanOptions, describe_mix
from hapi_client.progress import SilentReporter
from hapi_client.sampling.partition import EpochPartition
from hapi_client.swift.cache_admin import FeatureCache
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.headers import CACHE_OFF
from hapi_splitter.inputs.image_transform import ImageTransform

SEED = 0
LEARNING_RATE = 1e-4
MOMENTUM = 0.9

STEADY_EPOCHS = 100_000


class ClientTier:
    """Answers the questions of ``benchmarks.splits``."""

    def __init__(self) -> None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self._stack = contextlib.ExitStack()
        self._jobs: dict[str, TransferJob] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._arguments: dict[str, Any] = {}
        self._model: torch.nn.Module | None = None
        self._layout = torch.contiguous_format

    def upload(self, shards: list[str], container: str) -> None:
        """Stores tar files as a data set."""
        with Connection() as connection:
            upload(
                connection,
                Location(container, ""),
                [Path(shard) for shard in shards],
                SilentReporter(),
            )

    def index(self, container: str, anew: bool = False) -> None:
        """Makes the index of tar files that are stored already.

        Args:
            container: of the files.
            anew: as if there were none yet.
        """
        location = Location(container, "")
        with Connection() as connection:
            if anew:
                connection.delete(container, location.index_name)
            update_index(connection, location, lambda _: None)

    def prepare(
        self,
        model: str,
        freeze: str,
        container: str,
        floor: str,
        epochs: int | None,
        channels_last: bool = False,
        seed: int = SEED,
        batch_size: int | None = None,
    ) -> None:
        """Chooses the model, from seeded random weights, and the data.

        Args:
            model: a name in :data:`benchmarks.cells.NETWORKS`.
            freeze: name of the last frozen module.
            container: of the data set.
            floor: of the encodings.
            epochs: that the jobs are told they will run; None for so many
                that no one-off cost matters.
            channels_last: memory format of the tail, which is the user's to
                choose.
            seed: of the weights.
            batch_size: samples of a training step; None for the network's.
        """
        network = NETWORKS[model]
        torch.manual_seed(seed)
        builder = torchvision.models.get_model_builder(model)
        sized = {"image_size": network.crop_size} if "vit" in model else {}
        self._model = builder(weights=None, **sized)
        self._layout = (
            torch.channels_last if channels_last else torch.contiguous_format
        )
        self._arguments = {
            "freeze": freeze,
            "data": f"swift://{container}",
            "batch_size": batch_size or network.batch_size,
            "labels": position_of,
            "transform": ImageTransform(
                resize_size=network.resize_size, crop_size=network.crop_size
            ),
            "seed": SEED,
            "device": client_device(),
            "options": FETCH_OPTIONS,
            "floor": floor,
            "epochs": STEADY_EPOCHS if epochs is None else epochs,
        }

    def open(
        self,
        name: str,
        cut: int | str,
        encoding: str | None = None,
        models_container: str = DEFAULT_MODELS_CONTAINER,
        cache: str = CACHE_OFF,
        container: str | None = None,
        parts: int = 1,
        replan_seconds: float | None = None,
    ) -> None:
        """Makes a job; a contender of this name from now on.

        It reads ``container``, or else the one that was prepared.  Each has
        a connection of its own, so that bytes are counted apart.  ``parts``
        of each batch can go to as many ranks; a plan is looked at again
        every ``replan_seconds``.
        """
        assert self._model is not None
        arguments = dict(self._arguments)
        if replan_seconds is not None:
            arguments["replan"] = ReplanOptions(replan_seconds)
        if encoding is not None:
            arguments["encoding"] = encoding
        if container is not None:
            arguments["data"] = f"swift://{container}"
        connection = self._stack.enter_context(Connection())
        job = self._stack.enter_context(
            TransferJob(
                self._model,
                cut=cut,
                connection=connection,
                models_container=models_container,
                cache=cache,
                lanes=EpochPartition(parts),  # as narrow as the buffer
                **arguments,
            )
        )
        job.tail.to(memory_format=self._layout)
        self._jobs[name] = job
        self._optimizers[name] = torch.optim.SGD(
            job.tail.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )

    def deal(self, name: str, mix: list[tuple[int, str, float]]) -> None:
        """Has a job follow a mix that somebody else planned.

        Args:
            name: of a job with a fixed cut.
            mix: cut, encoding and weight of each way.
        """
        # Users' jobs plan for themselves or have one cut, so that nothing
        # public does this.
        self._jobs[name]._feeder.mixer.change(
            {(cut, encoding): part for cut, encoding, part in mix}
        )

    def run(self, name: str, epoch: int) -> dict[str, Any]:
        """Trains one epoch; what it took."""
        job = self._jobs[name]
        before = job.stats
        started, started_cpu = time.perf_counter(), time.process_time()
        exhaust(train_epoch(job, self._optimizers[name], epoch))
        seconds = time.perf_counter() - started
        cpu_seconds = time.process_time() - started_cpu
        after = job.stats
        samples = after.samples - before.samples
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "samples": samples,
            "samples_per_second": samples / seconds,
            "bytes_per_sample": (after.bytes - before.bytes) / samples,
            "fallbacks": after.fallbacks - before.fallbacks,
            "cached": after.cached - before.cached,
        }

    def epochs(
        self,
        name: str,
        first: int,
        count: int,
        interface: str | None,
        storage_sessions: Sequence[int],
    ) -> list[dict[str, Any]]:
        """Whole epochs, as opponents measure theirs.

        Returns:
            As :meth:`benchmarks.opponents.serve.Server.epochs`, without
            labels, and ``fallbacks``, ``cached`` samples and
            ``package_bytes`` that were sent.
        """
        job = self._jobs[name]
        meter = Meter(interface, storage_sessions)
        found = []
        for epoch in range(first, first + count):
            before, begin = job.stats, meter.read()
            exhaust(train_epoch(job, self._optimizers[name], epoch))
            gained = job.stats - before
            found.append(
                {
                    "samples": gained.samples,
                    **between(begin, meter.read(), gained.samples),
                    "fallbacks": gained.fallbacks,
                    "cached": gained.cached,
                    "package_bytes": gained.package_bytes,
                }
            )
        return found

    def diary(
        self, name: str, epoch: int, until: float
    ) -> list[tuple[float, int]]:
        """See :func:`benchmarks.opponents.diary.follow`."""
        job, optimizer = self._jobs[name], self._optimizers[name]
        return follow(
            lambda number: train_epoch(job, optimizer, number), epoch, until
        )

    def ready(self) -> None:
        """Answers when all modules are imported."""

    def fallbacks(self, name: str) -> int:
        """Spans of a job that were to be pushed and were streamed, so far."""
        return self._jobs[name].stats.fallbacks

    def package_bytes(self, name: str) -> int:
        """That a job has sent so far."""
        return self._jobs[name].stats.package_bytes

    def kept(self) -> dict[str, int]:
        """Entries of features that the account keeps, and their bytes."""
        with Connection() as connection:
            entries = [
                entry
                for page in FeatureCache(connection).pages()
                for entry in page.entries
            ]
        return {
            "entries": len(entries),
            "bytes": sum(entry.length_bytes for entry in entries),
        }

    def forget_packages(self) -> None:
        """Deletes those of the models."""
        with Connection() as connection:
            connection.put_container(DEFAULT_MODELS_CONTAINER)
            for each in connection.list(DEFAULT_MODELS_CONTAINER, ""):
                connection.delete(DEFAULT_MODELS_CONTAINER, each.name)

    def purge(self) -> None:
        """Deletes them."""
        with Connection() as connection:
            exhaust(FeatureCache(connection).purge())

    def follow(self, name: str, length: float) -> dict[str, Any]:
        """Trains whole epochs for a while, and keeps a diary.

        Args:
            name: of a job; its plans are none if its cut is fixed.
            length: seconds after which no epoch begins.

        Returns:
            ``progress``, ``[[time, samples so far]]`` about every second;
            ``cuts``, ``{cut: samples so far}`` at the same times;
            ``plans``, each with its time; ``epochs``, each with the number
            of its samples and how many were ``lost`` or ``doubled``;
            ``fallbacks`` and ``retries``. Times are of the machine's
            monotonic clock.
        """
        job = self._jobs[name]
        diary = _Diary(job)
        before = job.stats
        started = time.monotonic()
        epochs = []
        while time.monotonic() - started < length:
            seen: Counter[int] = Counter()
            for labels in train_epoch(
                job, self._optimizers[name], len(epochs)
            ):
                seen.update(labels.tolist())
                diary.note(len(labels))
            epochs.append(
                {
                    "samples": seen.total(),
                    "lost": job.num_samples - len(seen),
                    "doubled": seen.total() - len(seen),
                }
            )
        after = job.stats
        return {
            "progress": diary.progress,
            "cuts": diary.cuts,
            "plans": diary.plans,
            "epochs": epochs,
            "fallbacks": after.fallbacks - before.fallbacks,
            "retries": after.retries - before.retries,
        }

    def outlook(
        self, link: float | None, container: str, thorough: bool
    ) -> dict[str, Any]:
        """The cuts worth a measurement; see :mod:`benchmarks.contenders`.

        Also stores the package, and has the worker profile it.

        Args:
            link: bytes per second of the cell; None measures it.
            container: of the data set.
            thorough: looks among all cuts for some that the planner leaves
                out and that may be fast by themselves.
        """
        assert self._model is not None
        region = FrozenRegion(
            self._model,
            self._arguments["freeze"],
            self._arguments["transform"],
            torch.device(client_device()),
        )
        question = PlanRequest(
            floor=self._arguments["floor"],
            epochs=STEADY_EPOCHS,
            batch_size=self._arguments["batch_size"],
            link=link,
            num_samples=None,
            upload=True,
            name="model",
        )
        place = Location(container, "")
        reporter = SilentReporter()
        with Connection() as connection:
            advice = advise(region, question, reporter, connection, place)
            more: list[int] = []
            if thorough:
                more = more_cuts(
                    advice.facts.cuts,
                    advice.server,
                    advice.facts.client,
                    advice.facts.samples,
                    advice.conditions,
                )
            # A job of its own never measures these.
            planned = advice.report.plans[AUTO].samples_per_second
            if more:
                question = replace(question, cuts=more)
                advice = advise(region, question, reporter, connection, place)
        found = outlook(advice.report).to_json()
        found["predicted"][AUTO] = planned
        return {
            **found,
            "more_cuts": more,
            "package_bytes": region.parameter_bytes,
            "problem": problem_json(
                advice.report.problem, advice.conditions.train_seconds
            ),
        }

    def plan(self, name: str) -> dict[str, Any]:
        """The present plan of a job with ``cut="auto"``.

        Without one, ``is_decided`` says whether there is to be none.
        """
        job = self._jobs[name]
        plan, planner = job.plan, job._planner
        return {
            "label": plan.label if plan else None,
            "samples_per_second": plan.samples_per_second if plan else None,
            "is_decided": planner is None or planner.wait(0),
        }

    def cold(
        self,
        cut: int | str,
        encoding: str | None,
        epochs: int,
        models_container: str,
    ) -> dict[str, Any]:
        """A whole run from its start; the container has no package yet."""
        started = time.perf_counter()
        self.open("cold", cut, encoding, models_container)
        for epoch in range(epochs):
            exhaust(
                train_epoch(
                    self._jobs["cold"], self._optimizers["cold"], epoch
                )
            )
        seconds = time.perf_counter() - started
        stats = self._jobs["cold"].stats
        return {
            "seconds": seconds,
            "samples": stats.samples,
            "bytes": stats.bytes,
            "package_bytes": stats.package_bytes,
            "fallbacks": stats.fallbacks,
        }

    def close(self) -> None:
        """Ends all jobs and their connections."""
        self._stack.close()


def exhaust(steps: Iterator[object]) -> None:
    """Goes through all of them."""
    for _ in steps:
        pass


class _Diary:
    """Of a job: samples by time, and plans."""

    def __init__(self, job: TransferJob) -> None:
        self._job = job
        self._samples = 0
        self._noted = len(job.plan_changes)
        self.progress: list[tuple[float, int]] = [(time.monotonic(), 0)]
        self.cuts = [job.stats.samples_by_cut]
        self.plans: list[dict[str, Any]] = []

    def note(self, samples: int) -> None:
        """Told of each batch."""
        now = time.monotonic()
        self._samples += samples
        if now - self.progress[-1][0] >= 1.0:
            self.progress.append((now, self._samples))
            self.cuts.append(self._job.stats.samples_by_cut)
        changes = self._job.plan_changes
        for change in changes[self._noted :]:
            self.plans.append(
                {
                    "time": now,
                    "mix": describe_mix(change.mix),
                    "samples_per_second": change.samples_per_second,
                    "why": change.why,
                }
            )
        self._noted = len(changes)


def train_epoch(
    job: TransferJob, optimizer: torch.optim.Optimizer, epoch: int
) -> Generator[torch.Tensor, None, None]:
    """One pass over the data set with a step for each batch.

    Yields:
        The labels of each batch, when its step is done.
    """
    criterion = torch.nn.CrossEntropyLoss()
    job.tail.train()
    for features, labels in job.loader(epoch):
        found = job.tail(features)
        # There are more samples than classes; see position_of.
        loss = criterion(found, labels % found.shape[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield labels


def position_of(key: str) -> int:
    """Number of a sample in the data set, by its key.

    As the label it tells which samples came; see
    :func:`benchmarks.shards.write_shards`.
    """
    return int(key.partition("-")[0])


def main() -> NoReturn:
    tier = ClientTier()
    with contextlib.closing(tier):
        serve(
            {
                "upload": tier.upload,
                "prepare": tier.prepare,
                "open": tier.open,
                "deal": tier.deal,
                "run": tier.run,
                "outlook": tier.outlook,
                "plan": tier.plan,
                "follow": tier.follow,
                "epochs": tier.epochs,
                "diary": tier.diary,
                "fallbacks": tier.fallbacks,
                "package_bytes": tier.package_bytes,
                "index": tier.index,
                "cold": tier.cold,
                "kept": tier.kept,
                "purge": tier.purge,
                "forget_packages": tier.forget_packages,
                "ready": tier.ready,
            }
        )
    # Freeing graphs and weights one by one takes torch seconds, and the
    # next process would share its core with that.
    os._exit(0)


if __name__ == "__main__":
    main()
