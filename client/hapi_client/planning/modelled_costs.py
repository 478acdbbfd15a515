"""Costs of a window's samples by the profiles.  No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from hapi_client.metrics.events import WindowMetrics
from hapi_splitter.planner.problem import Option, Problem, Route
from hapi_splitter.planner.resource_use import CLIENT_LAYERS


def modelled_seconds(
    window: WindowMetrics,
    problem: Problem,
    counts: Callable[[Route], bool] = lambda route: True,
) -> dict[str, float]:
    """Returns modelled seconds of the window's samples, by component."""
    sums: dict[str, float] = defaultdict(float)
    for option, count in _options_of(window, problem):
        if counts(option.route):
            for kind, seconds in option.work.items():
                sums[kind] += count * seconds
    return sums


def modelled_layers(window: WindowMetrics, problem: Problem) -> float:
    """Returns modelled device-seconds of layers computed on the client."""
    seconds = {
        option.cut: option.work.get(CLIENT_LAYERS, 0.0)
        for option in problem.options
    }
    return sum(
        seconds.get(cut, 0.0) * n
        for cut, n in window.layers.samples_by_cut.items()
    )


def modelled_use(window: WindowMetrics, problem: Problem) -> dict[str, float]:
    """Returns the modelled use of each resource by the window's samples."""
    sums: dict[str, float] = defaultdict(float)
    for option, count in _options_of(window, problem):
        for resource, amount in option.use.items():
            sums[resource] += count * amount
    return sums


def _options_of(
    window: WindowMetrics, problem: Problem
) -> Iterator[tuple[Option, int]]:
    known = {option.route: option for option in problem.options}
    for route, count in window.samples.items():
        if route in known:
            yield known[route], count
