"""Plans for a store that caches computed features.

Frozen layers give the same features in every epoch.  What is pushed
down once and cached is later read without computing, so the mix that is
fastest in this epoch may not be the fastest over all remaining epochs: a
deeper cut takes longer to compute, once, and less to send and to complete in
every later epoch.

Only samples that are not cached yet depend on the mix.  Let it take ``t``
seconds for a sample, ``k`` seconds if its features are cached, and push down
the fraction ``q`` at random.  After ``n`` epochs ``(1 - q) ** n`` of them are
not cached yet, so ``E`` epochs compute a sample ``(1 - (1 - q) ** E) / q``
times and read it from the cache in the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hapi_splitter.planner.linear_program import TIE
from hapi_splitter.planner.plan import able_options, evaluate, solve
from hapi_splitter.planner.problem import (
    CLIENT_CPU,
    CLIENT_DEVICE,
    LINK,
    SERVER_CPU,
    Option,
    Plan,
    Problem,
    Route,
)
from hapi_splitter.planner.resource_use import SERVING, stages
from hapi_splitter.units import seconds_text


@dataclass(frozen=True)
class CacheState:
    """Expected hit rates of the store's cache.

    Attributes:
        hit_rate: fraction of the computed features that later epochs find
            in the cache, 0 to 1.
        hit_rates: hit rates of single routes, if known.
        period_epochs: epochs after which the same features are requested
            again; more than 1 with augmentation.
    """

    hit_rate: float = 1.0
    hit_rates: Mapping[Route, float] = field(default_factory=dict)
    period_epochs: int = 1

    def hit_rate_of(self, option: Option) -> float:
        """Returns the hit rate of an option's features."""
        return self.hit_rates.get(option.route, self.hit_rate)


def cached_sample_seconds(problem: Problem, option: Option) -> float:
    """Returns seconds of a cached sample at its scarcest resource.

    The cost of Swift includes a read of the raw sample and is thus an upper
    bound.
    """
    serving = stages(problem, option)[SERVER_CPU].get(SERVING, 0.0)
    own = (LINK, CLIENT_CPU, CLIENT_DEVICE)
    return max(serving, *(problem.seconds(option, name) for name in own))


def remaining_seconds(
    problem: Problem, plan: Plan, state: CacheState
) -> float:
    """Returns seconds of all remaining epochs for uncached samples.

    Args:
        problem: has the remaining epochs.
        plan: any mix of the problem's options.
        state: state of the cache.
    """
    if not plan.samples_per_second:
        return plan.total_seconds
    stored = [
        (fraction * state.hit_rate_of(option), option)
        for option, fraction in plan.mix
        if option.cut
    ]
    growth = sum(fraction for fraction, _ in stored)
    cached = sum(
        fraction * cached_sample_seconds(problem, option)
        for fraction, option in stored
    )
    return plan.one_off_seconds + _remaining(
        problem,
        state,
        1 / plan.samples_per_second,
        growth,
        cached / growth if growth else 0.0,
    )


def solve_with_cache(problem: Problem, state: CacheState) -> Plan:
    """Returns the fastest mix, or one cut if that takes fewer seconds in all.

    They are compared by :func:`remaining_seconds`.  Mixes of streaming and one
    cut are not tried: if few samples remain to be computed among cached ones,
    each takes up to 40 % longer than alone (measured on two cores), which is
    more than such a mix gains.

    Args:
        problem: with the remaining epochs.
        state: state of the cache.

    Raises:
        ValueError: if no option fits or can run.
    """
    fastest = solve(problem)
    pushed = [option for option in able_options(problem) if option.cut]
    if not pushed:
        return fastest
    best = min(
        pushed,
        key=lambda option: _remaining(
            problem,
            state,
            1 / problem.samples_per_second(option),
            state.hit_rate_of(option),
            cached_sample_seconds(problem, option),
        ),
    )
    chosen = evaluate(problem, [(best, 1.0)], fastest.rule)
    before = remaining_seconds(problem, fastest, state)
    after = remaining_seconds(problem, chosen, state)
    if after >= before * (1 - TIE):
        return fastest
    first, *others = chosen.reasons
    why = (
        "Pushed features are cached for later epochs: an uncached data set "
        f"takes {seconds_text(after)} in all, and {seconds_text(before)} "
        f"with {fastest.label}."
    )
    return replace(chosen, reasons=(first, why, *others))


def _remaining(
    problem: Problem,
    state: CacheState,
    steady: float,
    growth: float,
    cached: float,
) -> float:
    """Returns seconds of an uncached data set over all remaining epochs.

    Args:
        problem: with the remaining epochs.
        state: state of the cache.
        steady: seconds per sample of a mix.
        growth: fraction of the samples that the mix adds to the cache.
        cached: seconds per cached sample in later epochs.
    """
    visits = problem.epochs / state.period_epochs
    growth = max(growth, 1e-9)
    computed = min(visits, (1 - (1 - growth) ** visits) / growth)
    sample: float = computed * steady + (visits - computed) * min(
        cached, steady
    )
    return problem.num_samples * state.period_epochs * sample
