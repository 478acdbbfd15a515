"""Max-min fair shares of working memory for forward passes."""

from __future__ import annotations

import math
from collections.abc import Sequence


def max_min_level(demands: Sequence[int], capacity: int) -> float:
    """Returns the max-min fair level: each gets its demand, or the level.

    Progressive filling (Bertsekas and Gallager, *Data Networks*, 6.5.2): the
    rest of a demand that is smaller than an equal part goes to the others.

    Args:
        demands: demands in bytes, not negative.
        capacity: bytes to share.

    Returns:
        The level in bytes; infinite if all demands fit.
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
    """Returns the bytes that one forward pass may take.

    Args:
        demand: bytes of the pass.
        others: demands of all other kinds of passes.
        capacity: bytes for all passes that run at a time.
        num_at_once: number of passes that run at a time.  They are taken to
            be this one and the largest others, or copies of the largest one
            if there are too few.
    """
    largest = sorted(others, reverse=True)[: num_at_once - 1]
    demands = [demand, *largest]
    demands += [max(demands)] * (num_at_once - len(demands))
    return int(min(demand, max_min_level(demands, capacity)))
