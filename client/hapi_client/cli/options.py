"""Options that several commands have: which model, and what the store does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from hapi_client.cli import completion
from hapi_splitter.units import count_text

if TYPE_CHECKING:
    from hapi_client.job.transfer_job import TransferJob

CheckpointOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="A state dict of the model."
    ),
]
CutOption: TypeAlias = Annotated[
    str,
    typer.Option(
        autocompletion=completion.cuts,
        help="How much the store computes: 'auto' plans it, 'freeze' "
        "for the whole frozen region, 'stream' for nothing, or a number.",
    ),
]
FloorOption: TypeAlias = Annotated[
    str,
    typer.Option(
        autocompletion=completion.floors,
        help="What a plan may round on the wire: lossless (nothing), half "
        "(to 16 bits), uint8 (to 8); beside an --encoding it has to allow "
        "that.",
    ),
]
EncodingOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        autocompletion=completion.encodings,
        help="On the wire: float32, float16, bfloat16 or uint8, each "
        "also with ;lz4 or ;zstd. Left to the plan if absent; float32 "
        "with a fixed cut.",
    ),
]


def cut_value(cut: str) -> int | str:
    """A cut of the command line; names are judged by the job."""
    return int(cut) if cut.isdecimal() else cut


def what_is_cut(job: TransferJob) -> str:
    """What the store computes, as the end of a line."""
    if job.cut == "auto":
        return f"the plan chooses among {count_text(job.num_cuts, 'cut')}"
    if job.cut == 0:
        return "all streamed"
    return f"cut {job.cut} of {job.num_cuts}"
