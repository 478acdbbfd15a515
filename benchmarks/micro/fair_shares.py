"""Max-min fair shares, and Jain's index of fairness.  No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Amounts = Mapping[str, float]


def max_min_shares(
    demands: Amounts, capacity: float, weights: Amounts | None = None
) -> dict[str, float]:
    """Weighted max-min fair shares, by water-filling.

    Nobody gets more than its demand, and nobody could get more without taking
    it from somebody who has less, by weight (Bertsekas and Gallager, Data
    Networks, 6.5.2).

    Raises:
        ValueError: a negative amount, or a weight that is not above 0.
    """
    weight = {name: (weights or {}).get(name, 1.0) for name in demands}
    if min(capacity, *demands.values()) < 0 or min(weight.values()) <= 0:
        raise ValueError(f"bad amounts: {demands}, {capacity}, {weight}")
    shares: dict[str, float] = {}
    left = capacity
    # The smallest demand, by weight, is satisfied first.
    waiting = sorted(demands, key=lambda name: demands[name] / weight[name])
    for position, name in enumerate(waiting):
        others = sum(weight[waiter] for waiter in waiting[position:])
        shares[name] = min(demands[name], left * weight[name] / others)
        left -= shares[name]
    return {name: shares[name] for name in demands}


def jain_index(values: Sequence[float]) -> float:
    """``(sum x)^2 / (n * sum x^2)``: 1 if all are equal, 1/n for one alone.

    See DEC-TR-301 (Jain, Chiu, Hawe, 1984).

    Raises:
        ValueError: no values, negative values, or only zeros.
    """
    if not values or min(values) < 0 or not any(values):
        raise ValueError(
            f"{list(values)}: values of 0 or more are needed, one above 0"
        )
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares)
