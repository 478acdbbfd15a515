"""Which span goes which way, so that the whole follows the plan (pure).

Each span credits every way with its samples times the way's weight, and is
charged to the way it goes: smooth weighted round robin. The debt of a way
is bounded, so after any number of spans the samples that went a way differ
from its weight's share by a few spans only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_DEBT_SPANS = 2.0
"""How far a way may run ahead of its share while another one is full."""


class Mixer(Generic[T]):
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
        self, num_samples: int, has_room: Callable[[T], bool]
    ) -> T | None:
        """Deals one span.

        Args:
            num_samples: of the span.
            has_room: whether a way can take a span now.

        Returns:
            The way owed most among those with room; None to wait, when
            only ways too far ahead of their share have room.
        """
        with self._lock:
            owed = {
                way: self._credit[way] + weight * num_samples
                for way, weight in self._weights.items()
            }
            for way in sorted(owed, key=lambda w: owed[w], reverse=True):
                after = owed[way] - num_samples
                if after < -MOST_DEBT_SPANS * num_samples:
                    return None
                if has_room(way):
                    self._credit = {**owed, way: after}
                    return way
            return None
