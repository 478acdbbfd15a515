"""``hapi demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hapi_client.cli.context import (
    JsonPath,
    print_table,
    write_json,
)
from hapi_client.cli.options import TorchvisionModelOption, complete_encoding
from hapi_client.reports.terminal import ConsoleReporter
from hapi_splitter.units import bytes_text, count_text

if TYPE_CHECKING:
    from hapi_client.cli.demo.run import DemoResult, RunResult


def demo_command(
    data: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            metavar="TAR|DIR",
            help="Your own WebDataset tar file, folder of tar files, or image "
            "folder. Repeatable.",
        ),
    ] = None,
    more_data: Annotated[
        list[Path] | None,
        typer.Argument(
            exists=True,
            metavar="[TAR]...",
            help="More tar files, so that --data *.tar works in a shell.",
        ),
    ] = None,
    epochs: Annotated[
        int, typer.Option(min=1, help="Epochs of each of the two runs.")
    ] = 3,
    model: TorchvisionModelOption = "resnet18",
    freeze: Annotated[
        str, typer.Option(help="Name of the last frozen module.")
    ] = "layer4",
    cut: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of the cut for push-down, 1 being nearest to the "
            "image. Default: the end of the frozen region.",
        ),
    ] = None,
    encoding: Annotated[
        str,
        typer.Option(
            autocompletion=complete_encoding,
            help="Encoding on the wire: float32, float16, bfloat16 or uint8, "
            "each optionally with ;lz4 or ;zstd.",
        ),
    ] = "float32",
    seed: Annotated[
        int,
        typer.Option(
            min=0, help="Seed for weight initialisation and sample order."
        ),
    ] = 0,
    json_path: JsonPath = None,
) -> None:
    """Train a tail twice on a temporary Swift: with raw reads, pushed down.

    Starts Swift with the hapi filter and a worker in a temporary directory
    on this machine, stores a few hundred photographs, trains, compares the
    two loss curves, and stops everything. Nothing is downloaded, so the
    weights are random: the losses show that both runs are equal, not how well
    the model learns. Client and storage share this machine's cores, so
    push-down saves bytes here, not seconds.

    Exits with 1 if the loss curves differ by more than 1e-4 (for a tail with
    BatchNorm: by more than 10 times the difference of two streaming runs with
    different batch splits), or if the push-down run fell back to raw reads.

    Examples:

        hapi demo

        hapi demo --data shard-*.tar --epochs 2 --json demo.json

    Keys of --json: streaming and pushdown (each with bytes, seconds,
    losses, accuracy, fallbacks), package_bytes, max_loss_difference,
    tolerance, cut.
    """
    from hapi_client.cli.demo.run import DemoPlan, check_plan, run_demo

    plan = DemoPlan(
        model=model,
        freeze=freeze,
        epochs=epochs,
        cut="freeze" if cut is None else cut,
        encoding=encoding,
        seed=seed,
        data=(*(data or ()), *(more_data or ())),
    )
    from hapi_client.cli.demo.cluster import demo_connection

    with ConsoleReporter() as reporter:
        reporter.note(f"checking that {model} can be split at {freeze}")
        check_plan(plan)
        reporter.note("starting Swift and a worker in a temporary directory")
        with demo_connection() as connection:
            result = run_demo(connection, plan, reporter)
    _print(result)
    write_json(json_path, demo_facts(result))
    if not result.curves_agree:
        typer.echo("hapi: the loss curves differ", err=True)
        raise typer.Exit(1)
    if result.pushdown.fallbacks:
        typer.echo(
            "hapi: the push-down run read "
            f"{count_text(result.pushdown.fallbacks, 'span')} raw, because "
            "the worker was not available",
            err=True,
        )
        raise typer.Exit(1)


def demo_facts(result: DemoResult) -> dict[str, Any]:
    """Returns the JSON form of both runs."""
    return {
        "streaming": _run_facts(result.streaming),
        "pushdown": _run_facts(result.pushdown),
        "package_bytes": result.pushdown.package_bytes,
        "max_loss_difference": result.max_loss_difference,
        "tolerance": result.tolerance,
        "cut": result.pushdown.cut,
    }


def _run_facts(run: RunResult) -> dict[str, Any]:
    return {
        "bytes": run.bytes,
        "seconds": run.seconds,
        "losses": list(run.losses),
        "accuracy": run.accuracy,
        "fallbacks": run.fallbacks,
    }


def _print(result: DemoResult) -> None:
    print_table(
        (
            "",
            "cut",
            "over the wire",
            "seconds",
            "last batch's loss",
            "accuracy",
        ),
        [
            (
                run.name,
                str(run.cut),
                bytes_text(run.bytes),
                f"{run.seconds:.1f}",
                f"{run.losses[-1]:.6f}",
                f"{run.accuracy:.3f}",
            )
            for run in (result.streaming, result.pushdown)
        ],
    )
    typer.echo(compare_bytes(result))
    typer.echo(
        "Largest relative difference between the loss curves: "
        f"{result.max_loss_difference:.1e} (tolerance: "
        f"{result.tolerance:.1e})"
    )
    typer.echo(
        "Compare bytes, not seconds: client and storage share this machine's "
        "cores."
    )
    typer.echo(
        "The weights were random (nothing was downloaded), so the accuracy is "
        "not meaningful."
    )


def compare_bytes(result: DemoResult) -> str:
    streaming, pushdown = result.streaming.bytes, result.pushdown.bytes
    package_bytes = result.pushdown.package_bytes
    if pushdown >= streaming:
        return (
            f"Push-down moved {pushdown / max(1, streaming):.1f} times the "
            "bytes of streaming: features at this cut are larger than these "
            "images. Choose a later --freeze or --cut. The model package "
            f"added {bytes_text(package_bytes)} once."
        )
    ratio = streaming / max(1, pushdown)
    saved_bytes = (streaming - pushdown) / result.pushdown.num_epochs
    epochs = int(package_bytes / saved_bytes) + 1
    return (
        f"Push-down moved 1/{ratio:.1f} of the bytes, and "
        f"{bytes_text(package_bytes)} more for the model package, which is "
        "sent once: in total it moves less after "
        f"{count_text(epochs, 'epoch')}."
    )
