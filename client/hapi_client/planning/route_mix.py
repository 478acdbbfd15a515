"""Arithmetic of route weights: steps, differences and texts.  No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hapi_splitter.planner.plan import Option, Plan, Problem, evaluate
from hapi_splitter.planner.problem import Route

# Without a route of weight w, the others have 1 / (1 - w) times the work: the
# plan is 2 % slower at most.  Half and twice the weight change nothing for
# simulated jobs.
MIN_WEIGHT = 0.02
"""Weight below which a route is dropped: it gains little, and one slow span
makes many fast ones wait."""


def without_minor_routes(problem: Problem, plan: Plan) -> Plan:
    """Returns the plan without routes below :data:`MIN_WEIGHT`.

    A job keeps some push-down if it has any: the responses show when the
    worker has more capacity.
    """
    major = [
        (option, weight) for option, weight in plan.mix if weight >= MIN_WEIGHT
    ]
    pushes = any(option.cut for option, _ in plan.mix)
    if pushes and not any(option.cut for option, _ in major):
        return plan
    if len(major) == len(plan.mix):
        return plan
    return evaluate(problem, major, plan.rule)


def speedup_over(other: Plan | None, plan: Plan) -> float:
    """Returns the speed-up of a plan over another, which may be impossible.

    Returns:
        A factor; infinity without another plan.
    """
    if other is None or not other.samples_per_second:
        return math.inf
    return plan.samples_per_second / other.samples_per_second


def step(
    current: Mapping[Route, float],
    target: Mapping[Route, float],
    max_moved: float,
) -> dict[Route, float]:
    """Moves weights towards a target.

    Args:
        current: current weights, which sum to 1.
        target: target weights, which sum to 1.
        max_moved: largest weight to move.
    """
    change = difference(target, current)
    distance = sum(map(abs, change.values())) / 2
    part = min(1.0, max_moved / distance) if distance > 0 else 1.0
    moved = {
        route: current.get(route, 0.0) + part * change[route]
        for route in change
    }
    major = {
        route: weight
        for route, weight in moved.items()
        if weight >= MIN_WEIGHT or route in target
    }
    total = sum(major.values())
    return {route: weight / total for route, weight in major.items()}


def difference(
    target: Mapping[Route, float], current: Mapping[Route, float]
) -> dict[Route, float]:
    """Returns the change of each route's weight."""
    return {
        route: target.get(route, 0.0) - current.get(route, 0.0)
        for route in sorted({*current, *target})
    }


def weights_of(mix: Sequence[tuple[Option, float]]) -> dict[Route, float]:
    """Returns the weights of a plan's mix, by route."""
    return {option.route: weight for option, weight in mix}


def options_of(
    problem: Problem, weights: Mapping[Route, float]
) -> list[tuple[Option, float]]:
    """Returns a mix of the problem's options with given weights."""
    known = {option.route: option for option in problem.options}
    return [(known[route], weight) for route, weight in weights.items()]
