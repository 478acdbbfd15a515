"""Section ``regret``: the plan beside every fixed cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.regret import MAX_REGRET
from benchmarks.suite.report.document import (
    Block,
    Part,
    Picture,
    Table,
    Text,
)
from benchmarks.suite.report.figures import (
    NONE,
    GridCell,
    complete_cells,
    link_text,
    percent,
    percent_range,
    rate_text,
)
from benchmarks.suite.report.looks import LOOKS, dress, new_figure

_TEXT = """\
Regret is by how much ``auto`` stays behind the best fixed choice, streaming
and every fixed cut included: 1 - the median over the rounds of its rate over
theirs. Negative, it is ahead, which a mix of cuts can be. A cell is missed
when the whole 95 % interval lies above 5 %, or above 2 % against streaming.
Noise is the regret of one contender against itself. ``hapi-2022`` and
``hapi-sc24`` are the cuts that two published rules choose. Every fixed cut
is every one that its profile does not rule out for that link, in its best
encoding. The link is a multiple of what saturates our own streaming, and
epochs are shorter than those of epoch 1."""
_PAGE = (
    "``docs/benchmarks.rst`` describes the method; figures of another machine"
    " and an earlier version are in ``docs/results.rst``."
)
_RULES = ("hapi-2022", "hapi-sc24")
_ROW_INCHES = 0.32


def regret_part(section: Mapping[str, Any]) -> Part:
    """Picture and table of the cells in ``body``."""
    cells = [
        cell
        for cell in complete_cells(section.get("body", {}))
        if cell.get("regret") is not None
    ]
    blocks: list[Block] = [Text(f"{_TEXT} {_PAGE}")]
    if cells:
        blocks += [_picture(cells), _table(cells)]
    else:
        blocks.append(Text("No cell was measured to its end."))
    return Part("The plan beside every fixed cut", blocks)


def _table(cells: Sequence[GridCell]) -> Table:
    return Table(
        (
            "Cell",
            "Best fixed",
            "Link, MB/s",
            "auto, samples/s",
            "Best fixed, samples/s",
            *_RULES,
            "Regret",
            "95 % interval",
            "Noise",
            "Verdict",
        ),
        [_row(cell) for cell in cells],
        words=2,
    )


def _row(cell: GridCell) -> Sequence[str]:
    rates, best = cell["samples_per_second"], cell["best_static"]
    noise = cell.get("noise")
    return (
        f"``{cell['name']}``",
        best,
        link_text(cell["link_bytes_per_second"]),
        rate_text(rates["auto"]),
        rate_text(rates[best]),
        *(rate_text(rates.get(rule)) for rule in _RULES),
        percent(cell["regret"]),
        percent_range(cell["interval"]),
        percent(noise["regret"]) if noise else NONE,
        _verdict(cell),
    )


def _verdict(cell: GridCell) -> str:
    if cell["missed"]:
        return "missed"
    return "above" if cell["above_best_static"] else "not missed"


def _picture(cells: Sequence[GridCell]) -> Picture:
    figure, (axes,) = new_figure(1.2 + _ROW_INCHES * len(cells))
    look = LOOKS["auto"]
    places = range(len(cells))
    axes.hlines(
        places,
        [100 * cell["interval"][0] for cell in cells],
        [100 * cell["interval"][1] for cell in cells],
        color=look.colour,
        linewidth=2,
    )
    axes.plot(
        [100 * cell["regret"] for cell in cells],
        places,
        look.marker,
        color=look.colour,
    )
    axes.axvline(0, color="#57606a", linewidth=1)
    axes.axvline(100 * MAX_REGRET, color="#57606a", linestyle=":")
    axes.annotate(
        " most that is allowed",
        (100 * MAX_REGRET, -0.8),
        fontsize=8,
        color="#57606a",
        va="center",
    )
    axes.set_yticks(places, [cell["name"] for cell in cells])
    axes.set_ylim(len(cells) - 0.5, -1.2)
    dress(
        axes,
        "Behind the best fixed choice; to the left of 0, ahead of it",
        "regret, %",
        "",
    )
    return Picture(
        "regret",
        figure,
        "Regret of auto against the best fixed choice, with its interval, in"
        " each cell",
    )
