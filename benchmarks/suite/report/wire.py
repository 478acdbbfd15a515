"""Section ``bytes``: a sample on the wire, by boundary and encoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.suite.contenders import TAR_STREAM
from benchmarks.suite.report.document import (
    Block,
    Part,
    Picture,
    Table,
    Text,
)
from benchmarks.suite.report.figures import (
    GridCell,
    complete_cells,
    fixed,
    median_of,
    percent,
    verdict,
)
from benchmarks.suite.report.looks import (
    dress,
    legend_below,
    log_numbers,
    new_figure,
)
from benchmarks.suite.verdict import FLOAT16
from matplotlib.axes import Axes

Section = Mapping[str, Any]

_TEXT = """\
Mean bytes of a sample on the wire, of {samples} photographs of
{jpeg:.1f} kB (JPEG; {tar:.1f} kB in a tar), through the encoder and the stream
writer of a worker; what HTTP adds does not count. Weights are {weights}:
compression depends on the values, what is not compressed does not."""
_INTERFACE = """\
What the client's interface received for a sample in whole epochs, headers of
TCP and HTTP included, with all frozen layers next to the data and features
as float16:"""
_COLOURS = ("#d55e00", "#0072b2", "#cc79a7", "#009e73", "#56b4e9", "#444444")
_SHOWN = {"": "-", "zstd": "--"}
"""Compressions that the picture has, the table has all; and their lines."""
_HEIGHT_INCHES = 4.2
_LONGEST = 16


def wire_part(section: Section, grid: Section | None) -> Part:
    """A picture and a table for each network, and the goals.

    Args:
        section: what benchmarks.wire_bytes counted.
        grid: the section of epoch 1, for what an interface counted; None
            without.
    """
    text = _TEXT.format(
        samples=section["samples"],
        jpeg=section["jpeg_bytes"] / 1e3,
        tar=section["tar_bytes"] / 1e3,
        weights=section["weights"],
    )
    blocks: list[Block] = [Text(" ".join(text.split()))]
    if section["goals"]:
        blocks.append(_goals(section["goals"]))
    blocks += _interface(complete_cells(grid or {}))
    for name, network in section["networks"].items():
        blocks += _network(name, network, section["jpeg_bytes"])
    return Part("Bytes of a sample", blocks)


def _interface(cells: Sequence[GridCell]) -> Iterator[Block]:
    """Epochs of float16 features, beside those of photographs."""
    rows = [
        (
            f"``{cell['name']}``",
            *(
                fixed(median_of(cell["rounds"][name], "down_bytes") / 1e3)
                for name in (FLOAT16, TAR_STREAM)
            ),
            fixed(
                median_of(cell["rounds"][TAR_STREAM], "down_bytes")
                / median_of(cell["rounds"][FLOAT16], "down_bytes")
            ),
        )
        for cell in cells
        if FLOAT16 in cell["rounds"]
    ]
    if rows:
        yield Text(_INTERFACE)
        yield Table(
            (
                "Cell",
                f"``{FLOAT16}``, kB",
                f"``{TAR_STREAM}``, kB",
                "Times fewer",
            ),
            rows,
        )


def _goals(goals: Sequence[Section]) -> Table:
    return Table(
        (
            "Network",
            "Boundary",
            "Encoding",
            "What the bytes are",
            "JPEG over it",
            "Goal",
            "Verdict",
        ),
        [
            (
                f"``{goal['network']}``",
                f"``{goal['boundary']}``",
                f"``{goal['encoding']}``",
                goal["why"],
                fixed(goal["ratio"]),
                fixed(goal["least_ratio"]),
                verdict(goal["met"]),
            )
            for goal in goals
        ],
        words=4,
    )


def _network(
    name: str, network: Section, jpeg_bytes: float
) -> Iterator[Block]:
    boundaries = network["boundaries"]
    if not boundaries:
        return
    yield _picture(name, boundaries, jpeg_bytes)
    encodings = list(boundaries[0]["bytes"])
    frozen = {at: kind for kind, at in network["freezes"].items()}
    yield Table(
        (
            f"``{name}``, kB up to",
            "Freeze point",
            "Zeros",
            *(f"``{each}``" for each in encodings),
        ),
        [
            (
                f"``{boundary['name']}``",
                frozen.get(boundary["name"], ""),
                percent(boundary["zeros"], 0),
                *(fixed(boundary["bytes"][e] / 1e3) for e in encodings),
            )
            for boundary in boundaries
        ],
        words=2,
    )


def _picture(
    name: str, boundaries: Sequence[Section], jpeg_bytes: float
) -> Picture:
    figure, (axes,) = new_figure(_HEIGHT_INCHES)
    _draw(axes, boundaries)
    axes.axhline(jpeg_bytes / 1e3, color="black", linewidth=1.2, label="JPEG")
    axes.set_xticks(
        range(len(boundaries)),
        [_short(each["name"]) for each in boundaries],
        rotation=35,
        ha="right",
    )
    dress(axes, name, "features behind", "kB per sample (log)")
    log_numbers(axes)
    legend_below(figure, [axes], 6)
    return Picture(
        f"bytes-{name.replace('_', '-')}",
        figure,
        f"{name}: bytes of a sample behind each boundary, by encoding, beside"
        " those of a JPEG",
    )


def _short(name: str) -> str:
    """Its last part, where all of it has no room."""
    return name if len(name) <= _LONGEST else name.rpartition(".")[2]


def _draw(axes: Axes, boundaries: Sequence[Section]) -> None:
    dtypes: list[str] = []
    for encoding in boundaries[0]["bytes"]:
        dtype, _, compression = encoding.partition(";")
        if compression not in _SHOWN:
            continue
        if dtype not in dtypes:
            dtypes.append(dtype)
        axes.plot(
            range(len(boundaries)),
            [each["bytes"][encoding] / 1e3 for each in boundaries],
            _SHOWN[compression],
            marker=".",
            color=_COLOURS[dtypes.index(dtype) % len(_COLOURS)],
            linewidth=1.3,
            label=encoding,
        )
