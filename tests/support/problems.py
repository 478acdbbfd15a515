"""Planner problems with defaults for fields that a test does not need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hapi_splitter.planner.problem import UNITS, Option, Problem, Resource


def problem_of(
    options: Iterable[Option],
    capacities: Mapping[str, float],
    *,
    last_cut: int = 1,
    server_threads: int = 0,
    client_threads: int = 0,
) -> Problem:
    """Builds a problem of one sample and one epoch, without memory."""
    return Problem(
        resources=tuple(
            Resource(name, capacity, UNITS[name])
            for name, capacity in capacities.items()
        ),
        options=tuple(options),
        num_samples=1,
        epochs=1.0,
        server_limit_bytes=0,
        client_limit_bytes=0,
        last_cut=last_cut,
        server_threads=server_threads,
        client_threads=client_threads,
    )
