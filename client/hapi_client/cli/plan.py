"""``hapi plan``: options, checks and output; imports torch only to plan."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hapi_client.cli.context import (
    OUTPUT,
    check_data,
    checked_path,
    connect,
    say,
    write_json,
)
from hapi_client.cli.options import (
    DATA,
    MODEL,
    MODEL_HELP,
    PUSH_DOWN,
    TRAINING,
    ModelOptions,
    argument,
    command_with,
    complete_model,
    option,
)
from hapi_client.cli.parse import parse_link
from hapi_client.progress import Reporter
from hapi_client.reports.html import check_plots
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location, parse_location
from hapi_protocol.encodings import PRECISIONS
from hapi_protocol.errors import ClientError

if TYPE_CHECKING:
    from hapi_client.plan_report.plan_study import PlanStudy
    from hapi_client.reports.table import Table
    from hapi_splitter.inputs.sample_format import InputTransform


def _plot_path(path: Path | None) -> Path | None:
    if path is not None and path.suffix.lower() not in (".png", ".html"):
        raise typer.BadParameter(f"{path} must end in .png or .html")
    if path is not None:
        check_plots()
    return checked_path(path)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ModelOptions):
    """Options of ``hapi plan``."""

    model: str = argument(MODEL_HELP, "MODEL", autocompletion=complete_model)
    size: int | None = option(
        "Width and height of the model's images in pixels. The shorter side "
        "of a stored image is first resized to 8/7 of it, as in ImageNet's "
        "evaluation. Default: the transform of --weights, else 224.",
        panel=MODEL,
        min=8,
        show_default=False,
    )
    array: str | None = option(
        "Shape of the model's samples if they are NumPy arrays: 1x64x100 "
        "(float32), 128:int64, or the arrays of an .npz: "
        "input_ids=128:int64,attention_mask=128:int64.",
        panel=MODEL,
        metavar="[NAME=]SIZES[:DTYPE],…",
    )
    data: Location | None = option(
        "Data set in Swift with an index, to measure with. The swift:// "
        "prefix is optional.",
        panel=DATA,
        metavar="CONTAINER[/PREFIX]",
        parser=parse_location,
    )
    samples: int | None = option(
        "Number of samples. Default: that of --data.", panel=DATA, min=1
    )
    link: float | None = option(
        "Bandwidth of the link: 100mbit, 1gbit, 12MB/s.",
        panel=PUSH_DOWN,
        metavar="BANDWIDTH",
        parser=parse_link,
    )
    measure: bool = option(
        "Measure the bandwidth by reading from --data. Default without "
        "--link.",
        False,
        PUSH_DOWN,
        names=("--measure",),
    )
    upload: bool = option(
        "Store the model package in Swift, so that the worker can profile "
        "it. Without it, the worker is assumed to be as fast as this machine.",
        True,
        PUSH_DOWN,
    )
    epochs: float = option(
        "Number of epochs to plan for.", 1.0, TRAINING, min=0.001
    )
    batch_size: int = option("Samples per batch.", 32, TRAINING, min=1)
    plot: Path | None = option(
        "Draw sizes and times of all cuts to this file.",
        panel=OUTPUT,
        metavar="PATH.png|PATH.html",
        callback=_plot_path,
    )
    all_cuts: bool = option(
        "Also list cuts that are not worth measuring.",
        False,
        OUTPUT,
        names=("--all-cuts",),
    )


@command_with(PlanOptions)
def plan_command(context: typer.Context, options: PlanOptions) -> None:
    """Show where a model can be cut, what each cut costs, and the best plan.

    Nothing is trained. Without --data only this machine is measured: the
    worker is assumed to be as fast, images to be like a photograph, and
    arrays to be random numbers.

    Examples:

        hapi plan resnet18 --freeze layer4 --link 100mbit

        hapi plan vit_b_16 --data swift://photos/train --measure --epochs 10
        --plot plan.html

        hapi plan my_package.models:build --freeze encoder --min-precision half

    Keys of --json: model, freeze, min_precision, link_bytes_per_second,
    assumptions, other_precisions (sentences), packing (of loose objects:
    read_seconds, request_seconds, times_faster), and those of the plan: plan,
    plans, resources, cuts, samples, epochs, push_one_off_seconds,
    server_limit_bytes, client_limit_bytes.
    """
    check_options(options)
    opened: AbstractContextManager[Connection | None] = nullcontext()
    if options.data is not None:
        opened = connect(context)
    with opened as connection, ConsoleReporter() as reporter:
        if connection is not None and options.data is not None:
            check_data(connection, str(options.data))
        result = study(options, reporter, connection)
    print_study(result, options.all_cuts)
    write_json(options.json_path, study_facts(options, result))
    if options.plot is not None:
        _write_plot(options.plot, result)


def check_options(options: PlanOptions) -> None:
    """Checks what can be checked without torch and SciPy.

    Raises:
        BadParameter: for options that exclude each other.
        ClientError: ``bad_configuration`` naming a wrong value.
    """
    if options.measure and options.data is None:
        raise typer.BadParameter(
            "--measure reads from a data set: name it with --data"
        )
    if options.measure and options.link is not None:
        raise typer.BadParameter("--measure and --link exclude each other")
    if options.min_precision not in PRECISIONS:
        raise ClientError(
            "bad_configuration",
            f"min_precision is {options.min_precision!r}; allowed: "
            f"{', '.join(PRECISIONS)}",
        )


def study(
    options: PlanOptions,
    reporter: Reporter,
    connection: Connection | None = None,
) -> PlanStudy:
    """Measures the model and computes its plans.

    Args:
        options: checked by :func:`check_options`.
        reporter: receives the steps.
        connection: needed if the options name a data set.

    Raises:
        HapiError: naming a wrong option, or of a measurement.
    """
    # torch takes seconds to import.
    from hapi_client.model.registry import (
        ModelSource,
        imagenet_transform,
        load_region,
        parse_array,
    )
    from hapi_client.plan_report.plan_study import advise
    from hapi_client.plan_report.study_inputs import PlanRequest

    request = PlanRequest(
        min_precision=options.min_precision,
        epochs=options.epochs,
        batch_size=options.batch_size,
        link=options.link,
        num_samples=options.samples,
        upload=options.upload,
        name=options.model,
    )
    reporter.note(f"splitting {options.model}")
    source = ModelSource(options.model, options.weights, options.checkpoint)
    transform: InputTransform | None = None
    if options.array is not None:
        transform = parse_array(options.array)
    elif options.size is not None:
        transform = imagenet_transform(options.size)
    region = load_region(source, options.freeze, transform, options.device)
    if source.is_random:
        reporter.note("weights are random: no --weights, no --checkpoint")
    return advise(region, request, reporter, connection, options.data)


def print_study(study: PlanStudy, all_cuts: bool) -> None:
    """Prints tables and sentences to standard output."""
    from hapi_client.plan_report.plan_tables import (
        cost_table,
        cut_table,
        plans_table,
        summary,
    )

    report = study.report
    for note in report.notes:
        say(note)
    _print_table(cut_table(report, every=all_cuts))
    _print_table(cost_table(report))
    _print_table(plans_table(report))
    for line in (*summary(report), *study.other_precisions):
        say(line)


def _print_table(table: Table) -> None:
    # Plain lines: a drawn table would be squeezed on a narrow terminal.
    for line in ("", *table.lines(), table.note, ""):
        say(line)


def study_facts(options: PlanOptions, study: PlanStudy) -> dict[str, object]:
    """Returns the JSON form of a study."""
    from hapi_client.plan_report.plan_tables import report_body

    return {
        "model": options.model,
        "freeze": study.freeze,
        "min_precision": options.min_precision,
        "link_bytes_per_second": study.conditions.link_bytes_per_second,
        "assumptions": list(study.assumptions),
        "other_precisions": list(study.other_precisions),
        "packing": study.packing
        and {
            **asdict(study.packing),
            "times_faster": study.packing.times_faster,
        },
        **report_body(study.report),
    }


def _write_plot(path: Path, study: PlanStudy) -> None:
    from hapi_client.plan_report.plan_page import write_plot

    try:
        write_plot(path, study.report)
    except OSError as error:
        raise ClientError(
            "bad_configuration", f"the plot cannot be written: {error}"
        ) from error
    say(f"plot: {path}")
