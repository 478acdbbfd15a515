"""Medians, ratios of paired rounds and their bootstrap intervals.

Every round measures each contender once, one after the other.  The ratio of
two contenders within one round is what a change of the machine's speed
disturbs least.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import bootstrap

CONFIDENCE = 0.95
RESAMPLES = 9999
SEED = 0

Rates = Mapping[str, Sequence[float]]
"""Samples per second of each contender, by round."""


def interval_of(
    values: Sequence[float], statistic: Callable[..., Any] = np.median
) -> tuple[float, float]:
    """95 % interval of a statistic, by bootstrap over two or more values."""
    interval = bootstrap(
        (values,),
        statistic,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        # BCa, the default, is undefined for the median of so few rounds.
        method="percentile",
        random_state=np.random.default_rng(SEED),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def summary(values: Sequence[float]) -> dict[str, Any]:
    """``median`` and its ``interval``."""
    return {
        "median": statistics.median(values),
        "interval": list(interval_of(values)),
    }


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Median of the rounds' ratios, and its 95 % interval."""
    return summary([a / b for a, b in zip(above, below, strict=True)])


def percents(parts: Sequence[float]) -> str:
    """Mean and range of parts of 1, such as accuracies."""
    low, high = 100 * min(parts), 100 * max(parts)
    return f"{100 * statistics.mean(parts):.1f} ({low:.1f} … {high:.1f})"


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: each contender begins in turn."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def fastest(rates: Rates, names: Sequence[str]) -> str:
    """The name with the highest median among those measured most often."""
    present = {name: rates[name] for name in names if rates.get(name)}
    most = max(map(len, present.values()))
    full = {name: runs for name, runs in present.items() if len(runs) == most}
    return max(full, key=lambda name: statistics.median(full[name]))


def rate_between(
    progress: Sequence[Sequence[tuple[float, float]]], begin: float, end: float
) -> float:
    """Sum of all processes' rates between two times.

    ``progress`` has (time, total so far) of each process.
    """
    total = 0.0
    for points in progress:
        first, last = np.interp([begin, end], *np.array(points).T)
        total += float(last - first)
    return total / (end - begin)
