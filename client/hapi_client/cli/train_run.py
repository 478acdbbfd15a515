"""Trains a tail with the options of ``hapi train``; prints the result."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from torch.nn import Module

from hapi_client.atomic_file import check_writable
from hapi_client.caching.cache_config import CacheConfig
from hapi_client.cli.context import print_facts, print_table
from hapi_client.cli.options import describe_cut, parse_cut
from hapi_client.cli.train_options import TrainOptions
from hapi_client.job.options import JobConfig, PlanConfig
from hapi_client.job.transfer_job import TransferJob
from hapi_client.loading.read_config import ReadConfig
from hapi_client.metrics.events import JobStats
from hapi_client.model.frozen_region import input_transform, parse_device
from hapi_client.model.registry import parse_freeze
from hapi_client.model.torchvision_registry import build_model
from hapi_client.progress import Reporter
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
from hapi_training.store import RENDEZVOUS_VARIABLE

SHARED_NODES = 8
"""Virtual nodes of several workers, unless given: as many as there are
partitions of an epoch by default."""


@dataclass(frozen=True)
class TrainResult:
    """A finished training run.

    Attributes:
        model: name of the model.
        freeze: last frozen module.
        job: the closed job, for its plans and reports.
        stats: counters of the job; those of a closed job include later
            traffic of its connection.
        history: losses and accuracies.
    """

    model: str
    freeze: Any
    job: TransferJob
    stats: JobStats
    history: History


def job_config(options: TrainOptions, connection: Connection) -> JobConfig:
    """Makes the configuration of the job from the options.

    Raises:
        HapiError: naming a wrong option.
    """
    return JobConfig(
        cut=parse_cut(options.cut),
        device=parse_device(options.device),
        num_classes=options.classes,
        augment=Augmentation() if options.augment else None,
        augment_period_epochs=options.augment_period_epochs,
        image=options.image,
        exif=options.exif,
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
    config: JobConfig | None = None,
) -> TrainResult:
    """Trains the tail and writes the files that ``options`` name.

    Args:
        options: options of the command.
        connection: connection to the account of the data.
        reporter: receives the steps.
        config: configuration instead of that of :func:`job_config`.

    Raises:
        HapiError: naming a wrong option, or of the job.
    """
    config = config or job_config(options, connection)
    network, transform = build_model(
        options.model,
        num_classes=options.classes,
        seed=options.seed,
        weights=options.weights,
        checkpoint=options.checkpoint,
    )
    if options.save:
        check_writable(options.save, num_bytes_of(network))
    if options.weights is None and options.checkpoint is None:
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
        data=options.data,
        batch_size=options.batch_size,
        transform=transform,
        labels=options.labels,
        seed=options.seed,
        config=config,
    ) as job:
        history = _train_job(job, network, options, reporter)
        return TrainResult(options.model, freeze, job, job.stats, history)


def _train_job(
    job: TransferJob,
    network: Module,
    options: TrainOptions,
    reporter: Reporter,
) -> History:
    if options.resume:
        # The optimizer's momentum is as large as the tail.
        check_writable(options.resume, 2 * num_bytes_of(job.tail))
    reporter.note(
        f"{count_text(job.num_samples, 'sample')}, {describe_cut(job)}"
    )
    try:
        history = train_tail(
            job,
            epochs=options.epochs,
            learning_rate=options.learning_rate,
            on_epoch=lambda number, result: reporter.note(
                f"epoch {number}: {describe_epoch(result)}"
                + (f"; {job.plan.label}" if job.plan else "")
            ),
            on_resume=lambda trained, samples: reporter.note(
                resumed_text(trained, samples, options.epochs)
            ),
            checkpoints=CheckpointPlaces(
                options.resume, options.remote, options.save_steps
            )
            if options.resume or options.remote
            else None,
            num_nodes=num_nodes_of(options),
            partial=PartialBackward(options.partial_backward)
            if options.partial_backward
            else None,
            queue=options.device_queue,
            seed=options.seed,
        )
        # Before the report, whose writing may fail for lack of space.
        if options.save and is_first_rank():
            save_atomically(network.state_dict(), options.save)
    finally:
        # Also after an error or interrupt.
        if options.report is not None and is_first_rank():
            title = f"{options.model} on {options.data}"
            job.write_report(options.report, title)
    if job.stats.samples:
        if job.cut == "auto" and job.plan is None:
            reporter.note(
                f"no plan, all samples were read raw: {job.no_plan_reason}"
            )
        unused = unused_cache_text(options.store_cache, job.stats)
        if unused:
            reporter.note(unused)
    return history


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


def num_bytes_of(network: Module) -> int:
    """Returns the size of the network's state dict."""
    return sum(weight.nbytes for weight in network.state_dict().values())


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
    return (
        f"loss {result.mean_loss:.4f}, accuracy {result.accuracy:.3f}, "
        f"{result.num_samples / result.seconds:.0f} samples/s"
    )


def result_facts(result: TrainResult) -> dict[str, Any]:
    """Returns the JSON form of a run."""
    job = result.job
    return {
        "model": result.model,
        "freeze": result.freeze,
        "cut": job.cut,
        "epochs": [
            {
                "loss": epoch.mean_loss,
                "accuracy": epoch.accuracy,
                "seconds": epoch.seconds,
                "samples": epoch.num_samples,
            }
            for epoch in result.history.epochs
        ],
        "losses": result.history.losses,
        "stats": asdict(result.stats),
        "checkpoints": asdict(result.history.checkpoints)
        if result.history.checkpoints
        else None,
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


def print_result(result: TrainResult) -> None:
    """Prints losses, throughput, plans and counters of a run."""
    job = result.job
    print_table(
        ("epoch", "loss", "accuracy", "seconds", "samples"),
        [
            (
                str(number),
                f"{epoch.mean_loss:.4f}",
                f"{epoch.accuracy:.3f}",
                f"{epoch.seconds:.1f}",
                str(epoch.num_samples),
            )
            for number, epoch in enumerate(result.history.epochs)
        ],
    )
    summary = essentials(job.reports)
    print_table(summary.header, summary.rows)
    changes = [
        (f"{change.seconds:.0f}", mix_label(change.mix), change.why)
        for change in job.plan_changes
    ]
    if changes:
        print_table(("seconds", "plan", "why"), changes)
    columns = {
        "cut": "cut",
        "over the wire": "bytes",
        "package": "package_bytes",
        "retries": "retries",
        "fallbacks": "fallbacks",
        "skipped": "skipped",
        "cached in Swift": "cached",
        "on this host": "local_hits",
    }
    print_facts([{"cut": job.cut, **asdict(result.stats)}], columns)
