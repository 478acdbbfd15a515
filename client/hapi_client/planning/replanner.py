"""Re-plans a running job: adapts route weights to the conditions.  No I/O.

Jobs plan independently and share workers.  If all moved at once to a worker
that has become idle, they would also leave it at once.  So a re-plan moves at
most a quarter of the weight, at a jittered time, and only for a minimum gain.
Steps shrink when their direction reverses, and grow again when it does not or
when nothing moves (as in Rprop: Riedmiller and Braun, ICNN 1993).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hapi_client.metrics.events import WindowMetrics
from hapi_client.metrics.job_recorder import JobRecorder
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.planning.cost_estimators import CostEstimators
from hapi_client.planning.plan_chooser import (
    MIN_GAIN,
    MIN_PUSH_GAIN,
    Build,
    PlanChooser,
)
from hapi_client.planning.route_mix import (
    difference,
    options_of,
    step,
    weights_of,
)
from hapi_client.planning.route_scheduler import RouteScheduler
from hapi_splitter.planner.costs import Conditions
from hapi_splitter.planner.plan import LINK, Plan, Problem, evaluate
from hapi_splitter.planner.problem import RAW_ROUTE, Route, mix_label

logger = logging.getLogger(__name__)

# Four re-plans reach any target.  Half of it follows a link that became slow
# too late (81 % of the optimum meanwhile, not 90 %).  Twice as much was better
# for simulated jobs (96 %), but they have no noise: a re-plan for an odd
# window would then move half of a job.
MAX_MOVED = 0.25
"""Largest weight that a re-plan may move."""
# Three reversals lead to it from a quarter.  More than MIN_WEIGHT, so that a
# step can begin a route.  Half and twice of it change nothing for simulated
# jobs.
MIN_MOVED = 0.03
"""Lower bound of that limit, which reversals reduce."""
# Rprop has 0.5 and 1.2.  There is one re-plan in five seconds: with 1.5 the
# way back from MIN_MOVED takes six of them, half a minute; with 1.2, twelve.
SMALLER, LARGER = 0.5, 1.5
"""Factors of that limit after a reversal, and after anything else."""
# More than an hour in which each re-plan changes the weights; without a limit
# a job of weeks would fill the memory.
MAX_CHANGES = 1000
"""Number of plans that are remembered."""


@dataclass(frozen=True)
class ReplanOptions:
    """Options of re-planning.

    Attributes:
        seconds: loading time between two re-plans; jittered by a quarter to
            either side.
        min_spans: spans that must have arrived meanwhile.
    """

    # Chosen: long compared to most spans, so that a window has several of each
    # route.  Estimates are averages over windows: a job follows changes half
    # as fast with twice the time.
    seconds: float = 5.0
    # On a link that is slower than that, the window is longer: one with half a
    # span shows a rate that is far from the mean.
    min_spans: int = 4


@dataclass(frozen=True)
class PlanChange:
    """A change of a job's plan.

    Attributes:
        seconds: time since the job's first plan.
        mix: new weights by route.
        samples_per_second: expected throughput.
        why: reason in one sentence.
        conditions: conditions for which it was made.
    """

    seconds: float
    mix: Mapping[Route, float]
    samples_per_second: float
    why: str
    conditions: Conditions


@dataclass(eq=False, kw_only=True)
class Replanner:
    """Adapts the weights of a scheduler to the conditions.

    Attributes:
        build: returns the problem under given conditions, for the remaining
            samples.
        estimates: estimates of the conditions.
        scheduler: scheduler whose weights are changed.
        recorder: records the job.
        options: options of re-planning.
        clock: returns monotonic seconds.
        random: returns a number in [0, 1).
        tracker: tracker of the store's cache, which gets the routes whose
            features are read.
        num_changes: number of plans, also of those no longer remembered.
        plan: the current plan; None before :meth:`begin`.
    """

    build: Build
    estimates: CostEstimators
    scheduler: RouteScheduler[Route]
    recorder: JobRecorder
    options: ReplanOptions
    clock: Callable[[], float]
    random: Callable[[], float]
    tracker: CacheTracker = field(default_factory=CacheTracker)
    plan: Plan | None = field(default=None, init=False)
    num_changes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._chooser = PlanChooser(self.build, self.estimates, self.tracker)
        self._started = self.clock()
        self._spans = 0
        self._is_worker_lost = False
        self._max_moved = MAX_MOVED
        self._direction: Mapping[Route, float] = {}
        self._replanning = threading.Lock()
        self._changes: deque[PlanChange] = deque(maxlen=MAX_CHANGES)
        self._schedule_next()

    @property
    def changes(self) -> Sequence[PlanChange]:
        """The latest plans, oldest first."""
        return tuple(self._changes)

    def begin(self) -> Plan:
        """Makes the first plan, and applies it at once."""
        self.recorder.take()
        problem = self._problem()
        plan = self._chooser.best_plan(problem, MIN_PUSH_GAIN)
        self._apply(problem, weights_of(plan.mix), plan)
        return plan

    def span_arrived(self) -> None:
        """Re-plans if it is time; called after each span."""
        self._spans += 1
        # A job may have several loops at a time; one of them re-plans.
        if not self._is_due() or not self._replanning.acquire(blocking=False):
            return
        try:
            if self._is_due():
                self.replan()
        except Exception:
            # An error in planning must not end a training run.
            logger.exception("a defect: cannot re-plan, the plan stays")
        finally:
            self._replanning.release()

    def _is_due(self) -> bool:
        return (
            self._spans >= self.options.min_spans
            and self.recorder.window_seconds >= self._pause
        )

    def replan(self) -> None:
        """Ends the window, and changes the weights if that pays."""
        self._schedule_next()
        window = self.recorder.take()
        estimates = self.estimates
        estimates.observe(window, self.build)
        problem = self._problem()
        current = dict(self.scheduler.weights)
        if self._update_worker_lost(window, problem, current):
            return
        is_pushing = any(route != RAW_ROUTE for route in current)
        target = self._chooser.best_plan(
            problem, MIN_GAIN if is_pushing else MIN_PUSH_GAIN
        )
        present = evaluate(problem, options_of(problem, current), "auto")
        gives_up = is_pushing and not target.pushes
        if (
            self._chooser.gain(problem, present, target) < MIN_GAIN
            and not gives_up
        ):
            self._set_plan(present)
            self._chooser.use_cached(problem, present)
            self._max_moved = min(MAX_MOVED, LARGER * self._max_moved)
            return
        weights = weights_of(target.mix)
        direction = difference(weights, current)
        self._max_moved = self._next_max_moved(direction)
        self._direction = direction
        self._apply(problem, step(current, weights, self._max_moved), target)

    def _problem(self) -> Problem:
        """Builds the current problem; its link bounds the time of spans."""
        problem = self._chooser.current_problem()
        self.recorder.link_seconds = {
            option.route: problem.seconds(option, LINK)
            for option in problem.options
        }
        return problem

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
        current: Mapping[Route, float],
    ) -> bool:
        """Returns True while most push-down falls back to raw reads.

        The weights stay: the circuit breaker probes the worker by itself.
        """
        num_features = window.pushed.samples + window.num_cached
        fell_back = window.raw.fell_back
        if all(route == RAW_ROUTE for route in current):
            self._is_worker_lost = False  # nothing is pushed down any more
        elif fell_back > num_features:
            streaming = {RAW_ROUTE: 1.0}
            plan = evaluate(problem, options_of(problem, streaming), "auto")
            if not self._is_worker_lost:
                self._is_worker_lost = True
                self._record(
                    streaming,
                    plan,
                    f"The worker does not answer: {fell_back} samples "
                    f"fell back to raw reads, {num_features} did not.",
                )
            self._set_plan(plan)
        elif self._is_worker_lost and num_features:
            self._is_worker_lost = False
            plan = evaluate(problem, options_of(problem, current), "auto")
            self._record(current, plan, "The worker answers again.")
        return self._is_worker_lost

    def _apply(
        self,
        problem: Problem,
        weights: Mapping[Route, float],
        target: Plan,
    ) -> None:
        # The first sentence of the reasons only repeats the weights.
        why = " ".join(target.reasons[1:2] or target.reasons)
        self.scheduler.change(weights)
        plan = evaluate(problem, options_of(problem, weights), target.rule)
        self._chooser.use_cached(problem, plan)
        self._record(weights, plan, why)

    def _record(
        self, weights: Mapping[Route, float], plan: Plan, why: str
    ) -> None:
        self._set_plan(plan)
        change = PlanChange(
            seconds=self.clock() - self._started,
            mix=dict(weights),
            samples_per_second=plan.samples_per_second,
            why=why,
            conditions=self.estimates.conditions(),
        )
        self._changes.append(change)
        self.num_changes += 1
        logger.info("plan: %s: %s", mix_label(weights), why)

    def _set_plan(self, plan: Plan) -> None:
        self.plan = plan
        self.recorder.planned_rate = plan.samples_per_second

    def _schedule_next(self) -> None:
        jitter = 0.75 + 0.5 * self.random()
        self._pause = self.options.seconds * jitter
        self._spans = 0
