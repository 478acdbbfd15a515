"""Schedules spans on routes by weight.  No I/O.

Smooth weighted round robin: each span credits every route with its samples
times the route's weight, and debits the route that it takes.  The deficit of a
route is bounded, so its samples never differ from its share by more than a few
spans.

At the end of an epoch, slow routes are avoided on which a span would arrive
after all others (:func:`straggling_routes`).  They keep their deficits for the
next epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")

# With one span, a route that has room waits whenever another one is full for a
# moment; more than a few would be a different mix until the deficit is paid.
MAX_AHEAD_SPANS = 2.0
"""Largest lead of a route over its share while another one is full."""


class RouteScheduler(Generic[T]):
    """Schedules spans on routes by weight.  Thread-safe.

    Args:
        weights: weights by route; they sum to 1.

    Raises:
        ValueError: if a weight is negative or they do not sum to 1.
    """

    def __init__(self, weights: Mapping[T, float]) -> None:
        self._lock = threading.Lock()
        self._credit: dict[T, float] = {}
        self._weights: dict[T, float] = {}
        self._largest = 0
        self.change(weights)

    @property
    def weights(self) -> Mapping[T, float]:
        with self._lock:
            return dict(self._weights)

    def change(self, weights: Mapping[T, float]) -> None:
        """Changes the weights; remaining routes keep their deficits.

        Raises:
            ValueError: if a weight is negative or they do not sum to 1.
        """
        total = sum(weights.values())
        if min(weights.values(), default=-1) < 0 or abs(total - 1) > 1e-6:
            raise ValueError(f"weights {dict(weights)} do not sum to 1")
        with self._lock:
            self._weights = {r: w for r, w in weights.items() if w > 0}
            self._credit = _centred(
                {r: self._credit.get(r, 0.0) for r in self._weights}
            )

    def choose(
        self,
        num_samples: int,
        has_room: Callable[[T], bool],
        avoid: Collection[T] = (),
    ) -> T | None:
        """Schedules one span.

        Args:
            num_samples: number of samples of the span.
            has_room: returns True if a route can take a span now.
            avoid: routes that this span should not take.  It counts for
                their deficits nevertheless.

        Returns:
            The route with the largest deficit among those with room; None to
            wait, if only routes too far ahead of their share have room.
        """
        with self._lock:
            deficits = {
                route: self._credit[route] + weight * num_samples
                for route, weight in self._weights.items()
            }
            allowed = [r for r in deficits if r not in avoid] or list(deficits)
            base = 0.0
            if avoid:
                # The allowed routes keep to their shares among themselves.
                base = sum(deficits[r] for r in allowed) / len(allowed)
            self._largest = max(self._largest, num_samples)
            for route in sorted(allowed, key=lambda r: -deficits[r]):
                after = deficits[route] - num_samples
                if after < base - MAX_AHEAD_SPANS * num_samples:
                    return None
                if has_room(route):
                    credit = {**deficits, route: after}
                    self._credit = self._bounded(credit) if avoid else credit
                    return route
            return None

    def _bounded(self, credit: Mapping[T, float]) -> dict[T, float]:
        """Limits deficits of avoided routes to a few spans."""
        limit = MAX_AHEAD_SPANS * self._largest
        if max(credit.values()) <= limit:
            return dict(credit)
        return _centred(
            {r: min(deficit, limit) for r, deficit in credit.items()}
        )


def _centred(credit: Mapping[T, float]) -> dict[T, float]:
    """Shifts deficits so that they sum to zero."""
    mean = sum(credit.values()) / len(credit)
    return {route: deficit - mean for route, deficit in credit.items()}


def straggling_routes(
    weights: Mapping[T, float],
    span_seconds: Mapping[T, float],
    rate: float,
    samples_left: int,
    unfinished: Mapping[T, float],
) -> set[T]:
    """Returns the routes on which a span would arrive after all others.

    Args:
        weights: weights by route.
        span_seconds: seconds until one more span of a route would be done;
            a route without an entry is not known to be slow.
        rate: samples per second of all routes together.
        samples_left: samples of this epoch that are not scheduled, being
            loaded, or not yet used by the loop, which may be the bottleneck.
        unfinished: samples among these that are scheduled on each route.
            A route's own spans do not keep the others busy.

    Returns:
        Never all routes: at least the fastest is left out.
    """
    stragglers = {
        route
        for route, weight in weights.items()
        if span_seconds.get(route, 0.0) * (1 - weight) * rate
        > samples_left - unfinished.get(route, 0.0)
    }
    if stragglers and len(stragglers) == len(weights):
        stragglers.remove(min(stragglers, key=lambda r: span_seconds[r]))
    return stragglers
