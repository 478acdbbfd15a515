"""One plan for all jobs: what a linear program makes of measured costs (pure).

Costs of a sample are bytes on the link and CPU seconds of each tier's core, by
fixed contender, measured in passes; beside each stands what the speedometers
of the cores read meanwhile (:mod:`benchmarks.speedometer`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.regret import STREAM
from scipy.optimize import linprog

MIN_PART = 1e-3
"""A smaller part of the optimum is the solver's rounding."""

Costs = Mapping[str, Mapping[str, float]]
"""Of a sample by contender: ``link_bytes``, ``storage_seconds``,
``client_seconds``."""
Speeds = Mapping[str, Mapping[str, float]]
"""What the speedometer of each tier read, ``seconds`` and ``used``."""
COST_KEYS = ("link_bytes", "storage_seconds", "client_seconds")
TIERS = {"storage": "storage_seconds", "client": "client_seconds"}


def optimal_mix(costs: Costs, link: float) -> dict[str, float]:
    """Part of the samples by way, as the joint optimum has them.

    Args:
        costs: of a sample.
        link: bytes per second.
    """
    found = _optimum(costs, link)
    whole = sum(found.values())
    kept = {
        way: rate for way, rate in found.items() if rate > MIN_PART * whole
    }
    return {way: rate / sum(kept.values()) for way, rate in kept.items()}


def joint_optimum(
    costs: Costs, link: float, speeds: Speeds | None = None
) -> float:
    """The most samples per second of all jobs together.

    Args:
        costs, link: as for :func:`optimal_mix`.
        speeds: of which the speedometers use something.
    """
    return sum(_optimum(costs, link, speeds).values())


def _optimum(
    costs: Costs, link: float, speeds: Speeds | None = None
) -> dict[str, float]:
    """Samples per second of each way."""
    most = {"link_bytes": link}
    for tier, key in TIERS.items():
        most[key] = 1.0 - (speeds[tier]["used"] if speeds else 0.0)
    found = linprog(
        [-1.0] * len(costs),
        A_ub=[
            [cost[key] / limit for cost in costs.values()]
            for key, limit in most.items()
        ],
        b_ub=[1.0] * len(most),
    )
    return dict(zip(costs, map(float, found.x), strict=True))


def at_speed(passes: Sequence[Mapping[str, Any]], speeds: Speeds) -> Costs:
    """Costs of all passes, in the mean, as they are at other speeds.

    Args:
        passes: by contender, with ``speeds`` of each.
        speeds: of the cores.
    """
    return mean_costs(
        [
            {
                name: scaled_cost(
                    cost,
                    {
                        tier: speeds[tier]["seconds"]
                        / cost["speeds"][tier]["seconds"]
                        for tier in TIERS
                    },
                )
                for name, cost in costs.items()
            }
            for costs in passes
        ]
    )


def dearer(phase: Mapping[str, Any], costs: Costs) -> dict[str, float]:
    """What a phase's samples took of each tier, over what they should.

    Args:
        phase: with ``samples_per_second``, ``used`` and ``by_cut``.
        costs: by contender, ``stream`` or ``cut-N``. A cut without any has
            those of the next one that has.
    """
    known = {cut_of(name): cost for name, cost in costs.items()}
    counts = {int(cut): count for cut, count in phase["by_cut"].items()}
    whole = sum(counts.values())
    found = {}
    for tier, key in TIERS.items():
        each = sum(
            count * known[min(known, key=lambda other: abs(other - cut))][key]
            for cut, count in counts.items()
        )
        took = phase["used"][tier] / phase["samples_per_second"]
        found[tier] = took / (each / whole)
    return found


def mean_costs(
    passes: Sequence[Mapping[str, Any]],
) -> dict[str, dict[str, float]]:
    """Mean of all passes."""
    return {
        name: {
            key: statistics.mean(each[name][key] for each in passes)
            for key in COST_KEYS
        }
        for name in passes[0]
    }


def scaled(costs: Costs, factors: Mapping[str, float]) -> Costs:
    """Costs with those of each tier times a factor."""
    return {name: scaled_cost(cost, factors) for name, cost in costs.items()}


def scaled_cost(
    cost: Mapping[str, float], factors: Mapping[str, float]
) -> dict[str, float]:
    """One contender's, likewise."""
    seconds = {TIERS[tier]: factor for tier, factor in factors.items()}
    return {key: cost[key] * seconds.get(key, 1.0) for key in COST_KEYS}


def cut_of(name: str) -> int:
    """Of a fixed contender."""
    return 0 if name == STREAM else int(name.removeprefix("cut-"))
