"""Moves a running job's mix to what the present conditions ask for (pure).

Every job plans for itself, and all of them meet at the same workers: jobs
that all jump to where room has just been seen, jump away together as well.
So a move takes at most a quarter of the weight, comes at a jittered time,
and only for a gain worth it. Moves to and fro become smaller each time; moves
on the same way, and looks without any, make them larger again (as steps do in
Rprop: Riedmiller and Braun, ICNN 1993).
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hapi_client.metrics.window_collector import MetricsCollector
from hapi_client.metrics.window_metrics import WindowMetrics
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.planning.cost_estimators import CostEstimators
from hapi_client.planning.route_scheduler import RouteScheduler
from hapi_splitter.planner.cache_plan import (
    CacheState,
    cached_sample_seconds,
    remaining_seconds,
    solve_with_cache,
)
from hapi_splitter.planner.costs import Conditions
from hapi_splitter.planner.plan import (
    LINK,
    Option,
    Plan,
    Problem,
    evaluate,
    solve,
    streaming_plan,
)
from hapi_splitter.planner.problem import RAW_ROUTE, Route

logger = logging.getLogger(__name__)

MAX_MOVED = 0.25
"""Weight that one re-plan may move."""
MIN_MOVED = 0.03
"""That it may move however often moves went to and fro."""
SMALLER, LARGER = 0.5, 1.5
"""Factors of that weight after a move back, and after one on the same way."""
MIN_GAIN = 1.02
"""A better mix must be this much faster under the model to be taken."""
MIN_WEIGHT = 0.02
"""A way with less of the weight is not worth its requests: the others are
nearly as fast without it, and one slow span keeps many fast ones waiting."""
MIN_PUSH_GAIN = 1.05
"""A mix must be this much faster than streaming alone before anything is
pushed, and :data:`MIN_GAIN` for that to go on: one span that is late costs
more than such a mix promises."""
MAX_CHANGES = 1000

Build = Callable[[Conditions], Problem]


@dataclass(frozen=True)
class ReplanOptions:
    """When a job looks at its plan again.

    Attributes:
        seconds: of loading between two looks; jittered by a quarter to
            either side.
        least_spans: that must have come meanwhile.
    """

    seconds: float = 5.0
    min_spans: int = 4

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.min_spans < 1:
            raise ValueError(f"{self}: both must be positive")


@dataclass(frozen=True)
class PlanChange:
    """One entry of a job's log of plans.

    Attributes:
        seconds: since the job's first plan.
        mix: weights by (cut, encoding) from then on.
        samples_per_second: that the model expects of it.
        why: one sentence.
        conditions: that it was made for.
    """

    seconds: float
    mix: Mapping[Route, float]
    samples_per_second: float
    why: str
    conditions: Conditions


class Replanner:
    """Keeps a mixer's weights up with the conditions.

    Args:
        build: the problem under given conditions, for the samples that
            are still to come.
        estimates: of the conditions.
        mixer: is given the weights.
        meter: is asked for each interval.
        options: when.
        clock: monotonic seconds.
        random: uniform in [0, 1).
        tracker: of the store's cache; is given the routes to read from it.
            None for a job without.
    """

    def __init__(
        self,
        build: Build,
        estimates: CostEstimators,
        scheduler: RouteScheduler[Route],
        metrics: MetricsCollector,
        options: ReplanOptions,
        *,
        clock: Callable[[], float],
        random: Callable[[], float],
        tracker: CacheTracker | None = None,
    ) -> None:
        self._build = build
        self._estimates = estimates
        self._scheduler = scheduler
        self._metrics = metrics
        self._options = options
        self._clock = clock
        self._random = random
        self._tracker = tracker or CacheTracker()
        self._cache: CacheState | None = None
        self._started = clock()
        self._spans = 0
        self._is_worker_lost = False
        self._max_moved = MAX_MOVED
        self._direction: Mapping[Route, float] = {}
        self._replanning = threading.Lock()
        self._changes: deque[PlanChange] = deque(maxlen=MAX_CHANGES)
        self.num_changes = 0
        """In all, also those that the log has no more."""
        self.plan: Plan | None = None
        self._schedule_next()

    @property
    def changes(self) -> Sequence[PlanChange]:
        """The log of plans, oldest first."""
        return tuple(self._changes)

    @property
    def estimates(self) -> CostEstimators:
        return self._estimates

    def begin(self) -> Plan:
        """The first plan, taken as it is."""
        self._metrics.take()
        problem = self._present()
        plan = self._wanted(problem, MIN_PUSH_GAIN)
        self._take(problem, _weights(plan.mix), plan)
        return plan

    def span_arrived(self) -> None:
        """Told of each span; now and then looks at the plan."""
        self._spans += 1
        # Several loops may be under way; one of them looks.
        if not self._is_due() or not self._replanning.acquire(blocking=False):
            return
        try:
            if self._is_due():
                self.replan()
        except Exception:
            # A defect of the planning must not end a training run.
            logger.exception("a defect: the plan stays as it is")
        finally:
            self._replanning.release()

    def _is_due(self) -> bool:
        return (
            self._spans >= self._options.min_spans
            and self._metrics.window_seconds >= self._pause
        )

    def replan(self) -> None:
        """Takes the interval in, and moves the mix if that pays."""
        self._schedule_next()
        window = self._metrics.take()
        estimates = self._estimates
        estimates.observe(window, self._build)
        problem = self._present()
        now = dict(self._scheduler.weights)
        if self._update_worker_lost(window, problem, now):
            return
        is_pushing = any(route != RAW_ROUTE for route in now)
        wanted = self._wanted(
            problem, MIN_GAIN if is_pushing else MIN_PUSH_GAIN
        )
        present = evaluate(problem, _options(problem, now), "auto")
        gives_up = is_pushing and not wanted.pushes
        if self._gain(problem, present, wanted) < MIN_GAIN and not gives_up:
            self._set_plan(present)
            self._use_cached(problem, present)
            self._max_moved = min(MAX_MOVED, LARGER * self._max_moved)
            return
        target = _weights(wanted.mix)
        direction = difference(target, now)
        self._max_moved = self._next_max_moved(direction)
        self._direction = direction
        self._take(problem, step(now, target, self._max_moved), wanted)

    def _present(self) -> Problem:
        """The problem of now, and the cache's state, for one re-plan."""
        problem = self._build(self._estimates.conditions())
        self._cache = self._tracker.state()
        self._metrics.set_link_seconds(
            {
                each.route: problem.seconds(each, LINK)
                for each in problem.options
            }
        )
        return problem

    def _wanted(self, problem: Problem, min_gain: float) -> Plan:
        """The best plan, or streaming where pushing gains too little.

        Little as it gains, it goes on where others keep the worker busy that
        would gain more: its answers tell when they are gone.
        """
        plan = without_minor_routes(problem, self._solve(problem))
        streaming = streaming_plan(problem)
        gain = self._gain(problem, streaming, plan)
        if streaming is None or gain >= min_gain or not plan.pushes:
            return plan
        conditions = self._estimates.conditions()
        if conditions.server_share < 1:
            alone = self._build(replace(conditions, server_share=1.0))
            best = self._solve(alone)
            if self._gain(alone, streaming_plan(alone), best) >= min_gain:
                return plan
        return replace(
            streaming,
            rule=plan.rule,
            reasons=(
                f"{streaming.label}.",
                f"{plan.label} would be {gain - 1:.1%} faster, which is less "
                "than spans that come late may cost.",
            ),
        )

    def _solve(self, problem: Problem) -> Plan:
        if self._cache is None:
            return solve(problem)
        return solve_with_cache(problem, self._cache)

    def _gain(self, problem: Problem, other: Plan | None, plan: Plan) -> float:
        """Speed-up of a plan over another, in all remaining epochs."""
        if (
            self._cache is None
            or other is None
            or not other.samples_per_second
        ):
            return speedup_over(other, plan)
        before, after = (
            remaining_seconds(problem, each, self._cache)
            for each in (other, plan)
        )
        return before / after

    def _use_cached(self, problem: Problem, plan: Plan) -> None:
        """Reads cached features of the routes that are faster than the mix."""
        if not self._tracker.is_active or not plan.samples_per_second:
            return
        seconds = {
            option.route: cached_sample_seconds(problem, option)
            for option in problem.options
            if option.cut and problem.fits(option)
        }
        steady = 1 / plan.samples_per_second
        faster = [route for route, each in seconds.items() if each < steady]
        self._tracker.use(sorted(faster, key=lambda route: seconds[route]))

    def _next_max_moved(self, direction: Mapping[Route, float]) -> float:
        along = sum(
            part * self._direction.get(route, 0.0)
            for route, part in direction.items()
        )
        if along < 0:
            return max(MIN_MOVED, SMALLER * self._max_moved)
        return min(MAX_MOVED, LARGER * self._max_moved)

    def _update_worker_lost(
        self,
        window: WindowMetrics,
        problem: Problem,
        now: Mapping[Route, float],
    ) -> bool:
        """Whether most of what should be pushed is not, at present.

        Spans that cannot be pushed are streamed one by one, and the worker is
        asked again by itself; the weights stay for when it is back.
        """
        came = window.pushed_samples + window.num_cached
        if all(route == RAW_ROUTE for route in now):
            self._is_worker_lost = False  # nobody asks it any more
        elif window.fell_back > came:
            streaming = {RAW_ROUTE: 1.0}
            plan = evaluate(problem, _options(problem, streaming), "auto")
            if not self._is_worker_lost:
                self._is_worker_lost = True
                self._record(
                    streaming,
                    plan,
                    f"The worker does not answer ({window.fell_back} samples, "
                    f"{came} came): what it should compute is "
                    "streamed until it does.",
                )
            self._set_plan(plan)
        elif self._is_worker_lost and came:
            self._is_worker_lost = False
            plan = evaluate(problem, _options(problem, now), "auto")
            self._record(now, plan, "The worker answers again.")
        return self._is_worker_lost

    def _take(
        self,
        problem: Problem,
        weights: Mapping[Route, float],
        wanted: Plan,
    ) -> None:
        # The first sentence says what the mix is, which is plain to see.
        why = " ".join(wanted.reasons[1:2] or wanted.reasons)
        self._scheduler.change(weights)
        plan = evaluate(problem, _options(problem, weights), wanted.rule)
        self._use_cached(problem, plan)
        self._record(weights, plan, why)

    def _record(
        self, weights: Mapping[Route, float], plan: Plan, why: str
    ) -> None:
        self._set_plan(plan)
        change = PlanChange(
            seconds=self._clock() - self._started,
            mix=dict(weights),
            samples_per_second=plan.samples_per_second,
            why=why,
            conditions=self._estimates.conditions(),
        )
        self._changes.append(change)
        self.num_changes += 1
        logger.info("plan: %s: %s", describe_mix(weights), why)

    def _set_plan(self, plan: Plan) -> None:
        self.plan = plan
        self._metrics.set_planned_rate(plan.samples_per_second)

    def _schedule_next(self) -> None:
        jitter = 0.75 + 0.5 * self._random()
        self._pause = self._options.seconds * jitter
        self._spans = 0


def without_minor_routes(problem: Problem, plan: Plan) -> Plan:
    """The plan without ways that are not worth their requests.

    All that a job pushes is never left out: little as it is, it shows
    whether the worker has more room by now.
    """
    kept = [each for each in plan.mix if each[1] >= MIN_WEIGHT]
    pushes = any(option.cut for option, _ in plan.mix)
    if pushes and not any(option.cut for option, _ in kept):
        return plan
    if len(kept) == len(plan.mix):
        return plan
    return evaluate(problem, kept, plan.rule)


def speedup_over(other: Plan | None, plan: Plan) -> float:
    """By which factor a plan is faster than another, if that can run."""
    if other is None or not other.samples_per_second:
        return math.inf
    return plan.samples_per_second / other.samples_per_second


def step(
    now: Mapping[Route, float], wanted: Mapping[Route, float], most: float
) -> dict[Route, float]:
    """Weights on the way from one mix to another.

    Args:
        now: weights that sum to 1.
        wanted: likewise.
        most: weight that may move; all of it if less has to.
    """
    change = difference(wanted, now)
    distance = sum(abs(each) for each in change.values()) / 2
    part = min(1.0, most / distance) if distance > 0 else 1.0
    moved = {
        route: now.get(route, 0.0) + part * change[route] for route in change
    }
    kept = {
        route: weight
        for route, weight in moved.items()
        if weight >= MIN_WEIGHT or route in wanted
    }
    whole = sum(kept.values())
    return {route: weight / whole for route, weight in kept.items()}


def difference(
    wanted: Mapping[Route, float], now: Mapping[Route, float]
) -> dict[Route, float]:
    """Of weights, by way."""
    routes = sorted({*now, *wanted})
    return {
        route: wanted.get(route, 0.0) - now.get(route, 0.0) for route in routes
    }


def describe_mix(weights: Mapping[Route, float]) -> str:
    """``60 % cut 21 float32, 40 % stream``."""
    parts = sorted(weights.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{100 * weight:.0f} % "
        + (f"cut {cut} {encoding}" if cut else "stream")
        for (cut, encoding), weight in parts
    )


def route_label(route: Route) -> str:
    """As :attr:`hapi_splitter.planner.plan.Option.label`."""
    cut, encoding = route
    return f"cut {cut} · {encoding}" if cut else "stream"


def _weights(mix: Sequence[tuple[Option, float]]) -> dict[Route, float]:
    return {each.route: weight for each, weight in mix}


def _options(
    problem: Problem, weights: Mapping[Route, float]
) -> list[tuple[Option, float]]:
    known = {each.route: each for each in problem.options}
    return [(known[route], weight) for route, weight in weights.items()]
