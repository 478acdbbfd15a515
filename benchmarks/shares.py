"""Fair shares, and how near something came to them (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Amounts = Mapping[str, float]


def max_min_shares(
    demands: Amounts, capacity: float, weights: Amounts | None = None
) -> dict[str, float]:
    """Weighted max-min fair shares, by water-filling.

    Nobody has more than it asks for; what such a one leaves is for the
    others by their weights; nobody could have more without somebody else who
    has less, by its weight, losing (Bertsekas and Gallager, Data Networks,
    6.5.2).

    Args:
        demands: of each name, 0 or more, in the unit of ``capacity``.
        capacity: 0 or more.
        weights: above 0; 1 for names that are missing.

    Raises:
        ValueError: naming an amount that cannot be.
    """
    weight = {name: (weights or {}).get(name, 1.0) for name in demands}
    _check(demands, capacity, weight)
    shares: dict[str, float] = {}
    left = capacity
    # Who asks for the least, by weight, is the first to have enough.
    waiting = sorted(demands, key=lambda name: demands[name] / weight[name])
    for position, name in enumerate(waiting):
        others = sum(weight[each] for each in waiting[position:])
        shares[name] = min(demands[name], left * weight[name] / others)
        left -= shares[name]
    return {name: shares[name] for name in demands}


def _check(demands: Amounts, capacity: float, weights: Amounts) -> None:
    if not 0 <= capacity < math.inf:
        raise ValueError(f"the capacity is {capacity}; 0 or more")
    for name, demand in demands.items():
        if not 0 <= demand < math.inf:
            raise ValueError(f"{name} demands {demand}; 0 or more")
        if not 0 < weights[name] < math.inf:
            raise ValueError(f"{name} weighs {weights[name]}; above 0")


def jain_index(values: Sequence[float]) -> float:
    """``(sum x)^2 / (n * sum x^2)``: 1 when all are equal, 1/n for one alone.

    With each value over what is fair for it, as of DEC-TR-301 (Jain, Chiu,
    Hawe, 1984).

    Raises:
        ValueError: without values, or with negative ones, or all are 0.
    """
    if not values or min(values) < 0 or not any(values):
        raise ValueError(
            f"{list(values)}: values of 0 or more are needed, one above 0"
        )
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares)
