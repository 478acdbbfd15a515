"""Runs jobs on the GPUs of a cluster, and logs who has which and when.

Events have ``time``, ``job``, ``gpus`` and ``event``: a "start" with
``step_seconds``, or a "stop" with the job's ``steps`` until then.  A resize is
a stop and a start.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import simpy

from benchmarks.scheduling.jobs import GPUS_PER_NODE, Job
from benchmarks.scheduling.policies import Policy, Run

Event = dict[str, Any]
Process = Generator[simpy.Event, Any, None]
ROUNDING = 1e-6
"""Part of a step by which sums of times may differ."""


class Cluster:
    """GPUs, of which each node has four, and a policy."""

    def __init__(self, num_gpus: int, policy: Policy, pause: float) -> None:
        self._policy, self._pause_seconds = policy, pause
        self._free = {*range(num_gpus)}
        self._env = simpy.Environment()
        self._runs: list[Run] = []
        self._log: list[Event] = []

    def run(self, jobs: Iterable[Job]) -> list[Event]:
        """Events from the jobs' arrivals to their last steps."""
        for job in jobs:
            self._env.process(self._arrive(job))
        self._env.run()
        return self._log

    def _arrive(self, job: Job) -> Process:
        yield self._env.timeout(job.arrival)
        self._runs.append(Run(job, job.steps))
        self._decide()

    def _train(self, run: Run, end: float) -> Process:
        yield self._env.timeout(end - self._env.now)
        if run.end == end:  # It has kept its GPUs.
            run.steps_left = 0
            self._stop(run)
            self._runs.remove(run)
            self._decide()

    def _decide(self) -> None:
        for run in self._runs:
            if run.gpus:
                steps = (run.end - self._env.now) / run.step_seconds - ROUNDING
                # Before the first step, a pause is left, too.
                run.steps_left = min(run.steps_left, math.ceil(steps))
        # Others end at this instant.
        runs = [run for run in self._runs if run.steps_left]
        num_gpus = len(self._free) + sum(len(run.gpus) for run in runs)
        sizes = self._policy(runs, num_gpus)
        changed = [run for run in runs if sizes[run] != len(run.gpus)]
        for run in changed:
            if run.gpus:
                self._stop(run)
        for run in sorted(changed, key=lambda run: -sizes[run]):
            if sizes[run]:
                self._start(run, sizes[run])

    def _start(self, run: Run, size: int) -> None:
        run.gpus = place(self._free, size)
        self._free.difference_update(run.gpus)
        nodes = len({gpu // GPUS_PER_NODE for gpu in run.gpus})
        run.step_seconds = run.job.step_seconds(size, nodes)
        seconds = run.pause_seconds + run.steps_left * run.step_seconds
        run.end = self._env.now + seconds
        self._env.process(self._train(run, run.end))
        self._write("start", run, step_seconds=run.step_seconds)

    def _stop(self, run: Run) -> None:
        self._write("stop", run, steps=run.job.steps - run.steps_left)
        self._free.update(run.gpus)
        run.gpus, run.end = (), math.inf
        run.pause_seconds = self._pause_seconds

    def _write(self, event: str, run: Run, **more: float) -> None:
        fixed = {"event": event, "job": run.job.name, "gpus": run.gpus}
        self._log.append({"time": self._env.now, **fixed, **more})


def place(free: set[int], size: int) -> Sequence[int]:
    """Chooses GPUs of few nodes, and of these the fullest that suffice."""
    nodes = defaultdict(list)
    for gpu in sorted(free):
        nodes[gpu // GPUS_PER_NODE].append(gpu)
    gpus: list[int] = []
    while missing := size - len(gpus):
        over = {node: len(nodes[node]) - missing for node in nodes}
        node = min(over, key=lambda node: (over[node] < 0, abs(over[node])))
        gpus += nodes.pop(node)[:missing]
    return gpus
