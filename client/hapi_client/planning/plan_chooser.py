"""Chooses the plan of a running job under its present conditions.  No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.planning.cost_estimators import CostEstimators
from hapi_client.planning.route_mix import speedup_over, without_minor_routes
from hapi_splitter.planner.cache_plan import (
    CacheState,
    cached_sample_seconds,
    remaining_seconds,
    solve_with_cache,
)
from hapi_splitter.planner.costs import Conditions
from hapi_splitter.planner.plan import Plan, Problem, solve, streaming_plan

# The most sensitive number here.  Without it (1.0), four simulated jobs that
# share a worker never settle, and reach 90 % of the optimum on average instead
# of 95 %; two light and two heavy ones 74 % instead of 86 %.  1.01 is little
# better, and 1.04 leaves a job up to 4 % below its optimum.
MIN_GAIN = 1.02
"""Minimum modelled speed-up for which the weights change."""
# Chosen: simulated jobs do as well with 1 to 1.1.
MIN_PUSH_GAIN = 1.05
"""Minimum speed-up over raw reads to start push-down; :data:`MIN_GAIN` is
enough to continue it.  A late span costs more than a smaller gain."""

Build = Callable[[Conditions], Problem]


@dataclass(eq=False)
class PlanChooser:
    """Chooses plans for the remaining samples of a job.

    Attributes:
        build: returns the problem under given conditions, for the remaining
            samples.
        estimates: estimates of the conditions.
        tracker: tracker of the store's cache, which gets the routes whose
            features are read.
    """

    build: Build
    estimates: CostEstimators
    tracker: CacheTracker

    def __post_init__(self) -> None:
        self._cache: CacheState | None = None

    def current_problem(self) -> Problem:
        """Builds the current problem; stores the state of the cache for it."""
        problem = self.build(self.estimates.conditions())
        self._cache = self.tracker.state()
        return problem

    def best_plan(self, problem: Problem, min_gain: float) -> Plan:
        """Returns the best plan, or raw reads if push-down gains too little.

        A smaller gain is enough if other jobs keep the worker busy: without
        responses this job would not notice when they end.
        """
        plan = without_minor_routes(problem, self._solve(problem))
        streaming = streaming_plan(problem)
        gain = self.gain(problem, streaming, plan)
        if streaming is None or gain >= min_gain or not plan.pushes:
            return plan
        conditions = self.estimates.conditions()
        if conditions.server_share < 1:
            alone = self.build(replace(conditions, server_share=1.0))
            best = self._solve(alone)
            if self.gain(alone, streaming_plan(alone), best) >= min_gain:
                return plan
        return replace(
            streaming,
            rule=plan.rule,
            reasons=(
                f"{streaming.label}.",
                f"{plan.label} would be {gain - 1:.1%} faster, less than the "
                f"minimum of {min_gain - 1:.0%}.",
            ),
        )

    def _solve(self, problem: Problem) -> Plan:
        if self._cache is None:
            return solve(problem)
        return solve_with_cache(problem, self._cache)

    def gain(self, problem: Problem, other: Plan | None, plan: Plan) -> float:
        """Returns the speed-up of a plan over another to the job's end."""
        if (
            self._cache is None
            or other is None
            or not other.samples_per_second
        ):
            return speedup_over(other, plan)
        before, after = (
            remaining_seconds(problem, compared, self._cache)
            for compared in (other, plan)
        )
        return before / after

    def use_cached(self, problem: Problem, plan: Plan) -> None:
        """Enables cached reads of the routes that are faster than the plan."""
        if not self.tracker.is_active or not plan.samples_per_second:
            return
        seconds = {
            option.route: cached_sample_seconds(problem, option)
            for option in problem.options
            if option.cut and problem.fits(option)
        }
        steady = 1 / plan.samples_per_second
        faster = [route for route, time in seconds.items() if time < steady]
        self.tracker.use(sorted(faster, key=lambda route: seconds[route]))
