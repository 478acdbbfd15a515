"""Section ``grid``: epoch 1, cell by cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.suite.report.cells import (
    is_met,
    limits,
    rates_table,
    verdicts,
)
from benchmarks.suite.report.costs import Cores, where
from benchmarks.suite.report.curves import curves, names_of
from benchmarks.suite.report.document import Block, Listing, Part, Table, Text
from benchmarks.suite.report.figures import GridCell, complete_cells
from benchmarks.suite.report.settings import absent_blocks, settings_parts

_CELLS = """\
A cell is a network, a freeze point and a link, as a multiple of the byte rate
at which a stream of the tar shards keeps the client busy. ``auto over it`` is
the median over the rounds of auto's rate over that of the fastest opponent
that reads the same photographs, with its 95 % interval by bootstrap. Noise is
that opponent over itself, measured twice in each round: no smaller difference
says anything."""
_CURVES = """\
Medians of the rounds; a line goes from the slowest round to the fastest. A
contender that was far behind after the first round has only that one."""
_RATES = """\
Samples per second, median, and in parentheses in how many rounds it was, and
the bytes received for one sample, headers included. The last row is
``auto-resized`` over ``tar-stream-resized``, which read photographs that
somebody had resized before they were stored: median and interval."""
_TIME = """\
What one sample takes of each tier's CPU, CPU seconds over the number of its
cores, and of the link. These overlap: the
black mark is the time between two samples, and a part as wide as that limits
the contender. Link seconds are bytes over the link's rate."""


def grid_part(section: Mapping[str, Any], cores: Cores) -> Part:
    """All of it.

    Args:
        section: of the results.
        cores: of both tiers.
    """
    cells = complete_cells(section)
    return Part(
        "Epoch 1 beside what people use",
        [
            Text(_CELLS),
            *_verdicts(cells, cores),
            *absent_blocks(section),
        ],
        [
            *_workloads(cells, cores),
            Part("All contenders", [Text(_RATES), *_rates(cells)]),
            *settings_parts(section, "Settings of the opponents"),
        ],
    )


def _verdicts(cells: Sequence[GridCell], cores: Cores) -> Iterator[Block]:
    if not cells:
        yield Text("No cell was measured to its end.")
        return
    missed = [cell for cell in cells if not is_met(cell)]
    yield Text(f"Missed: {len(missed)} of {len(cells)} cells.")
    yield verdicts(cells)
    if missed:
        yield Text("What the figures of the missed ones say:")
        yield Listing(list(limits(cells, cores)))


def by_workload(cells: Sequence[GridCell]) -> dict[str, list[GridCell]]:
    """Cells of each network and freeze point, by their links."""
    found: dict[str, list[GridCell]] = {}
    for cell in cells:
        found.setdefault(f"{cell['model']}/{cell['freeze']}", []).append(cell)
    return {
        name: sorted(each, key=lambda cell: cell["link"] or 0.0)
        for name, each in found.items()
    }


def _workloads(cells: Sequence[GridCell], cores: Cores) -> Iterator[Part]:
    for number, (name, each) in enumerate(by_workload(cells).items()):
        notes = [] if number else [Text(_CURVES)]
        time = [] if number else [Text(_TIME)]
        yield Part(
            f"``{name}``",
            [*notes, curves(name, each), *time, where(name, each, cores)],
        )


def _rates(cells: Sequence[GridCell]) -> Iterator[Table]:
    for name, each in by_workload(cells).items():
        yield rates_table(name, each, names_of(each))
