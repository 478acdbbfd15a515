"""The verdict on every cell, and what limits those that are missed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.suite.report.costs import Cores, costs_of
from benchmarks.suite.report.document import Table
from benchmarks.suite.report.figures import (
    NONE,
    GridCell,
    fixed,
    link_name,
    link_text,
    median_of,
    percent,
    range_text,
    rate_text,
    ratio_text,
    verdict,
)
from benchmarks.suite.verdict import GOAL

AUTO = "auto"
BUSY = 0.85
"""From here on it is what a contender waits for."""


def is_met(cell: GridCell) -> bool:
    """Whether ``auto`` reaches the goal."""
    return bool(cell["ratio"]["median"] >= GOAL)


def verdicts(cells: Sequence[GridCell]) -> Table:
    """A row for each complete cell."""
    return Table(
        (
            "Cell",
            "Link, MB/s",
            "auto, samples/s",
            "Best opponent, samples/s",
            "auto over it",
            "95 % interval",
            "Noise, interval",
            f"Goal {GOAL:g}",
        ),
        [_row(cell) for cell in cells],
    )


def _row(cell: GridCell) -> Sequence[str]:
    rates, best = cell["samples_per_second"], cell["best_external"]
    ratio, noise = cell["ratio"], cell.get("noise")
    return (
        f"``{cell['name']}``",
        link_text(cell["link_bytes_per_second"]),
        rate_text(rates[AUTO]),
        f"``{best}`` {rate_text(rates[best])}",
        fixed(ratio["median"], 3),
        range_text(ratio["interval"], 3),
        range_text(noise["interval"], 3) if noise else NONE,
        verdict(is_met(cell)),
    )


def rates_table(
    workload: str, cells: Sequence[GridCell], names: Sequence[str]
) -> Table:
    """Medians of every contender, and how many rounds it was in.

    Args:
        workload: network and freeze point.
        cells: of it, by their links.
        names: of the contenders.
    """
    rows = [
        (f"``{name}``", *(_contender(cell, name) for cell in cells))
        for name in names
    ]
    ratios = (ratio_text(cell.get("ratio_resized"), 3) for cell in cells)
    resized = ("resized: auto over stream", *ratios)
    return Table(
        (f"``{workload}``", *(link_name(cell) for cell in cells)),
        [*rows, resized],
    )


def _contender(cell: GridCell, name: str) -> str:
    windows = cell["rounds"].get(name)
    if not windows:
        return NONE
    rate = rate_text(median_of(windows, "samples_per_second"))
    size = median_of(windows, "down_bytes") / 1e3
    return f"{rate} ({len(windows)}; {size:.1f} kB)"


def limits(cells: Sequence[GridCell], cores: Cores) -> Iterator[str]:
    """Of each missed cell, what its own figures say."""
    for cell in cells:
        if is_met(cell):
            continue
        best = cell["best_external"]
        ratio = cell["ratio"]
        inside = ratio["interval"][1] >= GOAL
        yield (
            f"``{cell['name']}``: {ratio['median']:.3f} of ``{best}``"
            f" ({range_text(ratio['interval'], 3)}"
            f"{'; the interval reaches the goal' if inside else ''})."
            f" {busy_text(cell, AUTO, cores)} {busy_text(cell, best, cores)}"
            f" {_more_work(cell, best)} Plan: {cell.get('plan') or NONE}."
        )


def busy_text(cell: GridCell, name: str, cores: Cores) -> str:
    """What limits a contender, and how busy everything is."""
    found = costs_of(cell, name).busy(cores)
    first, part = next(iter(found.items()))
    shares = ", ".join(
        f"{what} {percent(each, 0)}" for what, each in found.items()
    )
    if part >= BUSY:
        return f"``{name}`` is limited by {first} (busy: {shares})."
    return (
        f"``{name}`` keeps nothing busy all the time, so that it waits"
        f" ({shares})."
    )


def _more_work(cell: GridCell, best: str) -> str:
    ours, theirs = costs_of(cell, AUTO), costs_of(cell, best)
    return (
        f"A sample of ``{AUTO}`` takes {1e3 * ours.client:.1f} ms of the"
        f" client's CPU and {1e3 * ours.storage:.1f} of the storage side's,"
        f" one of ``{best}`` {1e3 * theirs.client:.1f} and"
        f" {1e3 * theirs.storage:.1f}."
    )
