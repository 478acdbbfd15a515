"""The linear program of the planner.

Samples may take different ways at the same time, so the question is not
which way is best but which *mix*:

    maximise  sum of x(o)      samples per second by option o
    subject to  sum of x(o) * seconds(r, o) <= 1   for every resource r
                x(o) >= 0

A single way is a vertex of this program, so the optimum is never below the
best of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

TIE = 1e-6
"""Mixes whose rates differ by less than this part are equally good. HiGHS
works to 1e-7."""

_CRUMB = 1e-3
"""A share so small may come from :data:`TIE` alone."""

Floats = NDArray[np.float64]


def best_mix(seconds: Floats, favour: Floats) -> Floats:
    """The mix with the highest rate.

    Among equally good ones it takes the one with the most favour, weighted
    by shares, and leaves out every option that it can do without.

    Args:
        seconds: finite ``[resources, options]``: of each resource with all
            its capacity, for one sample. No column is all 0.
        favour: ``[options]``; 1 for one that is kept if it does no harm.

    Returns:
        ``[options]``, at least 0, with the sum 1.
    """
    slowest = seconds.max(axis=0)
    # Columns are scaled to a maximum of 1 and rates to the best single
    # option's, so the program has the same numbers whatever the units are.
    program = _Program(seconds / slowest, slowest.min() / slowest)
    every = range(seconds.shape[1])
    enough = program.most(every) * (1 - TIE)
    single = _single(program.gain, enough, favour)
    if single is not None:
        alone: Floats = np.eye(len(slowest), dtype=np.float64)[single]
        return alone
    amounts = program.favoured(every, favour, enough)
    support = _without_surplus(program, amounts, favour, enough)
    amounts = program.favoured(support, favour, enough)
    rates = amounts / slowest
    rates[rates <= TIE * rates.sum()] = 0
    weights: Floats = rates / rates.sum()
    return weights


def best_rate(seconds: Floats) -> float:
    """Samples per second of the best mix."""
    slowest = seconds.max(axis=0)
    program = _Program(seconds / slowest, slowest.min() / slowest)
    return program.most(range(seconds.shape[1])) / float(slowest.min())


class _Program:
    """The scaled program.

    Args:
        usage: ``[resources, options]``, maximum of each column 1.
        gain: ``[options]``, maximum 1: samples for one unit of an option.
    """

    def __init__(self, usage: Floats, gain: Floats) -> None:
        self.usage = usage
        self.gain = gain

    def most(self, allowed: Sequence[int]) -> float:
        """The highest gain with the options allowed."""
        gain = self.gain[allowed]
        amounts = _maximum(
            gain, self.usage[:, allowed], np.ones(len(self.usage))
        )
        return max(float(gain @ amounts), float(gain.max()))

    def favoured(
        self, allowed: Sequence[int], favour: Floats, enough: float
    ) -> Floats:
        """Amounts ``[options]`` of most favour with a gain of ``enough``."""
        gain = self.gain[allowed]
        usage = np.vstack([self.usage[:, allowed], -gain])
        enough = min(enough, self.most(allowed) * (1 - TIE))
        limits = np.append(np.ones(len(self.usage)), -enough)
        amounts = np.zeros(len(self.gain))
        amounts[allowed] = _maximum(gain * favour[allowed], usage, limits)
        return amounts


def _maximum(objective: Floats, usage: Floats, limits: Floats) -> Floats:
    result = linprog(-objective, usage, limits, method="highs")
    if result.status != 0:
        raise RuntimeError(
            f"the linear program was not solved: {result.message}"
        )
    amounts: Floats = np.maximum(result.x, 0)
    return amounts


def _single(gain: Floats, enough: float, favour: Floats) -> int | None:
    """An option that does as well alone: the most favoured, the first."""
    good = np.flatnonzero(gain >= enough)
    return int(good[favour[good].argmax()]) if len(good) else None


def _without_surplus(
    program: _Program, amounts: Floats, favour: Floats, enough: float
) -> list[int]:
    """The options of a mix without those that it can do without.

    Crumbs go first, then what has the least favour.
    """
    gains = amounts * program.gain
    crumbs = gains <= _CRUMB * gains.sum()
    support = [int(option) for option in np.flatnonzero(amounts > TIE)]
    for option in sorted(
        support, key=lambda o: (not crumbs[o], favour[o], -o)
    ):
        rest = [each for each in support if each != option]
        needed = favour[option] == 1 and not crumbs[option]
        if rest and not needed and program.most(rest) >= enough:
            support = rest
    return support
