"""Figures of whole runs, by contender, over rounds and epochs.  No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from benchmarks.ratios import median_and_range
from benchmarks.suite.contenders import AUTO, EXTERNALS, STREAM

AUTO_ONCE = "auto-1"
"""``auto`` that plans for one epoch and runs one."""
CACHED = "freeze-cache"
AUTO_CACHED = "auto-cache"
LOCAL_FEATURES = "local-features"

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Runs of each contender, by round: ``before`` and ``epochs``."""


def first_seconds(run: Mapping[str, Any]) -> float:
    """Seconds of the first epoch."""
    return float(run["epochs"][0]["seconds"])


def later_seconds(run: Mapping[str, Any]) -> float:
    """Median seconds of the epochs after the first one."""
    return statistics.median(float(x["seconds"]) for x in run["epochs"][1:])


def cumulative(run: Mapping[str, Any]) -> list[float]:
    """Seconds from the start to the end of each epoch."""
    before = float(run["before"]["seconds"])
    seconds = (each["seconds"] for each in run["epochs"])
    return [before + total for total in accumulate(seconds)]


def total_seconds(runs: Runs, name: str, epochs: int) -> list[float]:
    """Seconds of whole runs, by round.

    Only ``auto`` plans differently for another number of epochs.
    """
    if name == AUTO and epochs == 1:
        name = AUTO_ONCE
    return [cumulative(run)[epochs - 1] for run in runs[name]]


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Median and range of the rounds' ratios."""
    return median_and_range([a / b for a, b in zip(above, below, strict=True)])


def summarise(runs: Runs) -> dict[str, Any]:
    """Figures of a cell.

    ``speedup`` is that of later epochs over first epochs of streaming and of
    the best opponent; ratios of whole runs are by number of epochs.
    """
    first = {name: list(map(first_seconds, runs[name])) for name in runs}
    best = min(
        (name for name in runs if name in EXTERNALS),
        key=lambda name: statistics.median(first[name]),
    )
    epochs = max(len(each["epochs"]) for run in runs.values() for each in run)
    later = {
        name: list(map(later_seconds, each))
        for name, each in runs.items()
        if name != AUTO_ONCE
    }
    return {
        "best_first": best,
        "first_seconds": {n: median_and_range(x) for n, x in first.items()},
        "later_seconds": {n: median_and_range(x) for n, x in later.items()},
        "speedup": {
            name: {
                other: ratios(first[other], later[name])
                for other in (STREAM, best)
            }
            for name in (CACHED, AUTO_CACHED, AUTO)
            if name in later
        },
        "cumulative": {
            name: {
                "seconds": [
                    statistics.median(each)
                    for each in zip(*map(cumulative, of_rounds), strict=True)
                ]
            }
            for name, of_rounds in runs.items()
        },
        "auto_over_stream": {
            str(count): ratios(
                total_seconds(runs, AUTO, count),
                total_seconds(runs, STREAM, count),
            )
            for count in (1, epochs)
        },
        "auto_over_best": {
            str(count): _over_best(runs, count) for count in (1, epochs)
        },
    }


def _over_best(runs: Runs, epochs: int) -> dict[str, Any]:
    """Whole runs of ``auto`` over those of the fastest opponent.

    All opponents start with the same tars; startup costs do not count.
    """
    totals = {
        name: total_seconds(runs, name, epochs)
        for name in runs
        if name in EXTERNALS
    }
    best = min(totals, key=lambda name: statistics.median(totals[name]))
    ours = total_seconds(runs, AUTO, epochs)
    return {"best": best, **ratios(ours, totals[best])}
