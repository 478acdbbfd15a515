"""Trains a tail with the options of ``hapi train``; prints the result."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import Module

from hapi_client.atomic_file import check_writable
from hapi_client.caching.cache_config import CacheConfig
from hapi_client.cli.context import Columns, print_facts, print_table
from hapi_client.cli.options import describe_cut, parse_cut
from hapi_client.cli.train_options import TrainOptions
from hapi_client.data.splits import DataSet, num_classes_of
from hapi_client.job.options import JobConfig, PlanConfig
from hapi_client.job.transfer_job import TransferJob
from hapi_client.loading.read_config import ReadConfig
from hapi_client.metrics.events import JobStats
from hapi_client.model.frozen_region import input_transform, parse_device
from hapi_client.model.registry import ModelSource, parse_freeze
from hapi_client.progress import Reporter, SilentReporter
from hapi_client.reports.epoch_report import report_body
from hapi_client.reports.run_tables import essentials
from hapi_client.sampling.distributed import this_rank
from hapi_client.swift.connection import Connection
from hapi_protocol.headers import CACHE_OFF
from hapi_splitter.inputs.augmentation import Augmentation
from hapi_splitter.planner.problem import mix_label
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


@dataclass(frozen=True)
class Run:
    """One combination of a sweep, or the only run.

    Attributes:
        name: what a sweep varies, such as ``lr=0.1``; empty without one.
        recipe: its optimizer, learning rate and loss.
        history: losses and accuracies.
    """

    name: str
    recipe: Recipe
    history: History

    @property
    def best(self) -> EpochResult:
        """The epoch with the highest accuracy."""
        return self.history.epochs[self.history.best_epoch]


@dataclass(frozen=True)
class TrainResult:
    """Finished training runs.

    Attributes:
        model: name of the model.
        freeze: last frozen module.
        classes: number of classes.
        job: the closed job, for its plans and reports.
        stats: counters of the job; those of a closed job include later
            traffic of its connection.
        runs: each combination of a sweep.
    """

    model: str
    freeze: Any
    classes: int
    job: TransferJob
    stats: JobStats
    runs: Sequence[Run]

    @property
    def best(self) -> Run:
        """The first run with the highest accuracy in an epoch."""
        return max(self.runs, key=lambda run: run.best.score)

    @property
    def history(self) -> History:
        """Losses and accuracies of the best run."""
        return self.best.history


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
        runs: list[Run] = []
        try:
            with _interrupt_told(options, reporter):
                for run in _runs(job, network, options, reporter):
                    runs.append(run)
        finally:
            # Also after an error or interrupt.
            if options.report is not None and is_first_rank():
                title = f"{options.model} on {options.data}"
                job.write_report(options.report, title, curves_of(runs))
        _note_unused(job, options, reporter)
        return TrainResult(
            options.model, freeze, classes, job, job.stats, runs
        )


def _runs(
    job: TransferJob,
    network: Module | tuple[Module, Module],
    options: TrainOptions,
    reporter: Reporter,
) -> Iterator[Run]:
    """Trains each combination, and writes the models."""
    combinations = list(options.recipes())
    initial = deepcopy(job.tail.state_dict())
    best_run = best_epoch = -2.0
    for number, (name, values) in enumerate(combinations):
        recipe = Recipe(
            **values,
            autocast=torch.bfloat16 if options.amp == "bf16" else None,
        )
        if name:
            reporter.note(f"run {number + 1} of {len(combinations)}: {name}")
        job.tail.load_state_dict(initial)

        def epoch_ended(number: int, result: EpochResult) -> None:
            nonlocal best_epoch
            reporter.note(
                f"epoch {number}: {describe_epoch(result)}"
                + (f"; {job.plan.label}" if job.plan else "")
            )
            if result.score > best_epoch:
                best_epoch = result.score
                if options.save_best and is_first_rank():
                    save_atomically(state_of(network), options.save_best)

        def resumed(history: History, samples: int) -> None:
            nonlocal best_epoch
            scores = (epoch.score for epoch in history.epochs)
            best_epoch = max([best_epoch, *scores])
            trained = len(history.epochs)
            if history.has_stalled(options.early_stop):
                return  # told below
            reporter.note(resumed_text(trained, samples, options.epochs))
            best_path = options.save_best
            if trained and best_path and not best_path.exists():
                reporter.note(
                    f"{best_path} is not there, and the checkpoint has no "
                    f"weights of epoch {history.best_epoch}, the best so far; "
                    "a better epoch writes it"
                )

        history = train_tail(
            job,
            epochs=options.epochs,
            recipe=recipe,
            early_stop=options.early_stop,
            on_epoch=epoch_ended,
            on_resume=resumed,
            checkpoints=_places(options, name),
            num_nodes=num_nodes_of(options),
            partial=PartialBackward(options.partial_backward)
            if options.partial_backward
            else None,
            queue=options.device_queue,
            seed=options.seed,
        )
        if history.has_stalled(options.early_stop):
            reporter.note(
                f"stopped after {count_text(len(history.epochs), 'epoch')}: "
                f"none was better than epoch {history.best_epoch} "
                f"(--early-stop {options.early_stop})"
            )
        run = Run(name, recipe, history)
        if run.best.score > best_run:
            best_run = run.best.score
            # Before the report, whose writing may fail for lack of space.
            if options.save and is_first_rank():
                save_atomically(state_of(network), options.save)
        yield run


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


def describe_epoch(result: EpochResult) -> str:
    validated = ""
    if result.val_loss is not None:
        validated = (
            f"; validation loss {result.val_loss:.4f}, top-1 "
            f"{result.val_accuracy:.3f}, top-5 {result.val_top5:.3f}"
        )
    return (
        f"loss {result.mean_loss:.4f}, accuracy {result.accuracy:.3f}, "
        f"{result.num_samples / result.seconds:.0f} samples/s{validated}"
    )


def epochs_facts(history: History) -> list[dict[str, Any]]:
    """Returns the JSON form of the results of epochs."""
    return [
        {
            "loss": epoch.mean_loss,
            "accuracy": epoch.accuracy,
            "val_loss": epoch.val_loss,
            "val_accuracy": epoch.val_accuracy,
            "val_top5": epoch.val_top5,
            "seconds": epoch.seconds,
            "samples": epoch.num_samples,
        }
        for epoch in history.epochs
    ]


def history_facts(history: History) -> dict[str, Any]:
    """Returns the JSON form of the results of a run."""
    return {
        "epochs": epochs_facts(history),
        "losses": history.losses,
        "best_epoch": history.best_epoch,
        "checkpoints": asdict(history.checkpoints)
        if history.checkpoints
        else None,
    }


def curves_of(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Returns the results of the epochs of each run, for its report."""
    return {run.name: epochs_facts(run.history) for run in runs}


def result_facts(result: TrainResult) -> dict[str, Any]:
    """Returns the JSON form of a run, or a sweep."""
    job = result.job
    return {
        "model": result.model,
        "freeze": result.freeze,
        "classes": result.classes,
        "cut": job.cut,
        **history_facts(result.history),
        "runs": [
            {
                "name": run.name,
                "recipe": {**asdict(run.recipe), "autocast": None}
                | ({"autocast": "bf16"} if run.recipe.autocast else {}),
                **history_facts(run.history),
            }
            for run in result.runs
        ],
        "stats": asdict(result.stats),
        "plan": job.plan.label if job.plan else None,
        "no_plan_reason": job.no_plan_reason,
        "plan_changes": [
            {
                "seconds": change.seconds,
                "mix": [
                    {"cut": cut, "encoding": encoding, "share": share}
                    for (cut, encoding), share in change.mix.items()
                ],
                "samples_per_second": change.samples_per_second,
                "why": change.why,
            }
            for change in job.plan_changes
        ],
        "reports": [report_body(report) for report in job.reports],
    }


def _result_cells(epoch: EpochResult) -> tuple[str, ...]:
    validated: tuple[str, ...] = ()
    if epoch.val_loss is not None:
        validated = (
            f"{epoch.val_loss:.4f}",
            f"{epoch.val_accuracy:.3f}",
            f"{epoch.val_top5:.3f}",
        )
    return (f"{epoch.mean_loss:.4f}", f"{epoch.accuracy:.3f}", *validated)


def _print_results(result: TrainResult) -> None:
    """Prints the epochs of the only run, or the best epoch of each run."""
    first = result.history.epochs[0]
    columns = ["loss", "accuracy"]
    if first.val_loss is not None:
        columns += ["val loss", "val top-1", "val top-5"]
    if len(result.runs) == 1:
        print_table(
            ("epoch", *columns, "seconds", "samples"),
            [
                (
                    str(number),
                    *_result_cells(epoch),
                    f"{epoch.seconds:.1f}",
                    str(epoch.num_samples),
                )
                for number, epoch in enumerate(result.history.epochs)
            ],
        )
        return
    print_table(
        ("run", "best epoch", *columns, "seconds", ""),
        [
            (
                run.name,
                str(run.history.best_epoch),
                *_result_cells(run.best),
                f"{run.history.seconds:.1f}",
                "best" if run is result.best else "",
            )
            for run in result.runs
        ],
    )


def print_result(result: TrainResult) -> None:
    """Prints losses, throughput, plans and counters of the runs."""
    job = result.job
    _print_results(result)
    if len(result.runs) == 1:
        summary = essentials(job.reports)
        print_table(summary.header, summary.rows)
    changes = [
        (f"{change.seconds:.0f}", mix_label(change.mix), change.why)
        for change in job.plan_changes
    ]
    if changes:
        print_table(("seconds", "plan", "why"), changes)
    columns: Columns = {
        "cut": "cut",
        "over the wire": "bytes",
        "package": "package_bytes",
        "retries": "retries",
        "fallbacks": "fallbacks",
        "skipped": "skipped",
        "cached in Swift": lambda facts: f"{facts['cached']:,}",
        "cached here": lambda facts: f"{facts['local_hits']:,}",
    }
    print_facts([{"cut": job.cut, **asdict(result.stats)}], columns)
