"""``hapi train``: options and checks; imports torch only when it trains."""

from __future__ import annotations

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
from hapi_client.cli.train_options import TrainOptions
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.errors import ClientError


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

        torchrun --nproc-per-node 2 -m hapi_client.cli.main train
        --data photos/train --classes 10 --batch-size 64

        hapi train --data photos/train --classes 10 --epochs 20
        --resume run --remote swift://runs/photos

    Under torchrun the ranks share each batch, and the first one prints and
    writes files.

    A progress bar is shown on a terminal (HAPI_PROGRESS=0: never;
    HAPI_PROGRESS=1: always).

    Keys of --json: model, freeze, cut, epochs (loss, accuracy, seconds,
    samples), losses, stats (bytes, package_bytes, retries, fallbacks,
    skipped, saturated, cached, local_hits, samples, samples_by_cut, seconds),
    checkpoints (null without any; saved, seconds_blocked, seconds_written,
    uploaded, seconds_uploaded, dropped), plan (null without one),
    no_plan_reason, plan_changes (seconds, mix, samples_per_second, why),
    reports (one for each epoch; the documentation's page "Following a run"
    has their keys).
    """
    parse_location(options.data)
    if options.remote is not None:
        parse_location(options.remote)
    with connect(context) as connection, ConsoleReporter() as reporter:
        check_files(options)
        check_data(connection, options.data)
        # torch takes seconds to import.
        from hapi_client.cli import train_run

        result = train_run.train(options, connection, reporter)
        if not train_run.is_first_rank():
            return
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
    if options.save_steps and not (resume or options.remote):
        raise ClientError(
            "bad_configuration",
            f"--save-steps is {options.save_steps}, but the checkpoints have "
            "no place; give --resume or --remote",
        )
    for path in (save, resume):
        if path is not None:
            check_writable(path)
    if report is not None:
        # Imported late: it imports pyarrow.
        from hapi_client.reports.run_report import check_report_path

        check_report_path(report)
