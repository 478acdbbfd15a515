"""The most samples per second that two tiers and a link allow (pure).

Each tier has one core.  A sample is streamed, or takes one of the ways in
which the storage tier computes a part; a mix gives each way a rate, and uses
up neither core nor the link:

    maximise the sum of all rates, such that for both cores and the link
    the sum over the ways of rate x use is at most what there is of it

Where both cores are of one machine, a second of work on one may also take a
part of a second from the other (``crowding``).

It imports nothing of HAPI, and knows nothing of its planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scipy.optimize import linprog

STREAM = "stream"
MIN_PART = 1e-6
"""A smaller part of the optimum is the solver's rounding."""
WORTH = 1.2
"""From this bound on there is something to win."""
OF_BOUND = 0.85
"""Of it a measured speed-up should be."""


@dataclass(frozen=True)
class Route:
    """What a sample takes that goes this way.

    Attributes:
        name: ``stream``, or the boundary up to which storage computes.
        storage_seconds: of the storage tier's core.
        client_seconds: of the client tier's core.
        link_bytes: on the link.
    """

    name: str
    storage_seconds: float
    client_seconds: float
    link_bytes: float


@dataclass(frozen=True)
class Bound:
    """The optimum, beside streaming.

    Attributes:
        samples_per_second: of the best mix.
        streaming: samples per second of streaming alone.
        mix: part of the samples by way, only ways that have one.
    """

    samples_per_second: float
    streaming: float
    mix: Mapping[str, float]

    @property
    def speedup(self) -> float:
        return self.samples_per_second / self.streaming


def bound_of(
    ways: Sequence[Route], link: float, crowding: float = 0.0
) -> Bound:
    """The best mix of ``ways``.

    Args:
        ways: with one named ``stream``.
        link: bytes per second.
        crowding: by how much longer a core's work takes while the other
            one works; 0.1 is ten per cent.

    Raises:
        ValueError: without streaming, or when a way takes nothing at all.
    """
    streaming = next((way for way in ways if way.name == STREAM), None)
    if streaming is None:
        raise ValueError(
            f"no way is {STREAM!r}: {', '.join(way.name for way in ways)}"
        )
    ways = [crowded(way, crowding) for way in ways]
    alone = [rate_of(way, link) for way in ways]
    # In samples that the way alone could do, all numbers are near 1.
    found = linprog(
        [-rate for rate in alone],
        A_ub=[
            [rate * use for rate, use in zip(alone, uses, strict=True)]
            for uses in (
                [way.storage_seconds for way in ways],
                [way.client_seconds for way in ways],
                [way.link_bytes / link for way in ways],
            )
        ],
        b_ub=[1.0] * 3,
        method="highs",
    )
    rates = [
        part * rate
        for part, rate in zip(map(float, found.x), alone, strict=True)
    ]
    whole = sum(rates)
    return Bound(
        whole,
        rate_of(crowded(streaming, crowding), link),
        {
            way.name: rate / whole
            for way, rate in zip(ways, rates, strict=True)
            if rate > MIN_PART * whole
        },
    )


def crowded(way: Route, crowding: float) -> Route:
    """What a way takes of both cores, where each disturbs the other."""
    return replace(
        way,
        storage_seconds=way.storage_seconds + crowding * way.client_seconds,
        client_seconds=way.client_seconds + crowding * way.storage_seconds,
    )


def rate_of(way: Route, link: float) -> float:
    """Samples per second of one way alone.

    Raises:
        ValueError: when it takes nothing.
    """
    longest = max(
        way.storage_seconds, way.client_seconds, way.link_bytes / link
    )
    if longest <= 0:
        raise ValueError(f"{way.name} takes neither a core nor the link")
    return 1 / longest
