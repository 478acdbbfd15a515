"""``hapi train``: options and checks; imports torch only when it trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hapi_client.atomic_file import check_writable
from hapi_client.cli.context import (
    GroupedJsonPath,
    checked_path,
    connect,
    write_json,
)
from hapi_client.cli.options import (
    DATA,
    EXPERT,
    MODEL,
    OUTPUT,
    PUSH_DOWN,
    TRAINING,
    CheckpointOption,
    CutOption,
    DataOption,
    EncodingOption,
    FreezeOption,
    MinPrecisionOption,
    SkipBadSamplesOption,
    TorchvisionModelOption,
    WeightsOption,
    command_with,
    one_of,
)
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.errors import ClientError
from hapi_protocol.headers import CACHE_MODES


@dataclass(frozen=True)
class TrainOptions:
    """Options of ``hapi train``."""

    data: DataOption
    classes: Annotated[
        int,
        typer.Option(
            min=2,
            help="Number of classes, the outputs of the new head.",
            rich_help_panel=MODEL,
        ),
    ]
    augment: Annotated[
        bool,
        typer.Option(
            help="Crop and flip training images at random; the result does "
            "not depend on where they are computed.",
            rich_help_panel=DATA,
        ),
    ] = False
    skip_bad_samples: SkipBadSamplesOption = False
    model: TorchvisionModelOption = "resnet18"
    freeze: FreezeOption = None
    weights: WeightsOption = None
    checkpoint: CheckpointOption = None
    epochs: Annotated[
        int,
        typer.Option(
            min=1, help="Number of epochs.", rich_help_panel=TRAINING
        ),
    ] = 1
    learning_rate: Annotated[
        float,
        typer.Option(
            "--lr",
            min=0.0,
            help="Learning rate of SGD.",
            rich_help_panel=TRAINING,
        ),
    ] = 0.01
    batch_size: Annotated[
        int,
        typer.Option(
            min=1, help="Samples per batch.", rich_help_panel=TRAINING
        ),
    ] = 32
    resume: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Checkpoint file: resume from it, sample by sample, if it "
            "exists. It is written every 30 seconds, after each epoch and on "
            "Ctrl-C. Only one run may use it at a time; a finished run "
            "continues with a larger --epochs.",
            rich_help_panel=TRAINING,
        ),
    ] = None
    cut: CutOption = "auto"
    cache: Annotated[
        str,
        typer.Option(
            autocompletion=one_of(*CACHE_MODES),
            help="Feature cache in Swift for later epochs and runs: 'off', "
            "'read', or 'readwrite', which stores features in your account.",
            rich_help_panel=PUSH_DOWN,
        ),
    ] = "off"
    save: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Write the trained model's state dict to this file, for "
            "torchvision or --checkpoint.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH.html|PATH.json",
            callback=checked_path,
            help="Write time and traffic of each epoch to this file, also if "
            "the run is interrupted: figures and tables (.html), or JSON for "
            "'hapi report'.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    json_path: GroupedJsonPath = None
    min_precision: MinPrecisionOption = "lossless"
    encoding: EncodingOption = None
    augment_period_epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Repeat the same --augment crops and flips after this many "
            "epochs, so that --cache has hits. Default: never.",
            rich_help_panel=EXPERT,
        ),
    ] = None
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            help="Seed for weight initialisation, sample order and --augment.",
            rich_help_panel=EXPERT,
        ),
    ] = 0


@command_with(TrainOptions)
def train_command(context: typer.Context, options: TrainOptions) -> None:
    """Train the tail of a torchvision model on a data set in Swift.

    The frozen layers run in Swift or on this machine, depending on --cut; the
    tail is trained on this machine with SGD (momentum 0.9) and cross entropy.
    The accuracy is measured on the training batches. Without --weights and
    --checkpoint the weights are random.

    Examples:

        hapi train --data swift://photos/train --classes 10 --epochs 3
        --weights DEFAULT

        hapi train --data photos/train --classes 10 --cut stream

        hapi train --data photos/train --classes 10 --epochs 20
        --resume run.pt --save model.pt

        hapi train --data photos/train --classes 10 --epochs 3
        --report run.html

    A progress bar is shown on a terminal (HAPI_PROGRESS=0: never;
    HAPI_PROGRESS=1: always).

    Keys of --json: model, freeze, cut, epochs (loss, accuracy, seconds,
    samples), losses, stats (bytes, package_bytes, retries, fallbacks,
    skipped, saturated, cached, samples, samples_by_cut, seconds), plan
    (null without one),
    no_plan_reason, plan_changes (seconds, mix, samples_per_second, why),
    reports (one for each epoch; the documentation's page "Following a run"
    has their keys).
    """
    parse_location(options.data)
    check_files(options)
    with connect(context) as connection, ConsoleReporter() as reporter:
        from hapi_client.cli import train_run

        result = train_run.train(options, connection, reporter)
        train_run.print_result(result)
    write_json(options.json_path, train_run.result_facts(result))


def check_files(options: TrainOptions) -> None:
    """Checks that all files can be written, before hours of training.

    Raises:
        ClientError: ``bad_configuration`` naming the file.
    """
    save, resume, report = options.save, options.resume, options.report
    if save and resume and save.resolve() == resume.resolve():
        raise ClientError(
            "bad_configuration",
            f"--save and --resume are both {save}; give the model and the "
            "checkpoint different files",
        )
    for path in (save, resume):
        if path is not None:
            check_writable(path)
    if report is not None:
        # Imported late: it imports pyarrow.
        from hapi_client.reports.run_report import check_report_path

        check_report_path(report)
