"""How far the planned contender stays behind the best static one (pure).

Every round measures each contender once, one after the other, so the ratio
of two contenders of one round is what a change of the machine's speed
disturbs least.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import bootstrap

STREAM = "stream"
AUTO = "auto"
CONFIDENCE = 0.95
RESAMPLES = 9999
MAX_REGRET = 0.05
MAX_REGRET_AGAINST_STREAM = 0.02
SEED = 0

Rounds = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Regret:
    """1 - median of a contender's paired ratios to another.

    Attributes:
        regret: 0.03 is three per cent slower, -0.03 faster.
        interval: of the regret, 95 %, by bootstrap over the rounds.
    """

    regret: float
    interval: tuple[float, float]


def regret_of(rates: Sequence[float], other: Sequence[float]) -> Regret:
    """Regret of ``rates`` against ``other``, samples per second by round.

    Raises:
        ValueError: for fewer than two rounds, or unequal numbers of them.
    """
    if len(rates) < 2 or len(rates) != len(other):
        raise ValueError(
            f"{len(rates)} rounds against {len(other)}; two or more, and"
            " equally many, are needed"
        )
    ratios = np.array(rates) / np.array(other)
    low, high = interval_of(ratios, np.median)
    return Regret(float(1 - np.median(ratios)), (1 - high, 1 - low))


def interval_of(
    values: Sequence[float], statistic: Callable[..., Any]
) -> tuple[float, float]:
    """Of a statistic, 95 %, by bootstrap over two or more values."""
    found = bootstrap(
        (values,),
        statistic,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        # BCa, the default, is undefined for the median of so few rounds.
        method="percentile",
        random_state=np.random.default_rng(SEED),
    ).confidence_interval
    return float(found.low), float(found.high)


def medians(rounds: Rounds) -> dict[str, float]:
    """Median samples per second of each contender."""
    return {
        name: statistics.median(rates)
        for name, rates in rounds.items()
        if rates
    }


def best_static(rounds: Rounds, statics: Sequence[str]) -> str:
    """The static contender of the highest median.

    Only those count that were measured in every round.

    Args:
        rounds: samples per second.
        statics: names that may be chosen; not all need be in ``rounds``.
    """
    most = max(len(rounds.get(name, ())) for name in statics)
    full = {
        name: rounds[name]
        for name in statics
        if len(rounds.get(name, ())) == most
    }
    found = medians(full)
    return max(found, key=lambda name: found[name])


@dataclass(frozen=True)
class Verdict:
    """How ``auto`` did in one cell.

    Attributes:
        best: the best static contender, ``stream`` included.
        against_best: regret against it.
        against_stream: regret against streaming.
        missed: worse by more than is allowed, beyond noise.
        above_best_static: better than every static one, beyond noise.
    """

    best: str
    against_best: Regret
    against_stream: Regret
    missed: bool
    above_best_static: bool


def judge(rounds: Rounds, statics: Sequence[str]) -> Verdict | None:
    """The verdict on ``auto``; None when it was not measured."""
    if len(rounds.get(AUTO, ())) < 2:
        return None
    best = best_static(rounds, statics)
    against_best = regret_of(rounds[AUTO], rounds[best])
    streamed = rounds[STREAM]
    against_stream = regret_of(rounds[AUTO][: len(streamed)], streamed)
    return Verdict(
        best,
        against_best,
        against_stream,
        missed=against_best.interval[0] > MAX_REGRET
        or against_stream.interval[0] > MAX_REGRET_AGAINST_STREAM,
        above_best_static=against_best.interval[1] < 0,
    )
