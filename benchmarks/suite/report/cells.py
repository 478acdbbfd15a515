"""The verdict on every cell, and what limits those that are missed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.suite.report.costs import Cores, costs_of
from benchmarks.suite.report.document import Table
from benchmarks.suite.report.figures import (
    NONE,
    GridCell,
    fixed,
    link_text,
    median_of,
    percent,
    range_text,
    rate_text,
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
            "Best opponent",
            "Link, MB/s",
            "auto, samples/s",
            "Opponent, samples/s",
            "auto over it",
            "95 % interval",
            "Noise, interval",
            "Resized beforehand",
            f"Goal {GOAL:g}",
        ),
        [_row(cell) for cell in cells],
        words=2,
    )


def _row(cell: GridCell) -> Sequence[str]:
    rates, best = cell["samples_per_second"], cell["best_external"]
    ratio, noise = cell["ratio"], cell.get("noise")
    return (
        f"``{cell['name']}``",
        f"``{best}``",
        link_text(cell["link_bytes_per_second"]),
        rate_text(rates[AUTO]),
        rate_text(rates[best]),
        fixed(ratio["median"], 3),
        range_text(ratio["interval"], 3),
        range_text(noise["interval"], 3) if noise else NONE,
        _resized(cell),
        verdict(is_met(cell)),
    )


def _resized(cell: GridCell) -> str:
    found = cell.get("ratio_resized")
    return fixed(found["median"], 3) if found else NONE


def rates_table(cells: Sequence[GridCell], names: Sequence[str]) -> Table:
    """Medians of every contender, and how many rounds it was in."""

    def text(cell: GridCell, name: str) -> str:
        windows = cell["rounds"].get(name)
        if not windows:
            return NONE
        rate = rate_text(median_of(windows, "samples_per_second"))
        size = median_of(windows, "down_bytes") / 1e3
        return f"{rate} ({len(windows)}; {size:.1f} kB)"

    return Table(
        ("Cell", *(f"``{name}``" for name in names)),
        [
            (f"``{cell['name']}``", *(text(cell, name) for name in names))
            for cell in cells
        ],
    )


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
            f" {_busy(cell, AUTO, cores)} {_busy(cell, best, cores)}"
            f" {_more_work(cell, best)} Plan: {cell.get('plan') or NONE}."
        )


def _busy(cell: GridCell, name: str, cores: Cores) -> str:
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
