"""How much working memory a forward pass may take: max-min fair grants."""

from __future__ import annotations

import math
from collections.abc import Sequence


def water_level(demands: Sequence[int], capacity: int) -> float:
    """The max-min fair level: each gets its demand, or the level.

    Progressive filling (Bertsekas and Gallager, *Data Networks*, 6.5.2): who
    asks for less than an equal part leaves the rest to the others.

    Args:
        demands: bytes that each would take, not negative.
        capacity: bytes to be shared.

    Returns:
        Bytes; infinite where all demands fit.
    """
    left = float(capacity)
    ascending = sorted(demands)
    for number, demand in enumerate(ascending):
        level = left / (len(ascending) - number)
        if demand > level:
            return max(level, 0.0)
        left -= demand
    return math.inf


def granted_bytes(
    demand: int, others: Sequence[int], capacity: int, num_at_once: int
) -> int:
    """What one forward pass may take, at most its demand.

    Args:
        demand: bytes it would take.
        others: demands of all other kinds of passes there may be.
        capacity: bytes for all passes that run at a time.
        num_at_once: how many do: this one and the largest others, or copies
            of the largest of all where there are too few.
    """
    largest = sorted(others, reverse=True)[: num_at_once - 1]
    demands = [demand, *largest]
    demands += [max(demands)] * (num_at_once - len(demands))
    return int(min(demand, water_level(demands, capacity)))
