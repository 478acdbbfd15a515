"""Options of ``hapi train``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hapi_client.cli.context import (
    GroupedJsonPath,
    checked_path,
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
    DeviceOption,
    EncodingOption,
    ExifOption,
    FreezeOption,
    ImageOption,
    LabelsOption,
    MinPrecisionOption,
    SkipBadSamplesOption,
    TorchvisionModelOption,
    WeightsOption,
    one_of,
)
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
    labels: LabelsOption = None
    image: ImageOption = None
    exif: ExifOption = None
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
    store_cache: Annotated[
        str,
        typer.Option(
            autocompletion=one_of(*CACHE_MODES),
            help="Features cached in Swift for later epochs and runs: 'off', "
            "'read', or 'readwrite', which stores them in your account.",
            rich_help_panel=PUSH_DOWN,
        ),
    ] = "off"
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Directory of this host in which features are cached for "
            "later runs, and for all ranks. Without it they are cached in "
            "memory, for later epochs.",
            rich_help_panel=PUSH_DOWN,
        ),
    ] = None
    retry_seconds: Annotated[
        float,
        typer.Option(
            min=0,
            help="Longest wait for a Swift that does not answer, as while its "
            "proxy restarts.",
            rich_help_panel=PUSH_DOWN,
        ),
    ] = 300.0
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
    device: DeviceOption = "cpu"
    min_precision: MinPrecisionOption = "lossless"
    encoding: EncodingOption = None
    augment_period_epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Repeat the same --augment crops and flips after this many "
            "epochs, so that their features can be cached. Default: never.",
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
