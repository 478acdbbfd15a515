"""Bounds that the seconds of stages set (pure).

They are read from what :mod:`benchmarks.stages` wrote, and it imports nothing
of HAPI.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.bound import OF_BOUND, STREAM, WORTH, Bound, Route, bound_of

LINKS = (0.1, 0.25, 1.0, 2.0, 10.0)
"""Times the byte rate at which streaming keeps the client's core busy."""


def ways_of(
    section: Mapping[str, Any], network: Mapping[str, Any], kind: str
) -> list[Route]:
    """All that a sample may do: streaming, and each boundary.

    Args:
        section: of :func:`benchmarks.stages.measure`, for what a byte takes.
        network: one of the section's networks.
        kind: of the freeze.
    """
    jpeg = section["jpeg_bytes"]
    receive = section["receive_seconds_per_byte"]["median"]
    serve = section["serve_seconds_per_byte"] * jpeg
    decode = network["decode_seconds"]["median"]
    freeze = network["freezes"][kind]
    train = freeze["train_seconds"]["median"]
    frozen = [b for b in network["boundaries"] if kind in b["rest_seconds"]]
    whole = frozen[-1]["prefix_seconds"]["median"]
    return [
        Route(STREAM, serve, receive * jpeg + decode + whole + train, jpeg),
        *(
            Route(
                boundary["name"],
                serve + decode + boundary["prefix_seconds"]["median"],
                receive * boundary["float32_bytes"]
                + boundary["rest_seconds"][kind]["median"]
                + train,
                boundary["float32_bytes"],
            )
            for boundary in frozen
        ),
    ]


def bound_at(
    section: Mapping[str, Any],
    network: Mapping[str, Any],
    kind: str,
    factor: float,
    crowding: float = 0.0,
) -> Bound:
    """The bound at a link.

    Args:
        section, network, kind: as of :func:`ways_of`.
        factor: of the byte rate at which streaming keeps a core busy.
        crowding: as of :func:`benchmarks.bound.bound_of`.
    """
    ways = ways_of(section, network, kind)
    return bound_of(ways, factor * _saturating(ways[0]), crowding)


def crowding_of(network: Mapping[str, Any]) -> float | None:
    """Of a network; None where it was not measured."""
    found = network.get("crowding")
    return None if found is None else max(0.0, float(found["median"]))


def bounds(
    section: Mapping[str, Any], network: Mapping[str, Any], kind: str
) -> dict[str, Any]:
    """The bound at each of :data:`LINKS`; arguments as :func:`ways_of`."""
    streaming, *_ = ways_of(section, network, kind)
    crowding = crowding_of(network)
    saturating = _saturating(streaming)
    return {
        "saturating_bytes_per_second": saturating,
        "one_core_per_second": 1 / streaming.client_seconds,
        "links": [
            {
                "factor": factor,
                "bytes_per_second": factor * saturating,
                **_told(bound_at(section, network, kind, factor)),
                "crowded": None
                if crowding is None
                else _figures(
                    bound_at(section, network, kind, factor, crowding)
                ),
            }
            for factor in LINKS
        ],
    }


def _saturating(streaming: Route) -> float:
    """Bytes per second."""
    return streaming.link_bytes / streaming.client_seconds


def _figures(found: Bound) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "speedup": found.speedup}


def _told(found: Bound) -> dict[str, Any]:
    return {
        "bound": _figures(found),
        "goal": OF_BOUND * found.speedup if found.speedup >= WORTH else None,
    }
