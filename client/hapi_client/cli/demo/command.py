"""``hapi demo``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hapi_client.cli.context import JsonPath, print_table, write_json
from hapi_client.cli.options import (
    command_with,
    complete_encoding,
    complete_model,
    option,
)
from hapi_client.reports.terminal import ConsoleReporter
from hapi_splitter.units import bytes_text, count_text

if TYPE_CHECKING:
    from hapi_client.cli.demo.run import DemoResult
    from hapi_client.cli.train_result import TrainResult


@dataclass(frozen=True)
class DemoOptions:
    """Options of ``hapi demo``."""

    data: list[Path] | None = option(
        "Your own WebDataset tar file, folder of tar files, or image folder. "
        "Repeatable.",
        exists=True,
        metavar="TAR|DIR",
    )
    more_data: Annotated[
        list[Path] | None,
        typer.Argument(
            exists=True,
            metavar="[TAR]...",
            help="More tar files, so that --data *.tar works in a shell.",
        ),
    ] = None
    epochs: int = option("Epochs of each of the two runs.", 3, min=1)
    model: str = option(
        "Name of a model in torchvision.models.",
        "resnet18",
        autocompletion=complete_model,
    )
    freeze: str = option("Name of the last frozen module.", "layer4")
    cut: int | None = option(
        "Number of the cut for push-down, 1 being nearest to the image. "
        "Default: the end of the frozen region.",
        min=1,
    )
    encoding: str = option(
        "Encoding on the wire: float32, float16, bfloat16 or uint8, each "
        "optionally with ;lz4 or ;zstd.",
        "float32",
        autocompletion=complete_encoding,
    )
    seed: int = option(
        "Seed for weight initialisation and sample order.", 0, min=0
    )
    json_path: JsonPath = None

    @property
    def tars(self) -> tuple[Path, ...]:
        """The data of the user; empty for the photographs."""
        return (*(self.data or ()), *(self.more_data or ()))

    @property
    def cut_name(self) -> str:
        """The cut of the push-down run."""
        return "freeze" if self.cut is None else str(self.cut)


@command_with(DemoOptions)
def demo_command(_context: typer.Context, options: DemoOptions) -> None:
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
    from hapi_client.cli.demo.run import check_options, run_demo

    with ConsoleReporter() as reporter:
        reporter.note(
            f"checking that {options.model} can be split at {options.freeze}"
        )
        check_options(options)
        reporter.note("starting Swift and a worker in a temporary directory")
        result = run_demo(options, reporter)
    _print(result)
    pushdown = result.pushdown
    facts = {
        "streaming": _run_facts(result.streaming),
        "pushdown": _run_facts(result.pushdown),
        "package_bytes": pushdown.stats.package_bytes,
        "max_loss_difference": result.max_loss_difference,
        "tolerance": result.tolerance,
        "cut": pushdown.job.cut,
    }
    write_json(options.json_path, facts)
    problem = ""
    if not result.curves_agree:
        problem = "the loss curves differ"
    elif num_fallbacks := pushdown.stats.fallbacks:
        problem = (
            f"the push-down run read {count_text(num_fallbacks, 'span')} raw, "
            "because the worker was not available"
        )
    if problem:
        typer.echo(f"hapi: {problem}", err=True)
        raise typer.Exit(1)


def _run_facts(run: TrainResult) -> dict[str, Any]:
    return {
        "bytes": run.stats.bytes,
        "seconds": run.history.seconds,
        "losses": run.history.losses,
        "accuracy": run.history.epochs[-1].accuracy,
        "fallbacks": run.stats.fallbacks,
    }


def _print(result: DemoResult) -> None:
    print_table(
        (
            *("", "cut", "over the wire", "seconds"),
            *("last batch's loss", "accuracy"),
        ),
        [
            (
                name,
                str(run.job.cut),
                bytes_text(run.stats.bytes),
                f"{run.history.seconds:.1f}",
                f"{run.history.losses[-1]:.6f}",
                f"{run.history.epochs[-1].accuracy:.3f}",
            )
            for name, run in (
                ("streaming", result.streaming),
                ("push-down", result.pushdown),
            )
        ],
    )
    for line in (
        compare_bytes(result),
        "Largest relative difference between the loss curves: "
        f"{result.max_loss_difference:.1e} (tolerance: "
        f"{result.tolerance:.1e})",
        "Compare bytes, not seconds: client and storage share this machine's "
        "cores.",
        "The weights were random (nothing was downloaded), so the accuracy is "
        "not meaningful.",
    ):
        typer.echo(line)


def compare_bytes(result: DemoResult) -> str:
    """Describes how many bytes push-down saves, and from which epoch."""
    streaming, pushdown = (
        run.stats.bytes for run in (result.streaming, result.pushdown)
    )
    package_bytes = result.pushdown.stats.package_bytes
    if pushdown >= streaming:
        return (
            f"Push-down moved {pushdown / max(1, streaming):.1f} times the "
            "bytes of streaming: features at this cut are larger than these "
            "images. Choose a later --freeze or --cut. The model package "
            f"added {bytes_text(package_bytes)} once."
        )
    ratio = streaming / max(1, pushdown)
    num_epochs = len(result.pushdown.history.epochs)
    saved_bytes = (streaming - pushdown) / num_epochs
    epochs = int(package_bytes / saved_bytes) + 1
    return (
        f"Push-down moved 1/{ratio:.1f} of the bytes, and "
        f"{bytes_text(package_bytes)} more for the model package, which is "
        "sent once: in total it moves less after "
        f"{count_text(epochs, 'epoch')}."
    )
