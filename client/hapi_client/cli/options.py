"""Options of commands as fields of dataclasses, and those that are shared."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
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

from hapi_client.cli.context import OUTPUT, GroupedJsonPath
from hapi_client.model.torchvision_names import classifier_names
from hapi_protocol.encodings import DTYPES, PRECISIONS
from hapi_splitter.units import count_text

if TYPE_CHECKING:
    from hapi_client.job.transfer_job import TransferJob

OptionsType = TypeVar("OptionsType")
Value = TypeVar("Value", str, float)

DATA, MODEL, TRAINING = "Data", "Model", "Training"
PUSH_DOWN, EXPERT = "Push-down", "Expert"
PANELS = (None, DATA, MODEL, TRAINING, PUSH_DOWN, OUTPUT, EXPERT)
"""Titles of the groups of options, in the order of --help."""


def option(
    help_text: str,
    default: Any = None,
    panel: str | None = None,
    *,
    names: tuple[str, ...] = (),
    **details: Any,
) -> Any:
    """Declares a field of a dataclass as an option of the command.

    Args:
        help_text: text for --help.
        default: default value; MISSING for a required option.
        panel: group in --help.
        names: names on the command line, if not that of the field.
        details: other arguments of :func:`typer.Option`.
    """
    declared = typer.Option(
        *names, help=help_text, rich_help_panel=panel, **details
    )
    return field(default=default, metadata={"typer": declared})


def argument(help_text: str, metavar: str, **details: Any) -> Any:
    """Declares a field of a dataclass as a required argument."""
    declared = typer.Argument(help=help_text, metavar=metavar, **details)
    return field(metadata={"typer": declared})


def command_with(
    options_type: type[OptionsType],
) -> Callable[
    [Callable[[typer.Context, OptionsType], None]], Callable[..., None]
]:
    """Makes a command from a function that takes its options as a dataclass.

    Args:
        options_type: dataclass whose fields are declared by :func:`option`
            and :func:`argument`, or annotated for typer.
    """
    keyword = inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(options_type, include_extras=True)
    parameters = []
    for option_field in fields(options_type):  # type: ignore[arg-type]
        hint, default = hints[option_field.name], option_field.default
        if "typer" in option_field.metadata:
            hint = Annotated[hint, option_field.metadata["typer"]]
        if default is MISSING:
            default = inspect.Parameter.empty
        parameters.append(
            inspect.Parameter(
                option_field.name, keyword, default=default, annotation=hint
            )
        )
    parameters.sort(key=_help_order)
    context = inspect.Parameter("context", keyword, annotation=typer.Context)

    def decorate(
        function: Callable[[typer.Context, OptionsType], None],
    ) -> Callable[..., None]:
        @functools.wraps(function)
        def command(context: typer.Context, **values: Any) -> None:
            function(context, options_type(**values))

        signature = inspect.Signature([context, *parameters])
        command.__signature__ = signature  # type: ignore[attr-defined]
        return command

    return decorate


def _help_order(parameter: inspect.Parameter) -> tuple[int, bool]:
    """Returns the position by panel; required options come first."""
    declared = parameter.annotation.__metadata__[0]
    is_optional = parameter.default is not inspect.Parameter.empty
    return PANELS.index(declared.rich_help_panel), is_optional


class Values(tuple[Any, ...]):
    """Values of an option, of which a sweep has several."""


def swept(
    help_text: str,
    default: Value,
    kind: Callable[[str], Value],
    *,
    names: tuple[str, ...] = (),
    metavar: str = "NUMBER",
    choices: tuple[str, ...] = (),
) -> Any:
    """Declares an option of one value, or of several for a sweep."""

    def parse(text: str | Values) -> Values:
        if isinstance(text, Values):  # the default
            return text
        try:
            values = Values(kind(part.strip()) for part in text.split(","))
        except ValueError as error:
            raise typer.BadParameter(
                f"{text!r} is no number, nor several separated by commas"
            ) from error
        for value in values:
            if choices and str(value) not in choices:
                raise typer.BadParameter(
                    f"{value!r} is none of {', '.join(choices)}"
                )
            if values.count(value) > 1:
                raise typer.BadParameter(f"{value} is given twice")
        return values

    return option(
        help_text,
        Values([default]),
        TRAINING,
        names=names,
        parser=parse,
        metavar=f"{metavar}[,…]",
        autocompletion=one_of(*choices) if choices else None,
    )


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Returns a function that completes to one of ``values``."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def complete_model(incomplete: str) -> list[str]:
    """Completes to the names of torchvision's classifiers."""
    return one_of(*classifier_names())(incomplete)


# Compressions are not completed: a shell ends a command at their semicolon.
complete_encoding = one_of(*DTYPES)

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
MODEL_HELP = (
    "Name of a model in torchvision.models; timm/NAME; OWNER/NAME of Hugging "
    "Face, or a folder that save_pretrained wrote; or MODULE:FUNCTION, which "
    "returns your own model (or a pair: frozen, tail)."
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of commands about one model."""

    model: str = option(
        MODEL_HELP, "resnet18", MODEL, autocompletion=complete_model
    )
    freeze: str | None = option(
        "Name of the last frozen module, or several names separated by "
        "commas. Default: all but the last linear layer. Layers without "
        "parameters after it (pooling, flatten) are frozen, too.",
        panel=MODEL,
    )
    weights: str | None = option(
        "Published weights to download (DEFAULT) with their image "
        "transform. Default: random weights.",
        panel=MODEL,
        autocompletion=one_of("DEFAULT"),
    )
    checkpoint: Path | None = option(
        "File with a state dict of the model.",
        panel=MODEL,
        exists=True,
        dir_okay=False,
    )
    json_path: GroupedJsonPath = None
    device: str = option(
        "Device of this machine: cpu, cuda, cuda:1.",
        "cpu",
        EXPERT,
        autocompletion=one_of("cpu", "cuda"),
    )
    min_precision: str = option(
        "Lowest precision a plan may use on the wire: lossless, half "
        "(16 bits) or uint8 (8 bits). An --encoding must satisfy it, too.",
        "lossless",
        EXPERT,
        autocompletion=one_of(*PRECISIONS),
    )


@dataclass(frozen=True, kw_only=True)
class JobOptions(ModelOptions):
    """Options of commands that read a whole data set."""

    data: str = option(
        "Data set in Swift with an index (see hapi index). The swift:// "
        "prefix is optional.",
        MISSING,
        DATA,
        metavar="CONTAINER[/PREFIX]",
    )
    image: ImageOption = None
    skip_bad_samples: bool = option(
        "Leave out samples that cannot be decoded, and count them. Without "
        "it, the first one is an error.",
        False,
        DATA,
    )
    exif: str | None = option(
        "Orientation in EXIF data: 'turn' images as people see them, or "
        "'ignore' it, as torchvision's ImageFolder does (default).",
        panel=DATA,
        metavar="ignore|turn",
    )
    precision: str | None = option(
        "In what the frozen layers compute, here and in Swift: float32 "
        "(default), bfloat16 or float16. bfloat16 halves their features.",
        panel=MODEL,
        autocompletion=one_of("float32", "bfloat16", "float16"),
        metavar="DTYPE",
    )
    cut: str = option(
        "Last layer that is computed in Swift: 'auto' plans it, 'freeze' "
        "pushes down the whole frozen region, 'stream' pushes down nothing; "
        "or the number of a cut.",
        "auto",
        PUSH_DOWN,
        autocompletion=one_of("auto", "freeze", "stream"),
    )
    encoding: str | None = option(
        "Encoding on the wire: float32, float16, bfloat16 or uint8, each "
        "optionally with ;lz4 or ;zstd. Default: chosen by the plan; the "
        "dtype of the features with a fixed cut.",
        panel=EXPERT,
        autocompletion=complete_encoding,
    )


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
