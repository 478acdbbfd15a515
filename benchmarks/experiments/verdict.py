"""Conclusions from the rounds of a grid cell.  No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.ratios import Rates, fastest, ratio
from benchmarks.suite.contenders import AUTO, EXTERNALS, FREEZE, STREAM

AGAIN = "again"
"""Second epoch of the best opponent in each round: the noise."""

GOAL = 0.97
IN_REACH_RATIO = 0.85
"""Opponents slower than this fraction of the best one are measured only once,
as are our fixed cuts that are slower than this fraction of ``auto``."""
MAX_OPPONENTS, MAX_SLOW_OPPONENTS = 2, 1
"""Number of opponents after the first round; on a slow link all run at the
link's rate."""


def rates_of(epochs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Samples per second of each epoch."""
    return [epoch["samples_per_second"] for epoch in epochs]


def in_reach(rates: Rates, max_opponents: int = MAX_OPPONENTS) -> list[str]:
    """Contenders to measure again, by their rates in the first round."""
    first = {name: statistics.median(values) for name, values in rates.items()}
    opponents = sorted(
        (name for name in first if name in EXTERNALS),
        key=lambda name: -first[name],
    )
    minimum = {
        **dict.fromkeys(opponents, IN_REACH_RATIO * first[opponents[0]]),
        **dict.fromkeys((STREAM, FREEZE), IN_REACH_RATIO * first[AUTO]),
    }
    out = opponents[max_opponents:]
    return [
        name
        for name, rate in first.items()
        if name not in out and rate >= minimum.get(name, 0.0)
    ]


def judge(entry: dict[str, Any]) -> None:
    """Adds medians, ratio and the first round's best opponent's noise."""
    rates = {name: rates_of(trial) for name, trial in entry["rounds"].items()}
    again = rates.pop(AGAIN)
    once = rates[entry["again"]][-len(again) :]
    entry["samples_per_second"] = {
        name: statistics.median(values) for name, values in rates.items()
    }
    best = fastest(rates, EXTERNALS)
    entry["best_external"] = best
    entry["ratio"] = ratio(rates[AUTO], rates[best])
    entry["noise"] = ratio(again, once)
