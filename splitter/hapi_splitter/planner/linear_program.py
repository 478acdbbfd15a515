"""Solves the linear program of the planner.

Samples may take several routes at the same time, so the planner looks for the
best *mix* of options:

    maximise  sum of x(o)      samples per second by option o
    subject to  sum of x(o) * seconds(r, o) <= 1   for every resource r
                x(o) >= 0

A single option is a vertex of this program, so the optimum is never below the
best single option.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TIE = 1e-6
"""Mixes whose rates differ by a smaller fraction are equally good. The
tolerance of HiGHS is 1e-7."""

_NEGLIGIBLE = 1e-3
"""Smaller weights may result from :data:`TIE` alone: it is the square root of
it, so that an option of this weight gains as little if it is a thousandth
faster than the rest."""

Floats = NDArray[np.float64]


def best_mix(seconds: Floats, preference: Floats) -> Floats:
    """Returns the weights of the mix with the highest rate.

    Among equally good mixes it prefers the one with the highest weighted
    preference, and drops all options that are not needed.

    Args:
        seconds: finite ``[resources, options]``: seconds of each whole
            resource for one sample. No column is all 0.
        preference: ``[options]``; 1 for options that are not dropped.

    Returns:
        ``[options]``, at least 0, with the sum 1.
    """
    slowest = seconds.max(axis=0)
    # Columns are scaled to a maximum of 1 and rates to those of the best
    # single option, so that units do not affect the tolerances.
    program = _Program(seconds / slowest, slowest.min() / slowest)
    options = range(seconds.shape[1])
    min_gain = program.max_gain(options) * (1 - TIE)
    single = _best_single(program.gain, min_gain, preference)
    if single is not None:
        weight: Floats = np.eye(len(slowest), dtype=np.float64)[single]
        return weight
    amounts = program.preferred(options, preference, min_gain)
    needed = _needed_options(program, amounts, preference, min_gain)
    amounts = program.preferred(needed, preference, min_gain)
    rates = amounts / slowest
    rates[rates <= TIE * rates.sum()] = 0
    weights: Floats = rates / rates.sum()
    return weights


def best_rate(seconds: Floats) -> float:
    """Returns samples per second of the best mix."""
    slowest = seconds.max(axis=0)
    program = _Program(seconds / slowest, slowest.min() / slowest)
    return program.max_gain(range(seconds.shape[1])) / float(slowest.min())


class _Program:
    """The scaled linear program.

    Args:
        usage: ``[resources, options]``; the maximum of each column is 1.
        gain: ``[options]``, samples per unit of an option; the maximum is 1.
    """

    def __init__(self, usage: Floats, gain: Floats) -> None:
        self.usage = usage
        self.gain = gain

    def max_gain(self, allowed: Sequence[int]) -> float:
        """Returns the highest gain of the allowed options."""
        gain = self.gain[allowed]
        amounts = _maximum(
            gain, self.usage[:, allowed], np.ones(len(self.usage))
        )
        return max(float(gain @ amounts), float(gain.max()))

    def preferred(
        self, allowed: Sequence[int], preference: Floats, min_gain: float
    ) -> Floats:
        """Returns the preferred amounts ``[options]`` of at least a gain."""
        gain = self.gain[allowed]
        usage = np.vstack([self.usage[:, allowed], -gain])
        min_gain = min(min_gain, self.max_gain(allowed) * (1 - TIE))
        limits = np.append(np.ones(len(self.usage)), -min_gain)
        amounts = np.zeros(len(self.gain))
        amounts[allowed] = _maximum(gain * preference[allowed], usage, limits)
        return amounts


def _maximum(objective: Floats, usage: Floats, limits: Floats) -> Floats:
    # Imported here: jobs with a fixed cut start a quarter of a second earlier.
    from scipy.optimize import linprog

    result = linprog(-objective, usage, limits, method="highs")
    if result.status != 0:
        raise RuntimeError(
            f"the linear program could not be solved: {result.message}"
        )
    amounts: Floats = np.maximum(result.x, 0)
    return amounts


def _best_single(
    gain: Floats, min_gain: float, preference: Floats
) -> int | None:
    """Returns the preferred option that reaches the gain alone, if any."""
    good = np.flatnonzero(gain >= min_gain)
    return int(good[preference[good].argmax()]) if len(good) else None


def _needed_options(
    program: _Program, amounts: Floats, preference: Floats, min_gain: float
) -> list[int]:
    """Drops options without which the rest still reaches the gain.

    Negligible options are dropped first, then the least preferred.
    """
    gains = amounts * program.gain
    negligible = gains <= _NEGLIGIBLE * gains.sum()
    options = [int(option) for option in np.flatnonzero(amounts > TIE)]
    for option in sorted(
        options, key=lambda o: (not negligible[o], preference[o], -o)
    ):
        rest = [other for other in options if other != option]
        is_kept = preference[option] == 1 and not negligible[option]
        if rest and not is_kept and program.max_gain(rest) >= min_gain:
            options = rest
    return options
