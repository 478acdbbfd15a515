"""What a cell's rounds say (pure)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from benchmarks.regret import AUTO, STREAM, interval_of
from benchmarks.suite.contenders import EXTERNALS, RESIZED

AGAIN = "again"
"""The second pass of the best opponent in each round: the noise floor."""
AUTO_RESIZED = "auto-resized"
FREEZE_ALL = "freeze"
FLOAT16 = "freeze-float16"
"""Features rounded to float16, for their bytes; in the first round only."""

GOAL = 0.97
OUT_OF_REACH = 0.85
"""An opponent slower than this part of the best one, in the first round, is
not measured again; nor is, of ours, a fixed cut so much slower than auto."""
CHOOSING_ROUNDS = 1
"""After which it is chosen who goes on."""
MAX_OPPONENTS, MAX_SLOW = 2, 1
"""That go on, the best ones; on a slow link they all go at the link's rate,
within a few per cent."""

Rates = Mapping[str, Sequence[float]]


def rates_of(passes: Sequence[Mapping[str, Any]]) -> list[float]:
    """Samples per second of each."""
    return [each["samples_per_second"] for each in passes]


def best_external(rates: Rates) -> str:
    """Of those measured most often, the one of the highest median."""
    there = {name: rates[name] for name in EXTERNALS if name in rates}
    most = max(map(len, there.values()))
    full = {n: each for n, each in there.items() if len(each) == most}
    return max(full, key=lambda name: statistics.median(full[name]))


def in_reach(rates: Rates, most: int = MAX_OPPONENTS) -> list[str]:
    """Who is measured again after the first round, by what was seen there.

    Opponents near the best one, ``most`` of them, ``auto``, what reads
    resized photographs, and of ours the fixed ones that are near ``auto``.
    """
    first = {name: statistics.median(each) for name, each in rates.items()}
    opponents = sorted(
        (name for name in first if name in EXTERNALS),
        key=lambda name: -first[name],
    )
    least = {
        **dict.fromkeys(opponents, OUT_OF_REACH * first[opponents[0]]),
        **dict.fromkeys((STREAM, FREEZE_ALL), OUT_OF_REACH * first[AUTO]),
        FLOAT16: math.inf,
    }
    out = opponents[most:]
    return [
        name
        for name, rate in first.items()
        if name not in out and rate >= least.get(name, 0.0)
    ]


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Median of the rounds' ratios, and its 95 % interval."""
    values = [a / b for a, b in zip(above, below, strict=True)]
    return {
        "median": statistics.median(values),
        "interval": list(interval_of(values, np.median)),
    }


def judge(entry: dict[str, Any]) -> None:
    """Completes a cell's entry with what follows from its rounds.

    The noise is that of the opponent that seemed the best when it was chosen
    who goes on; in the end another one may be.
    """
    rates = {name: rates_of(each) for name, each in entry["rounds"].items()}
    again = rates.pop(AGAIN)
    once = rates[entry["again"]][-len(again) :]
    entry["samples_per_second"] = {
        name: statistics.median(each) for name, each in rates.items()
    }
    best = best_external(rates)
    entry["best_external"] = best
    entry["ratio"] = ratio(rates[AUTO], rates[best])
    entry["noise"] = ratio(again, once)
    entry["ratio_resized"] = None
    if RESIZED in rates and AUTO_RESIZED in rates:
        entry["ratio_resized"] = ratio(rates[AUTO_RESIZED], rates[RESIZED])
