"""``hapi plan``: options, checks and output; imports torch only to plan."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hapi_client.cli.context import (
    GroupedJsonPath,
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
    OUTPUT,
    PUSH_DOWN,
    TRAINING,
    CheckpointOption,
    DeviceOption,
    FreezeOption,
    MinPrecisionOption,
    WeightsOption,
    command_with,
    complete_model,
)
from hapi_client.cli.parse import parse_link
from hapi_client.progress import Reporter
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.encodings import PRECISIONS
from hapi_protocol.errors import ClientError

if TYPE_CHECKING:
    from hapi_client.plan_report.plan_study import PlanStudy
    from hapi_client.reports.table import Table
    from hapi_splitter.inputs.sample_format import InputTransform


@dataclass(frozen=True)
class PlanOptions:
    """Options of ``hapi plan``."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_model,
            help=MODEL_HELP,
        ),
    ]
    freeze: FreezeOption = None
    weights: WeightsOption = None
    checkpoint: CheckpointOption = None
    size: Annotated[
        int | None,
        typer.Option(
            min=8,
            help="Width and height of the model's images in pixels. The "
            "shorter side of a stored image is first resized to 8/7 of it, "
            "as in ImageNet's evaluation. Default: the transform of "
            "--weights, else 224.",
            show_default=False,
            rich_help_panel=MODEL,
        ),
    ] = None
    array: Annotated[
        str | None,
        typer.Option(
            metavar="[NAME=]SIZES[:DTYPE],…",
            help="Shape of the model's samples if they are NumPy arrays: "
            "1x64x100 (float32), 128:int64, or the arrays of an .npz: "
            "input_ids=128:int64,attention_mask=128:int64.",
            rich_help_panel=MODEL,
        ),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(
            metavar="CONTAINER[/PREFIX]",
            help="Data set in Swift with an index, to measure with. The "
            "swift:// prefix is optional.",
            rich_help_panel=DATA,
        ),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of samples. Default: that of --data.",
            rich_help_panel=DATA,
        ),
    ] = None
    link: Annotated[
        str | None,
        typer.Option(
            help="Bandwidth of the link: 100mbit, 1gbit, 12MB/s.",
            rich_help_panel=PUSH_DOWN,
        ),
    ] = None
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure the bandwidth by reading from --data. Default "
            "without --link.",
            rich_help_panel=PUSH_DOWN,
        ),
    ] = False
    upload: Annotated[
        bool,
        typer.Option(
            help="Store the model package in Swift, so that the worker can "
            "profile it. Without it, the worker is assumed to be as fast as "
            "this machine.",
            rich_help_panel=PUSH_DOWN,
        ),
    ] = True
    epochs: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="Number of epochs to plan for.",
            rich_help_panel=TRAINING,
        ),
    ] = 1.0
    batch_size: Annotated[
        int,
        typer.Option(
            min=1, help="Samples per batch.", rich_help_panel=TRAINING
        ),
    ] = 32
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH.png|PATH.html",
            callback=checked_path,
            help="Draw sizes and times of all cuts to this file.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    all_cuts: Annotated[
        bool,
        typer.Option(
            "--all-cuts",
            help="Also list cuts that are not worth measuring.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    json_path: GroupedJsonPath = None
    min_precision: MinPrecisionOption = "lossless"
    device: DeviceOption = "cpu"


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
    server_limit_bytes,
    client_limit_bytes.
    """
    check_options(options)
    opened: AbstractContextManager[Connection | None] = nullcontext()
    if options.data is not None:
        opened = connect(context)
    with opened as connection, ConsoleReporter() as reporter:
        check_plot(options.plot)
        if connection is not None and options.data is not None:
            check_data(connection, options.data)
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
    if options.link is not None:
        parse_link(options.link)
    if options.min_precision not in PRECISIONS:
        raise ClientError(
            "bad_configuration",
            f"min_precision is {options.min_precision!r}; allowed: "
            f"{', '.join(PRECISIONS)}",
        )
    if options.data is not None:
        parse_location(options.data)


def check_plot(path: Path | None) -> None:
    """Checks the suffix of ``--plot``; imports SciPy.

    Raises:
        BadParameter: naming the allowed suffixes.
    """
    if path is None:
        return
    from hapi_client.plan_report.plan_tables import check_plot_path

    try:
        check_plot_path(path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


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
        link=None if options.link is None else parse_link(options.link),
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
    location = None if options.data is None else parse_location(options.data)
    return advise(region, request, reporter, connection, location)


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
