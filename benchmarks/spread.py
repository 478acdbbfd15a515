"""A median and how far the values lie from it (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypedDict


class Spread(TypedDict):
    """Of several rounds: the median, the least and the most."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Of one value or more."""
    return {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
    }
