"""Options that several commands share, with TAB completion of their values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    TypeAlias,
    TypeVar,
    get_type_hints,
)

import typer

from hapi_client.model.torchvision_names import classifier_names
from hapi_protocol.encodings import DTYPES, PRECISIONS
from hapi_splitter.units import count_text

if TYPE_CHECKING:
    from hapi_client.job.transfer_job import TransferJob

OptionsType = TypeVar("OptionsType")

# Titles of the groups of options in --help.
DATA, MODEL, TRAINING = "Data", "Model", "Training"
PUSH_DOWN, OUTPUT, EXPERT = "Push-down", "Output", "Expert"


def command_with(
    options_type: type[OptionsType],
) -> Callable[
    [Callable[[typer.Context, OptionsType], None]], Callable[..., None]
]:
    """Makes a command from a function that takes its options as a dataclass.

    Args:
        options_type: dataclass whose fields are annotated for typer.
    """

    def decorate(
        function: Callable[[typer.Context, OptionsType], None],
    ) -> Callable[..., None]:
        @functools.wraps(function)
        def command(context: typer.Context, **values: Any) -> None:
            function(context, options_type(**values))

        keyword = inspect.Parameter.KEYWORD_ONLY
        hints = get_type_hints(options_type, include_extras=True)
        parameters = [
            inspect.Parameter("context", keyword, annotation=typer.Context)
        ]
        for each in fields(options_type):  # type: ignore[arg-type]
            default = each.default
            if default is MISSING:
                default = inspect.Parameter.empty
            parameters.append(
                inspect.Parameter(
                    each.name,
                    keyword,
                    default=default,
                    annotation=hints[each.name],
                )
            )
        signature = inspect.Signature(parameters)
        command.__signature__ = signature  # type: ignore[attr-defined]
        return command

    return decorate


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Returns a function that completes to one of ``values``."""

    def complete(incomplete: str) -> list[str]:
        return [each for each in values if each.startswith(incomplete)]

    return complete


def complete_model(incomplete: str) -> list[str]:
    """Completes to the names of torchvision's classifiers."""
    return one_of(*classifier_names())(incomplete)


# Compressions are not completed: a shell ends a command at their semicolon.
complete_encoding = one_of(*DTYPES)

DataOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="CONTAINER[/PREFIX]",
        help="Data set in Swift with an index (see hapi index). The "
        "swift:// prefix is optional.",
        rich_help_panel=DATA,
    ),
]
SkipBadSamplesOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        help="Leave out samples that cannot be decoded, and count them. "
        "Without it, the first one is an error.",
        rich_help_panel=DATA,
    ),
]
TorchvisionModelOption: TypeAlias = Annotated[
    str,
    typer.Option(
        autocompletion=complete_model,
        help="Name of a model in torchvision.models.",
        rich_help_panel=MODEL,
    ),
]
MODEL_HELP = (
    "Name of a model in torchvision.models, or MODULE:FUNCTION, which returns "
    "your own model (or a pair: frozen, tail)."
)
ModelOption: TypeAlias = Annotated[
    str,
    typer.Option(
        autocompletion=complete_model,
        help=MODEL_HELP,
        rich_help_panel=MODEL,
    ),
]
LabelsOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="cls|json:FIELD|TABLE",
        help="Where labels come from: 'cls' for .cls members, 'json:FIELD' "
        "for a field of .json members (dots go deeper: "
        "json:annotation.class), or for loose objects a table next to them: "
        "labels.csv or labels.jsonl. If all are integers, they are the "
        "labels; else they are names of classes, numbered in sorted order. "
        "Default: as in the index, else 'cls', the folders of loose objects.",
        rich_help_panel=DATA,
    ),
]
ImageOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="EXTENSION",
        help="Extension of the member that is the image, such as 'jpg' or "
        "'left.jpg', if samples have several.",
        rich_help_panel=DATA,
    ),
]
ExifOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="ignore|turn",
        help="Orientation in EXIF data: 'turn' images as people see them, or "
        "'ignore' it, as torchvision's ImageFolder does (default).",
        rich_help_panel=DATA,
    ),
]
FreezeOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Name of the last frozen module, or several names separated by "
        "commas. Default: all but the last linear layer. Layers without "
        "parameters after it (pooling, flatten) are frozen, too.",
        rich_help_panel=MODEL,
    ),
]
WeightsOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        autocompletion=one_of("DEFAULT"),
        help="Published weights to download (DEFAULT) with their image "
        "transform. Default: random weights.",
        rich_help_panel=MODEL,
    ),
]
CheckpointOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="File with a state dict of the model.",
        rich_help_panel=MODEL,
    ),
]
CutOption: TypeAlias = Annotated[
    str,
    typer.Option(
        autocompletion=one_of("auto", "freeze", "stream"),
        help="Last layer that is computed in Swift: 'auto' plans it, "
        "'freeze' pushes down the whole frozen region, 'stream' pushes down "
        "nothing; or the number of a cut.",
        rich_help_panel=PUSH_DOWN,
    ),
]
MinPrecisionOption: TypeAlias = Annotated[
    str,
    typer.Option(
        autocompletion=one_of(*PRECISIONS),
        help="Lowest precision a plan may use on the wire: lossless, half "
        "(16 bits) or uint8 (8 bits). An --encoding must satisfy it, too.",
        rich_help_panel=EXPERT,
    ),
]
EncodingOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        autocompletion=complete_encoding,
        help="Encoding on the wire: float32, float16, bfloat16 or uint8, "
        "each optionally with ;lz4 or ;zstd. Default: chosen by the plan; "
        "the dtype of the features with a fixed cut.",
        rich_help_panel=EXPERT,
    ),
]
DeviceOption: TypeAlias = Annotated[
    str,
    typer.Option(
        autocompletion=one_of("cpu", "cuda"),
        help="Device of this machine: cpu, cuda, cuda:1.",
        rich_help_panel=EXPERT,
    ),
]


def parse_cut(cut: str) -> int | str:
    """Returns the number of a cut, or its name; the job checks names."""
    return int(cut) if cut.isdecimal() else cut


def describe_cut(job: TransferJob) -> str:
    """Returns a phrase such as "cut 3 of 12"."""
    if job.cut == "auto":
        return f"the plan chooses among {count_text(job.num_cuts, 'cut')}"
    if job.cut == 0:
        return "all samples are read raw"
    return f"cut {job.cut} of {job.num_cuts}"
