"""``hapi train``: options and checks; imports torch only when it trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hapi_client.atomic_file import check_writable
from hapi_client.cli.context import (
    check_data,
    connect,
    write_json,
)
from hapi_client.cli.options import (
    command_with,
)
from hapi_client.cli.train_options import SWEPT, TrainOptions
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.errors import ClientError, LabelError
from hapi_splitter.units import count_text
from hapi_training.recipe import Recipe

if TYPE_CHECKING:
    from hapi_client.data.splits import DataSet
    from hapi_client.swift.connection import Connection

MIN_CLASSES = 2


@command_with(TrainOptions)
def train_command(context: typer.Context, options: TrainOptions) -> None:
    """Train the tail of a model on a data set in Swift, or a sweep.

    The frozen layers run in Swift or on this machine, depending on --cut; the
    tail is trained on this machine with cross entropy. With --val, loss and
    accuracy are also measured on other data after each epoch. Without
    --weights and --checkpoint the weights of a library's model are random;
    models of Hugging Face have those of their name.

    Several values of --lr, --optimizer, --weight-decay, --schedule, --warmup
    or --label-smoothing are a sweep: each combination is trained, from the
    same initial weights, on features that are computed once.

    Examples:

        hapi train --data swift://photos/train --epochs 3 --weights DEFAULT

        hapi train --data photos/train --val photos/val --model timm/resnet50
        --weights DEFAULT --optimizer adamw --lr 1e-3 --schedule cosine
        --warmup 1 --epochs 20 --early-stop 5 --save-best best.pt

        hapi train --data photos/train --val photos/val --epochs 10
        --lr 1e-1,1e-2 --weight-decay 0,1e-4 --resume sweep

        hapi train --data photos/train --epochs 20 --resume run.pt
        --save model.pt --report run.html

        torchrun --nproc-per-node 2 -m hapi_client.cli.main train
        --data photos/train --batch-size 64

        hapi train --data photos/train --epochs 20 --resume run
        --remote swift://runs/photos

    Under torchrun the ranks share each batch, and the first one prints and
    writes files.

    A progress bar is shown on a terminal (HAPI_PROGRESS=0: never;
    HAPI_PROGRESS=1: always).

    Keys of --json: model, freeze, classes, cut, epochs (loss, accuracy,
    val_loss, val_accuracy, val_top5, seconds, samples), losses, best_epoch,
    checkpoints (null without any; saved, seconds_blocked, seconds_written,
    uploaded, seconds_uploaded, dropped), runs (one for each combination:
    name, recipe, and the four before; those are of the best run), stats
    (bytes, package_bytes, retries, fallbacks, skipped, saturated, cached,
    local_hits, samples, samples_by_cut, seconds), plan (null without one),
    no_plan_reason, plan_changes (seconds, mix, samples_per_second, why),
    reports (one for each epoch; the documentation's page "Follow a run"
    has their keys).
    """
    for location in options.data_splits.values():
        parse_location(location)
    if options.remote is not None:
        parse_location(options.remote)
    check_options(options)
    with connect(context) as connection, ConsoleReporter() as reporter:
        check_files(options)
        for location in options.data_splits.values():
            check_data(connection, location)
        data = load_data(options, connection)
        # torch takes seconds to import.
        from hapi_client.cli import train_result, train_run

        result = train_run.train(options, connection, reporter, data)
        if not train_run.is_first_rank():
            return
        train_result.print_result(result)
    write_json(options.json_path, train_result.result_facts(result))


def load_data(
    options: TrainOptions, connection: Connection
) -> Mapping[str, DataSet]:
    """Loads the indexes, and checks the classes, which takes no torch.

    Raises:
        HapiError: of the data; ``missing_label`` naming ``--classes``.
    """
    from hapi_client.data.splits import load_splits, num_classes_of

    splits = load_splits(connection, options.data_splits, options.labels)
    if num_classes_of(splits, options.classes) < MIN_CLASSES:
        raise LabelError(
            "missing_label",
            f"the labels of {options.data} have one class only; give "
            "--classes, or other --labels",
        )
    return splits


def check_options(options: TrainOptions) -> None:
    """Checks what needs neither Swift nor torch.

    Raises:
        ClientError: ``bad_configuration`` naming the option.
    """
    for _, values in options.recipes():
        try:
            Recipe(**values)
        except ClientError as error:
            for option, field in SWEPT.items():
                error.message = error.message.replace(field, f"--{option}")
            raise
    longest = max(options.warmup_epochs)
    if longest and longest >= options.epochs:
        raise ClientError(
            "bad_configuration",
            f"--warmup is {longest:g}, but the run has "
            f"{count_text(options.epochs, 'epoch')}; give fewer",
        )
    if options.amp not in (None, "bf16"):
        raise ClientError(
            "bad_configuration", f"--amp is {options.amp!r}; give bf16"
        )
    if options.early_stop is not None and options.val is None:
        raise ClientError(
            "bad_configuration",
            f"--early-stop is {options.early_stop}, but nothing is evaluated; "
            "give --val",
        )
    resume = options.resume
    if options.is_sweep and resume is not None and resume.suffix == ".pt":
        raise ClientError(
            "bad_configuration",
            f"--resume is {resume}, but a sweep has a checkpoint for "
            "each run; give a folder",
        )


def check_files(options: TrainOptions) -> None:
    """Checks that all files can be written, before hours of training.

    Raises:
        ClientError: ``bad_configuration`` naming the file.
    """
    resume, report = options.resume, options.report
    paths = {
        "--save": options.save,
        "--save-best": options.save_best,
        "--resume": resume,
    }
    names: dict[Path, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        other = names.setdefault(path.resolve(), name)
        if other != name:
            raise ClientError(
                "bad_configuration",
                f"{other} and {name} are both {path}; give them different "
                "files",
            )
    if options.save_steps and not (resume or options.remote):
        raise ClientError(
            "bad_configuration",
            f"--save-steps is {options.save_steps}, but the checkpoints have "
            "no place; give --resume or --remote",
        )
    for path in paths.values():
        if path is not None:
            check_writable(path)
    if report is not None:
        # Imported late: it imports pyarrow.
        from hapi_client.reports.run_report import check_report_path

        check_report_path(report)
