"""``hapi plan``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hapi_client.cli import completion
from hapi_client.cli.context import (
    JsonPath,
    checked_path,
    connect,
    write_json,
)
from hapi_client.cli.options import CheckpointOption
from hapi_client.cli.parse import parse_link
from hapi_client.progress import ConsoleReporter
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.encodings import FLOORS
from hapi_protocol.errors import ClientError

if TYPE_CHECKING:
    from hapi_client.plan_report.plan_study import PlanStudy
    from hapi_client.reports.table import Table


def plan_command(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            autocompletion=completion.models,
            help="As in torchvision.models; or MODULE:FUNCTION, which "
            "yields a model of yours (or a pair: frozen, tail).",
        ),
    ],
    freeze: Annotated[
        str | None,
        typer.Option(
            help="Name of the last frozen module, or several, separated by "
            "commas; all but the last linear layer if absent."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="swift://CONTAINER[/PREFIX]",
            help="An indexed data set, to measure with.",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="Speed of the link: 100mbit, 1gbit, 12MB/s."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure the link by reading from --data (as is done "
            "without --link).",
        ),
    ] = False,
    epochs: Annotated[
        float, typer.Option(min=0.001, help="Epochs to be trained.")
    ] = 1.0,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of the data set, if not --data's."),
    ] = None,
    floor: Annotated[
        str,
        typer.Option(
            autocompletion=completion.floors,
            help="What may be rounded: lossless (nothing), half (to 16 "
            "bits), uint8 (to 8).",
        ),
    ] = "lossless",
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples of a step of the training.")
    ] = 32,
    size: Annotated[
        int,
        typer.Option(
            min=8,
            help="Pixels of the square the model takes; the shorter side of "
            "an image is resized to 8/7 of it first, as ImageNet's "
            "evaluation does.",
        ),
    ] = 224,
    array: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES[:DTYPE]",
            help="The model takes NumPy arrays instead of images: 1x64x100 "
            "of float32, or 128:int64.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion.published_weights,
            help="Published weights (DEFAULT), downloaded; random if absent, "
            "which changes no cost but that of compression.",
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    device: Annotated[
        str,
        typer.Option(
            autocompletion=completion.devices,
            help="Of this machine: cpu, cuda, cuda:1.",
        ),
    ] = "cpu",
    upload: Annotated[
        bool,
        typer.Option(
            help="Store the model package with --data, so that the worker "
            "can profile it; without, it is taken to be like this machine."
        ),
    ] = True,
    all_cuts: Annotated[
        bool,
        typer.Option("--all-cuts", help="Cuts not worth measuring, too."),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH.png|PATH.html",
            callback=checked_path,
            help="Draw sizes and times at the cuts.",
        ),
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Show where a model can be cut, what each cut costs, and the best plan.

    Nothing is trained. Without --data nothing but this machine is asked:
    the worker is taken to be like it, images like a photograph, and arrays
    like random numbers.

    Examples:

        hapi plan resnet18 --freeze layer4 --link 100mbit

        hapi plan vit_b_16 --data swift://photos/train --measure --epochs 10
        --plot plan.html

        hapi plan my_package.models:build --freeze encoder --floor half

    Keys of --json: model, freeze, floor, link_bytes_per_second, assumptions,
    other_floors (sentences), and those of the plan: plan, plans, resources,
    cuts, samples, epochs, push_one_off_seconds, server_limit_bytes,
    client_limit_bytes.
    """
    from hapi_client.plan_report.plan_page import write_plot
    from hapi_client.plan_report.plan_tables import (
        check_plot_path,
        report_body,
    )

    if plot is not None:
        try:
            check_plot_path(plot)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    if measure and data is None:
        raise typer.BadParameter(
            "--measure reads from a data set: name it with --data"
        )
    if measure and link is not None:
        raise typer.BadParameter("--measure and --link exclude each other")
    rate = None if link is None else parse_link(link)
    checked_floor(floor)
    location = None if data is None else parse_location(data)
    # torch takes seconds to import; --help must not wait for it.
    from hapi_client.model.registry import (
        ModelSource,
        arrays_of,
        images_of,
        load_region,
    )
    from hapi_client.plan_report.plan_study import PlanRequest, advise

    question = PlanRequest(
        floor=floor,
        epochs=epochs,
        batch_size=batch_size,
        link=rate,
        num_samples=samples,
        upload=upload,
        name=model,
    )
    with contextlib.ExitStack() as opened:
        connection = None
        if location is not None:
            connection = opened.enter_context(connect(context))
        reporter = opened.enter_context(ConsoleReporter())
        reporter.note(f"splitting {model}")
        source = ModelSource(model, weights, checkpoint)
        transform = images_of(size) if array is None else arrays_of(array)
        region = load_region(source, freeze, transform, device)
        if source.is_random:
            reporter.note("weights are random: no --weights, no --checkpoint")
        advice = advise(region, question, reporter, connection, location)
    print_advice(advice, all_cuts)
    write_json(
        json_path,
        {
            "model": model,
            "freeze": region.freeze,
            "floor": floor,
            "link_bytes_per_second": advice.conditions.link_bytes_per_second,
            "assumptions": list(advice.assumptions),
            "other_floors": list(advice.other_floors),
            **report_body(advice.report),
        },
    )
    if plot is not None:
        try:
            write_plot(plot, advice.report)
        except OSError as error:
            raise ClientError(
                "bad_configuration", f"the plot cannot be written: {error}"
            ) from error
        say(f"plot: {plot}")


def checked_floor(floor: str) -> str:
    """
    Raises:
        ClientError: ``bad_configuration`` naming what is allowed.
    """
    if floor not in FLOORS:
        raise ClientError(
            "bad_configuration",
            f"floor is {floor!r}; allowed: {', '.join(FLOORS)}",
        )
    return floor


def print_advice(advice: PlanStudy, every: bool) -> None:
    """Prints tables and sentences to standard output."""
    from hapi_client.plan_report.plan_tables import (
        cost_table,
        cut_table,
        plans_table,
        summary,
    )

    report = advice.report
    for note in report.notes:
        say(note)
    _print_table(cut_table(report, every=every))
    _print_table(cost_table(report))
    _print_table(plans_table(report))
    for line in (*summary(report), *advice.other_floors):
        say(line)


def say(line: str) -> None:
    """One line to standard output, as it is."""
    Console(highlight=False, soft_wrap=True).print(line, markup=False)


def _print_table(table: Table) -> None:
    # Plain lines: a narrow terminal would squeeze a drawn table.
    for line in ("", *table.lines(), table.note, ""):
        say(line)
