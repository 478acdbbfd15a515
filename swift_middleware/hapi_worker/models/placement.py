"""On which device a job runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SPREAD_JOBS = 2
"""A device without the model is taken when it has so many jobs fewer: the
copy costs less than waiting behind them."""


@dataclass(frozen=True)
class Place:
    """A device as a job sees it.

    Attributes:
        in_service: whether it takes jobs at all.
        has_model: whether the model is in its memory.
        num_jobs: that hold models there.
        is_late: whether a pass runs there for longer than it may.
    """

    in_service: bool
    has_model: bool
    num_jobs: int
    is_late: bool = False


def places_in_order(places: Sequence[Place]) -> list[int]:
    """Numbers of the devices to try, the best first.

    The least busy one that has the model, unless another one is less busy
    by :data:`SPREAD_JOBS`; then the others, the least busy first.  Those that
    are late come last: their jobs may all have given up.
    """

    def rank(number: int) -> tuple[bool, float, int]:
        place = places[number]
        return place.is_late, _cost(place), number

    usable = [n for n, place in enumerate(places) if place.in_service]
    return sorted(usable, key=rank)


def _cost(place: Place) -> float:
    # Half a job more: at equal cost the model's own device is taken.
    missing = 0.0 if place.has_model else SPREAD_JOBS - 0.5
    return place.num_jobs + missing
