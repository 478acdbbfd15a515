"""``hapi train``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hapi_client.cli import completion
from hapi_client.cli.context import (
    JsonPath,
    checked_path,
    connect,
    print_table,
    write_json,
)
from hapi_client.cli.options import (
    CheckpointOption,
    CutOption,
    EncodingOption,
    FloorOption,
    cut_value,
    what_is_cut,
)
from hapi_client.progress import ConsoleReporter
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.headers import CACHE_OFF
from hapi_splitter.units import bytes_text, count_text

if TYPE_CHECKING:
    from torch.nn import Module

    from hapi_client.job.transfer_job import TransferJob
    from hapi_client.metrics.counters import JobStats
    from hapi_training.loop import EpochResult, History


def train_command(
    context: typer.Context,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="swift://CONTAINER[/PREFIX]",
            help="An indexed data set.",
        ),
    ],
    classes: Annotated[
        int, typer.Option(min=2, help="Outputs of the new head.")
    ],
    model: Annotated[
        str,
        typer.Option(
            autocompletion=completion.models, help="As in torchvision.models."
        ),
    ] = "resnet18",
    freeze: Annotated[
        str | None,
        typer.Option(
            help="Name of the last frozen module, or several, separated by "
            "commas; all but the last linear layer if absent."
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion.published_weights,
            help="Published weights (DEFAULT), downloaded.",
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    epochs: Annotated[
        int, typer.Option(min=1, help="Passes over the data set.")
    ] = 1,
    learning_rate: Annotated[
        float, typer.Option("--lr", min=0.0, help="Learning rate of SGD.")
    ] = 0.01,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples of a step.")
    ] = 32,
    cut: CutOption = "auto",
    floor: FloorOption = "lossless",
    encoding: EncodingOption = None,
    cache: Annotated[
        str,
        typer.Option(
            autocompletion=completion.cache_modes,
            help="Features kept in the store for later epochs and runs: "
            "'off', 'read', or 'readwrite', which takes room in your account.",
        ),
    ] = "off",
    augment: Annotated[
        bool,
        typer.Option(
            help="Random crops and flips of training images, the same "
            "wherever they are computed."
        ),
    ] = False,
    augment_epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Repeat them after so many epochs, for --cache. Never if "
            "absent.",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            help="Of the order of samples, of --augment, and of random "
            "weights, the new head's among them.",
        ),
    ] = 0,
    save: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Write the trained model's state dict here, for torchvision "
            "or --checkpoint.",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Go on from this file if it is there, sample by sample; it "
            "is written every 30 seconds, behind each epoch, and on Ctrl-C. "
            "One run at a time; a larger --epochs goes on with one that is "
            "finished.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH.html|PATH.json",
            callback=checked_path,
            help="Write there what each epoch took, also of a run that is "
            "interrupted: pictures and tables, or JSON for 'hapi report'.",
        ),
    ] = None,
    skip_bad_samples: Annotated[
        bool, typer.Option(help="Leave undecodable samples out.")
    ] = False,
    json_path: JsonPath = None,
) -> None:
    """Train the tail of a torchvision model on a data set in Swift.

    Frozen layers run in the store or here, as --cut has it, and the tail
    here: SGD with momentum 0.9 and cross entropy. Accuracy is that on the
    batches that were trained on. Without --weights and
    --checkpoint the weights are random.

    Examples:

        hapi train --data swift://photos/train --classes 10 --epochs 3
        --weights DEFAULT

        hapi train --data photos/train --classes 10 --cut stream

        hapi train --data photos/train --classes 10 --epochs 20
        --resume run.pt --save model.pt

        hapi train --data photos/train --classes 10 --epochs 3
        --report run.html

    On a terminal a line shows how far the epoch is (HAPI_PROGRESS=0: never;
    1: also elsewhere).

    Keys of --json: model, freeze, cut, epochs (loss, accuracy, seconds,
    samples), losses, stats (bytes, package_bytes, retries, fallbacks,
    skipped, saturated, cached, samples, samples_by_cut, seconds), plan
    (null without one),
    no_plan_reason, plan_changes (seconds, mix, samples_per_second, why),
    reports (one for each epoch; the documentation's page "Following a run"
    has their keys).
    """
    # torch takes seconds to import; --help must not wait for it.
    from hapi_client.atomic_file import check_writable
    from hapi_client.job.options import (
        check_cache,
        check_cut,
        checked_encodings,
    )
    from hapi_client.job.transfer_job import TransferJob
    from hapi_client.model.frozen_region import input_transform
    from hapi_client.model.registry import chosen_freeze
    from hapi_client.model.torchvision_registry import build_model
    from hapi_client.reports.run_report import check_report_path
    from hapi_splitter.inputs.augmentation import Augmentation
    from hapi_training.checkpoint_file import Checkpoint, write_whole
    from hapi_training.loop import train_tail

    check_cut(cut_value(cut))
    checked_encodings(encoding, floor)
    check_cache(cache)
    parse_location(data)
    check_files(save, resume)
    if report:
        check_report_path(report)
    network, transform = build_model(
        model,
        num_classes=classes,
        seed=seed,
        weights=weights,
        checkpoint=checkpoint,
    )
    if save:
        check_writable(save, num_bytes_of(network))
    with connect(context) as connection, ConsoleReporter() as reporter:
        if weights is None and checkpoint is None:
            reporter.note("weights are random: no --weights, no --checkpoint")
        sends = cut not in ("auto", "stream", "0")
        reporter.note(
            "splitting the model"
            + (
                ", and sending its package unless the store has it"
                if sends
                else ""
            )
        )
        frozen = chosen_freeze(network, freeze, input_transform(transform))
        with TransferJob(
            network,
            freeze=frozen,
            data=data,
            batch_size=batch_size,
            transform=transform,
            augment=Augmentation() if augment else None,
            augment_epochs=augment_epochs,
            cut=cut_value(cut),
            floor=floor,
            epochs=epochs,
            encoding=encoding,
            cache=cache,
            on_error="skip" if skip_bad_samples else "raise",
            seed=seed,
            connection=connection,
        ) as job:
            _check_labels(job, classes)
            if resume:
                # The optimizer's momentum is as large as the tail.
                check_writable(resume, 2 * num_bytes_of(job.tail))
            reporter.note(
                f"{count_text(job.num_samples, 'sample')}, {what_is_cut(job)}"
            )
            with (
                reporter.resting(),
                _reported(job, report, f"{model} on {data}"),
            ):
                history = train_tail(
                    job,
                    epochs=epochs,
                    learning_rate=learning_rate,
                    on_epoch=lambda number, result: reporter.note(
                        f"epoch {number}: {describe(result)}{plan_text(job)}"
                    ),
                    on_resume=lambda trained, samples: reporter.note(
                        resumed_text(trained, samples, epochs)
                    ),
                    checkpoint=Checkpoint(resume) if resume else None,
                )
                # Before the report, which may fail for want of room.
                if save:
                    write_whole(network.state_dict(), save)
            if job.stats.samples:
                _tell_idle(reporter, job, cache)
            _print(job, history)
            write_json(
                json_path,
                {
                    "model": model,
                    "freeze": frozen,
                    **facts(job, history),
                },
            )


@contextmanager
def _reported(
    job: TransferJob, path: Path | None, title: str
) -> Iterator[None]:
    """What is done inside is reported, however it ends."""
    try:
        yield
    finally:
        if path is not None:
            job.write_report(path, title)


def check_files(save: Path | None, resume: Path | None) -> None:
    """
    Raises:
        ClientError: ``bad_configuration``, before hours of training.
    """
    from hapi_client.atomic_file import check_writable
    from hapi_protocol.errors import ClientError

    if save and resume and save.resolve() == resume.resolve():
        raise ClientError(
            "bad_configuration",
            f"--save and --resume are both {save}; a model and a checkpoint "
            "need files of their own",
        )
    for path in (save, resume):
        if path is not None:
            check_writable(path)


def num_bytes_of(network: Module) -> int:
    """Of its state dict."""
    return sum(each.nbytes for each in network.state_dict().values())


def resumed_text(trained: int, samples: int, epochs: int) -> str:
    """What a checkpoint has, for a run of so many epochs."""
    if trained >= epochs:
        return (
            f"all {count_text(trained, 'epoch')} are trained already; a "
            "larger --epochs goes on"
        )
    return f"going on in epoch {trained}, behind {samples} of its samples"


def _tell_idle(
    reporter: ConsoleReporter, job: TransferJob, cache: str
) -> None:
    """What was asked for and has done nothing."""
    if job.cut == "auto" and job.plan is None:
        reporter.note(f"no plan, all streamed: {job.no_plan_reason}")
    idle = idle_cache_text(cache, job.stats)
    if idle:
        reporter.note(idle)


def idle_cache_text(cache: str, stats: JobStats) -> str:
    """Why a cache that was asked for has kept nothing; empty if it may."""
    if cache == CACHE_OFF or any(cut > 0 for cut in stats.samples_by_cut):
        return ""
    return (
        f"--cache {cache} had nothing to do: pushed features are kept, and "
        "all was streamed; --cut freeze pushes"
    )


def describe(result: EpochResult) -> str:
    return (
        f"loss {result.mean_loss:.4f}, accuracy {result.accuracy:.3f}, "
        f"{result.num_samples / result.seconds:.0f} samples/s"
    )


def plan_text(job: TransferJob) -> str:
    """The present plan, as the end of a line."""
    return f"; {job.plan.label}" if job.plan else ""


def _check_labels(job: TransferJob, classes: int) -> None:
    from hapi_protocol.errors import LabelError

    if job.num_classes > classes:
        raise LabelError(
            "missing_label",
            f"the data set has labels up to {job.num_classes - 1}; "
            f"--classes {classes} is too small",
        )


def facts(job: TransferJob, history: History) -> dict[str, Any]:
    """The JSON form of a run."""
    from hapi_client.reports.epoch_report import report_body

    return {
        "cut": job.cut,
        "epochs": [
            {
                "loss": each.mean_loss,
                "accuracy": each.accuracy,
                "seconds": each.seconds,
                "samples": each.num_samples,
            }
            for each in history.epochs
        ],
        "losses": history.losses,
        "stats": asdict(job.stats),
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
        "reports": [report_body(each) for each in job.reports],
    }


def _print(job: TransferJob, history: History) -> None:
    from hapi_client.reports.run_tables import essentials

    print_table(
        ("epoch", "loss", "accuracy", "seconds", "samples"),
        [
            (
                str(number),
                f"{each.mean_loss:.4f}",
                f"{each.accuracy:.3f}",
                f"{each.seconds:.1f}",
                str(each.num_samples),
            )
            for number, each in enumerate(history.epochs)
        ],
    )
    passes = essentials(job.reports)
    print_table(passes.header, passes.rows)
    if job.plan_changes:
        from hapi_client.planning.replanner import describe_mix

        print_table(
            ("seconds", "plan", "why"),
            [
                (f"{each.seconds:.0f}", describe_mix(each.mix), each.why)
                for each in job.plan_changes
            ],
        )
    stats = job.stats
    print_table(
        (
            "cut",
            "over the wire",
            "package",
            "retries",
            "fallbacks",
            "skipped",
            "cached",
        ),
        [
            (
                str(job.cut),
                bytes_text(stats.bytes),
                bytes_text(stats.package_bytes),
                str(stats.retries),
                str(stats.fallbacks),
                str(stats.skipped),
                str(stats.cached),
            )
        ],
    )
