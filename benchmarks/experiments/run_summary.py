"""Figures of whole runs, by contender, over rounds and epochs.  No I/O.

Contenders whose later epochs are all alike run few of them.  A run of more
epochs than were measured takes what came before, the first epoch and the mean
of the later epochs for each further one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.ratios import fastest
from benchmarks.suite.contenders import AUTO, EXTERNALS, RESIZED, STREAM

CACHED = "freeze-cache"
AUTO_CACHED = "auto-cache"
AUTO_DISK = "auto-disk"
LOCAL_FEATURES = "local-features"
RIVALS = (*EXTERNALS, LOCAL_FEATURES)
"""Opponents that start with the same photographs.  One of them is the best;
resized photographs were prepared before the run."""

Run = Mapping[str, Any]
Runs = Mapping[str, Sequence[Run]]
"""Runs of each contender, by round: ``before`` and ``epochs``.  Rounds after
the first may lack contenders, or their later epochs."""


def auto_for(epochs: int) -> str:
    """Name of the ``auto`` that plans for so many epochs, and runs them."""
    return f"{AUTO}-{epochs}"


def total_seconds(run: Run, epochs: int) -> float:
    """Seconds from the start to the end of an epoch, measured or derived."""
    first, *later = (float(epoch["seconds"]) for epoch in run["epochs"])
    further = (
        sum(later[: epochs - 1])
        if epochs <= 1 + len(later)
        else (epochs - 1) * statistics.mean(later)
    )
    return float(run["before"]["seconds"]) + first + further


def totals(runs: Runs, name: str, epochs: int) -> list[float]:
    """Seconds of whole runs, of the rounds that measured enough."""
    return [
        total_seconds(run, epochs)
        for run in runs[name]
        if epochs == 1 or len(run["epochs"]) > 1
    ]


def best_opponent(runs: Runs, epochs: int) -> str:
    """The fastest of :data:`RIVALS` in runs of so many epochs."""
    rates = {
        name: [epochs / total for total in totals(runs, name, epochs)]
        for name in RIVALS
        if name in runs
    }
    return fastest(rates, list(rates))


def repeated(runs: Runs, counts: Sequence[int]) -> dict[str, int]:
    """Epochs of each contender in the rounds after the first.

    Only what the ratios need: the best opponent of each number of epochs, the
    first epoch of streaming, and all other runs of HAPI.
    """
    needed = {STREAM: 1, AUTO_CACHED: 0, RESIZED: 0} | dict.fromkeys(RIVALS, 0)
    for count in sorted(counts):
        needed[best_opponent(runs, count)] = count
    measured = {name: len(run[0]["epochs"]) for name, run in runs.items()}
    return {
        name: min(epochs, needed.get(name, epochs))
        for name, epochs in measured.items()
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """``median`` of the rounds and their range, ``interval``."""
    return {
        "median": statistics.median(values),
        "interval": [min(values), max(values)],
    }


def ratios(above: Iterable[float], below: Iterable[float]) -> dict[str, Any]:
    """Spread of the ratios in the rounds that have both."""
    return spread([a / b for a, b in zip(above, below, strict=False)])


def summarise(runs: Runs, counts: Sequence[int]) -> dict[str, Any]:
    """Figures of a cell.

    Args:
        runs: with :func:`auto_for` each of the counts.
        counts: numbers of epochs of a whole run.

    Returns:
        ``epochs``: ratios of whole runs by number of epochs;
        ``later_over_stream_first``: later epochs' speed over that of the
        first epoch of streaming, by tier of the cache; ``cumulative``: median
        seconds from the start to the end of each epoch.
    """
    longest = auto_for(max(counts))
    cumulative = {
        name: {
            "seconds": [
                statistics.median(totals(runs, name, count))
                for count in range(1, _known(runs, name, max(counts)) + 1)
            ]
        }
        for name in runs
    }
    return {
        "epochs": {str(count): _whole_runs(runs, count) for count in counts},
        "later_over_stream_first": _later(
            runs, {"memory": longest, "disk": AUTO_DISK, "store": CACHED}
        ),
        "cumulative": {**cumulative, AUTO: cumulative[longest]},
    }


def _known(runs: Runs, name: str, most: int) -> int:
    """Epochs to which totals of a contender can be given."""
    measured = len(runs[name][0]["epochs"])
    return measured if name.startswith(f"{AUTO}-") else most


def _whole_runs(runs: Runs, epochs: int) -> dict[str, Any]:
    """``auto`` over the best opponent, and ``over`` each."""
    ours = totals(runs, auto_for(epochs), epochs)
    over = {
        name: ratios(ours, totals(runs, name, epochs))
        for name in (*RIVALS, RESIZED, STREAM)
        if name in runs
    }
    best = best_opponent(runs, epochs)
    return {
        "auto_over_best": over[best]["median"],
        "interval": over[best]["interval"],
        "best": best,
        "over": over,
    }


def _later(runs: Runs, tiers: Mapping[str, str]) -> dict[str, Any]:
    """Speed of later epochs over that of the first epoch of streaming."""
    first = [float(x["epochs"][0]["seconds"]) for x in runs.get(STREAM, ())]
    return {
        tier: ratios(first, map(_later_seconds, runs[name]))
        for tier, name in tiers.items()
        if first and name in runs
    }


def _later_seconds(run: Run) -> float:
    return statistics.median(float(x["seconds"]) for x in run["epochs"][1:])
