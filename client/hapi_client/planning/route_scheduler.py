"""Which span goes which way, so that the whole follows the plan (pure).

Each span credits every way with its samples times the way's weight, and is
charged to the way it goes: smooth weighted round robin. The debt of a way
is bounded, so after any number of spans the samples that went a way differ
from its weight's share by a few spans only.

The last spans of an epoch are dealt otherwise: one that a slow way brings
after all others would keep everybody waiting (:func:`straggling_routes`). What that
way is owed then, the next epoch begins with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_AHEAD_SPANS = 2.0
"""How far a way may run ahead of its share while another one is full."""


class RouteScheduler(Generic[T]):
    """Deals spans to ways by weight.

    Args:
        weights: by way; they sum to 1.

    Raises:
        ValueError: when they do not.
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
        """Takes other weights; what is owed so far is kept.

        Raises:
            ValueError: unless they are not negative and sum to 1.
        """
        total = sum(weights.values())
        if min(weights.values(), default=-1) < 0 or abs(total - 1) > 1e-6:
            raise ValueError(f"weights {dict(weights)} do not sum to 1")
        with self._lock:
            self._weights = {w: x for w, x in weights.items() if x > 0}
            # A way that is given up takes its credit with it.
            kept = {w: self._credit.get(w, 0.0) for w in self._weights}
            rest = sum(kept.values()) / len(kept)
            self._credit = {w: x - rest for w, x in kept.items()}

    def choose(
        self,
        num_samples: int,
        has_room: Callable[[T], bool],
        avoid: Collection[T] = (),
    ) -> T | None:
        """Deals one span.

        Args:
            num_samples: of the span.
            has_room: whether a way can take a span now.
            avoid: ways that this span must not go, though it counts for
                what they are owed; not all of them.

        Returns:
            The way owed most among those with room; None to wait, when
            only ways too far ahead of their share have room.
        """
        with self._lock:
            owed = {
                route: self._credit[route] + weight * num_samples
                for route, weight in self._weights.items()
            }
            allowed = [route for route in owed if route not in avoid] or list(
                owed
            )
            base = 0.0
            if avoid:
                # Among themselves, those that are left keep to their shares.
                base = sum(owed[route] for route in allowed) / len(allowed)
            self._largest = max(self._largest, num_samples)
            for route in sorted(allowed, key=lambda w: owed[w], reverse=True):
                after = owed[route] - num_samples
                if after < base - MAX_AHEAD_SPANS * num_samples:
                    return None
                if has_room(route):
                    credit = {**owed, route: after}
                    self._credit = self._bounded(credit) if avoid else credit
                    return route
            return None

    def _bounded(self, credit: Mapping[T, float]) -> dict[T, float]:
        """What is owed for having been avoided is a few spans at most."""
        most = MAX_AHEAD_SPANS * self._largest
        if max(credit.values()) <= most:
            return dict(credit)
        cut = {route: min(owed, most) for route, owed in credit.items()}
        rest = sum(cut.values()) / len(cut)
        return {route: owed - rest for route, owed in cut.items()}


def straggling_routes(
    weights: Mapping[T, float],
    span_seconds: Mapping[T, float],
    rate: float,
    samples_left: int,
    unfinished: Mapping[T, float],
) -> set[T]:
    """Ways on which the next span would come after everything else.

    A way's own spans come before it by themselves: they are not what the
    others are still busy with.

    Args:
        weights: by way.
        span_seconds: until one more span of a way would be done with; a
            way not named is not known to be slow.
        rate: samples per second of all ways together.
        samples_left: in this epoch: not dealt yet, under way, or not yet
            taken by the loop, which may be what all wait for.
        unfinished: samples by way, of these, that were dealt to it.

    Returns:
        Never all of them: at least the fastest stays.
    """
    late = {
        route
        for route, weight in weights.items()
        if span_seconds.get(route, 0.0) * (1 - weight) * rate
        > samples_left - unfinished.get(route, 0.0)
    }
    if late and len(late) == len(weights):
        late.remove(min(late, key=lambda route: span_seconds[route]))
    return late
