"""Verifies the log of a simulation, from the log and the jobs alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.scheduling.jobs import GPUS_PER_NODE, Job

Event = Mapping[str, Any]
ROUNDING_SECONDS = 1e-4


def completions(
    log: Iterable[Event], jobs: Iterable[Job], num_gpus: int, pause: float
) -> dict[str, float]:
    """Times of the jobs' last steps.

    Raises:
        ValueError: with the first event that cannot be true.
    """
    by_name, free = {job.name: job for job in jobs}, {*range(num_gpus)}
    starts: dict[str, Event] = {}
    steps: dict[str, int] = {}
    ends: dict[str, float] = {}
    event: Event = {"time": 0.0}

    def require(is_true: bool, text: str) -> None:
        if not is_true:
            raise ValueError(f"{text}: {event}")

    for later in log:
        require(later["time"] >= event["time"], "followed by an earlier event")
        event, time, name = later, later["time"], later["job"]
        require(name in by_name, "unknown job")
        job, gpus, size = by_name[name], {*event["gpus"]}, len(event["gpus"])
        if event["event"] == "start":
            require(name not in starts, "has GPUs")
            require(time >= job.arrival, "has not arrived")
            require(size in (job.gpus, *job.sizes), "wrong number of GPUs")
            require(len(gpus & free) == size, "GPUs that are not free")
            nodes = len({gpu // GPUS_PER_NODE for gpu in gpus})
            rate = job.step_seconds(size, nodes)
            require(event["step_seconds"] == rate, "wrong rate")
            starts[name], free = event, free - gpus
            continue
        require(name in starts, "has no GPUs")
        start = starts.pop(name)
        require(event["gpus"] == start["gpus"], "has other GPUs")
        count = event["steps"] - steps.get(name, 0)
        seconds = time - start["time"] - (pause if name in steps else 0.0)
        rest = seconds - count * start["step_seconds"]
        require(count >= 0 and event["steps"] <= job.steps, "wrong steps")
        require(not count or rest > -ROUNDING_SECONDS, "too many steps")
        most = start["step_seconds"] if event["steps"] < job.steps else 0.0
        require(rest < most + ROUNDING_SECONDS, "too few steps")
        steps[name], free = event["steps"], free | gpus
        if steps[name] == job.steps:
            ends[name] = time
    if starts or ends.keys() != by_name.keys():
        raise ValueError(f"not complete: {by_name.keys() - ends.keys()}")
    return ends
