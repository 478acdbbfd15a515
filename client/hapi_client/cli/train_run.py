"""Trains a tail with the options of ``hapi train``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from hapi_client.atomic_file import check_writable
from hapi_client.caching.cache_config import CacheConfig
from hapi_client.cli.options import describe_cut, parse_cut
from hapi_client.cli.train_options import TrainOptions
from hapi_client.cli.train_result import (
    Run,
    TrainResult,
    curves_of,
    describe_epoch,
)
from hapi_client.data.splits import DataSet, num_classes_of
from hapi_client.job.options import JobConfig, PlanConfig
from hapi_client.job.transfer_job import TransferJob
from hapi_client.loading.read_config import ReadConfig
from hapi_client.metrics.events import JobStats
from hapi_client.model.registry import ModelSource, parse_freeze
from hapi_client.model.split_arguments import input_transform, parse_device
from hapi_client.progress import Reporter, SilentReporter
from hapi_client.sampling.distributed import this_rank
from hapi_client.swift.connection import Connection
from hapi_protocol.headers import CACHE_OFF
from hapi_splitter.inputs.augmentation import Augmentation
from hapi_splitter.units import count_text
from hapi_training.checkpoint_file import save_atomically
from hapi_training.loop import (
    CheckpointPlaces,
    EpochResult,
    History,
    train_tail,
)
from hapi_training.partial_backward import PartialBackward
from hapi_training.recipe import Recipe
from hapi_training.store import RENDEZVOUS_VARIABLE

SHARED_NODES = 8
"""Virtual nodes of several workers, unless given: as many as there are
partitions of an epoch by default."""


def job_config(
    options: TrainOptions, connection: Connection, classes: int
) -> JobConfig:
    """Makes the configuration of the job from the options.

    Raises:
        HapiError: naming a wrong option.
    """
    return JobConfig(
        cut=parse_cut(options.cut),
        device=parse_device(options.device),
        num_classes=classes,
        augment=Augmentation() if options.augment else None,
        augment_period_epochs=options.augment_period_epochs,
        image=options.image,
        exif=options.exif,
        precision=options.precision
        or ("bfloat16" if options.amp else "float32"),
        plan=PlanConfig(
            encoding=options.encoding,
            min_precision=options.min_precision,
            epochs=options.epochs,
        ),
        read=ReadConfig(
            on_error="skip" if options.skip_bad_samples else "raise",
            retry_seconds=options.retry_seconds,
        ),
        cache=CacheConfig(
            directory=options.cache_dir, store=options.store_cache
        ),
        connection=connection,
    )


def train(
    options: TrainOptions,
    connection: Connection,
    reporter: Reporter,
    data: Mapping[str, DataSet],
    config: JobConfig | None = None,
) -> TrainResult:
    """Trains the tail and writes the files that ``options`` name.

    Args:
        options: options of the command.
        connection: connection to the account of the data.
        reporter: receives the steps, on the first rank.
        data: the splits, of :func:`hapi_client.data.splits.load_splits`.
        config: configuration instead of that of :func:`job_config`.

    Raises:
        HapiError: naming a wrong option, or of the job.
    """
    if not is_first_rank():
        reporter = SilentReporter()
    classes = num_classes_of(data, options.classes)
    config = config or job_config(options, connection, classes)
    if options.classes is None:
        reporter.note(f"{classes} classes, as the index says")
    source = ModelSource(options.model, options.weights, options.checkpoint)
    network, transform = source.build_with_transform(classes, options.seed)
    for path in (options.save, options.save_best):
        if path is not None:
            check_writable(path, num_bytes_of(network))
    if source.is_random:
        reporter.note("weights are random: no --weights, no --checkpoint")
    uploads = options.cut not in ("auto", "stream", "0")
    reporter.note(
        "splitting the model"
        + (", and uploading its package if needed" if uploads else "")
    )
    freeze = parse_freeze(network, options.freeze, input_transform(transform))
    with TransferJob(
        network,
        freeze=freeze,
        data=data,
        batch_size=options.batch_size,
        transform=transform,
        labels=options.labels,
        seed=options.seed,
        config=config,
    ) as job:
        if options.resume:
            # The optimizer's momentum is as large as the tail.
            check_writable(options.resume, 2 * num_bytes_of(job.tail))
        reporter.note(
            f"{count_text(job.num_samples, 'sample')}, {describe_cut(job)}"
        )
        runs = _Runs(job, network, options, reporter)
        try:
            with _interrupt_told(options, reporter):
                finished = list(runs.train())
        finally:
            # Also after an error or interrupt.
            if options.report is not None and is_first_rank():
                title = f"{options.model} on {options.data}"
                curves = curves_of(runs.results)
                job.write_report(options.report, title, curves)
        _note_unused(job, options, reporter)
        return TrainResult(
            options.model, freeze, classes, job, job.stats, finished
        )


class _Runs:
    """Trains each combination, and writes the models.

    Attributes:
        results: those of the epochs so far, by the name of the run.
    """

    def __init__(
        self,
        job: TransferJob,
        network: Module | tuple[Module, Module],
        options: TrainOptions,
        reporter: Reporter,
    ) -> None:
        self._job, self._network = job, network
        self._options, self._reporter = options, reporter
        self.results: dict[str, list[EpochResult]] = {}
        # Below those of epochs that have diverged.
        self._best_run = self._best_epoch = -2.0

    def train(self) -> Iterator[Run]:
        """Yields each run when it is finished."""
        combinations = list(self._options.recipes())
        tail = self._job.tail
        initial = deepcopy(tail.state_dict())
        for number, (name, values) in enumerate(combinations, 1):
            if name:
                self._reporter.note(
                    f"run {number} of {len(combinations)}: {name}"
                )
            tail.load_state_dict(initial)
            autocast = torch.bfloat16 if self._options.amp else None
            run = self._trained(name, Recipe(**values, autocast=autocast))
            if run.best.score > self._best_run:
                self._best_run = run.best.score
                # Before the report, whose writing may fail for lack of space.
                self._save(self._options.save)
            yield run

    def _trained(self, name: str, recipe: Recipe) -> Run:
        options = self._options
        results = self.results[name] = []
        history = train_tail(
            self._job,
            epochs=options.epochs,
            recipe=recipe,
            early_stop=options.early_stop,
            on_epoch=lambda number, result: self._epoch_ended(
                results, number, result
            ),
            on_resume=lambda history, samples: self._resumed(
                results, history, samples
            ),
            checkpoints=_places(options, name),
            num_nodes=num_nodes_of(options),
            partial=PartialBackward(options.partial_backward)
            if options.partial_backward
            else None,
            queue=options.device_queue,
            seed=options.seed,
        )
        if history.has_stalled(options.early_stop):
            self._reporter.note(
                f"stopped after {count_text(len(history.epochs), 'epoch')}: "
                f"none was better than epoch {history.best_epoch} "
                f"(--early-stop {options.early_stop})"
            )
        return Run(name, recipe, history)

    def _epoch_ended(
        self, results: list[EpochResult], number: int, result: EpochResult
    ) -> None:
        plan = f"; {self._job.plan.label}" if self._job.plan else ""
        self._reporter.note(f"epoch {number}: {describe_epoch(result)}{plan}")
        results.append(result)
        if result.score > self._best_epoch:
            self._save(self._options.save_best)
            self._best_epoch = result.score

    def _resumed(
        self, results: list[EpochResult], history: History, samples: int
    ) -> None:
        results += history.epochs
        scores = (epoch.score for epoch in history.epochs)
        self._best_epoch = max([self._best_epoch, *scores])
        if history.has_stalled(self._options.early_stop):
            return  # told at the end
        trained, path = len(history.epochs), self._options.save_best
        self._reporter.note(
            resumed_text(trained, samples, self._options.epochs)
        )
        if trained and path and not path.exists():
            self._reporter.note(
                f"{path} is not there, and the checkpoint has no weights of "
                f"epoch {history.best_epoch}, the best so far; a better epoch "
                "writes it"
            )

    def _save(self, path: Path | None) -> None:
        if path is not None and is_first_rank():
            save_atomically(state_of(self._network), path)


def _places(options: TrainOptions, name: str) -> CheckpointPlaces | None:
    """Returns the places of the checkpoints of a run."""
    if not (options.resume or options.remote):
        return None
    local, remote = options.resume, options.remote
    if name:
        local = local and local / name
        remote = remote and f"{remote.rstrip('/')}/{name}"
    return CheckpointPlaces(local, remote, options.save_steps)


@contextmanager
def _interrupt_told(
    options: TrainOptions, reporter: Reporter
) -> Iterator[None]:
    """Says after Ctrl-C how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if is_first_rank():
            place = options.resume or options.remote
            reporter.note(
                f"interrupted; the same command goes on from {place}"
                if place
                else "interrupted, and nothing is saved; with --resume FOLDER "
                "the same command would go on"
            )
        raise


def _note_unused(
    job: TransferJob, options: TrainOptions, reporter: Reporter
) -> None:
    """Says that all was read raw, or that a cache was not used."""
    if not job.stats.samples:
        return
    if job.cut == "auto" and job.plan is None:
        reporter.note(
            f"no plan, all samples were read raw: {job.no_plan_reason}"
        )
    unused = unused_cache_text(options.store_cache, job.stats)
    if unused:
        reporter.note(unused)


def is_first_rank() -> bool:
    """True on the one of torchrun's ranks that prints and writes files."""
    return this_rank(os.environ).rank == 0


def num_nodes_of(options: TrainOptions) -> int:
    """Returns the number of virtual nodes.

    Raises:
        ClientError: ``bad_configuration`` for wrong variables of torchrun.
    """
    if options.rendezvous:
        os.environ[RENDEZVOUS_VARIABLE] = options.rendezvous
    is_shared = (
        this_rank(os.environ).world_size > 1
        or RENDEZVOUS_VARIABLE in os.environ
        or options.partial_backward is not None
        or options.device_queue is not None
    )
    default = SHARED_NODES if is_shared else 1
    return options.virtual_nodes or default


def state_of(network: Module | tuple[Module, Module]) -> dict[str, Any]:
    """Returns the state dict of a network, or of its two parts in order."""
    if isinstance(network, tuple):
        return torch.nn.Sequential(*network).state_dict()
    return network.state_dict()


def num_bytes_of(network: Module | tuple[Module, Module]) -> int:
    """Returns the size of the network's state dict."""
    return sum(weight.nbytes for weight in state_of(network).values())


def resumed_text(trained: int, samples: int, epochs: int) -> str:
    """Describes a checkpoint's progress in a run of ``epochs`` epochs."""
    if trained >= epochs:
        return (
            f"all {count_text(trained, 'epoch')} are trained already; "
            "give a larger --epochs to continue"
        )
    return f"resuming in epoch {trained} after {samples} of its samples"


def unused_cache_text(cache: str, stats: JobStats) -> str:
    """Explains why an enabled cache stored nothing; empty if it may have."""
    if cache == CACHE_OFF or any(cut > 0 for cut in stats.samples_by_cut):
        return ""
    return (
        f"--store-cache {cache} was not used: only pushed-down features are "
        "cached, and all samples were read raw; --cut freeze pushes down"
    )
