"""Policies: how many GPUs each job gets.

They take the jobs that have arrived and are not complete, in the order of
their arrival, and the number of GPUs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from benchmarks.scheduling.jobs import Job


@dataclass(eq=False)
class Run:
    """State of a job in a cluster."""

    job: Job
    steps_left: int
    gpus: Sequence[int] = ()
    step_seconds: float = 0.0
    end: float = math.inf
    """Time of its last step, if it keeps its GPUs."""
    pause_seconds: float = 0.0
    """Cost of another number of GPUs; 0 before the first start."""

    def seconds(self, size: int) -> float:
        """Time to completion with so many GPUs from now on."""
        pause = 0.0 if size == len(self.gpus) else self.pause_seconds
        return pause + self.steps_left * self.job.step_seconds(size)


Runs = Sequence[Run]
Sizes = Counter[Run]
Policy = Callable[[Runs, int], Sizes]


def gang_fifo(runs: Runs, num_gpus: int) -> Sizes:
    """Starts jobs in order; one that does not fit blocks those behind it."""
    sizes = Counter({run: len(run.gpus) for run in runs})
    for run in runs:
        if not sizes[run]:
            if sizes.total() + run.job.gpus > num_gpus:
                break
            sizes[run] = run.job.gpus
    return sizes


def gang_priority(runs: Runs, num_gpus: int) -> Sizes:
    """The same by weight, then arrival."""
    return gang_fifo(sorted(runs, key=lambda run: -run.job.weight), num_gpus)


def gang_srtf(runs: Runs, num_gpus: int) -> Sizes:
    """Shortest remaining time first, passing over what does not fit."""
    return _fitting(_shortest_first(runs), num_gpus)


def gang_least_work(runs: Runs, num_gpus: int) -> Sizes:
    """The same by GPU-seconds; only to compare with single iterations."""

    def work(run: Run) -> float:
        return run.job.gpus * run.seconds(run.job.gpus)

    return _fitting(sorted(runs, key=work), num_gpus)


def _fitting(runs: Runs, num_gpus: int) -> Sizes:
    sizes = Sizes()
    for run in runs:
        if sizes.total() + run.job.gpus <= num_gpus:
            sizes[run] = run.job.gpus
    return sizes


def _shortest_first(runs: Runs) -> Runs:
    return sorted(runs, key=lambda run: run.seconds(run.job.gpus))


def fair_shares(runs: Runs, num_gpus: int) -> Sizes:
    """The job with the fewest GPUs for its weight gets its next size."""
    sizes = Sizes()
    queue = sorted((0.0, -run.job.weight, i, 1) for i, run in enumerate(runs))
    while queue:
        _, weight, i, size = heappop(queue)
        more = size - sizes[runs[i]]
        if size in runs[i].job.sizes and sizes.total() + more <= num_gpus:
            sizes[runs[i]] = size
            heappush(queue, (size / -weight, weight, i, 2 * size))
    return sizes


def elastic_srtf(runs: Runs, num_gpus: int) -> Sizes:
    """Shortest remaining time first, with sizes that spare those behind.

    More GPUs shorten a job's time, but cost more GPU-seconds, which delay all
    behind it: the chosen size has the least sum of both.
    """
    sizes = Sizes()
    for place, run in enumerate(_shortest_first(runs), 1):
        delayed = (len(runs) - place) / num_gpus
        free = num_gpus - sizes.total()
        sizes[run] = min(
            (size for size in run.job.sizes if size <= free),
            key=lambda size: run.seconds(size) * (1 + delayed * size),
            default=0,
        )
    return sizes


POLICIES = {
    "gang FIFO": gang_fifo,
    "gang priority": gang_priority,
    "gang SRTF": gang_srtf,
    "fair shares": fair_shares,
    "elastic SRTF": elastic_srtf,
}
