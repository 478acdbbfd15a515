"""Runs single nodes of jobs' steps on the GPUs of a cluster.

After JigSaw (arXiv 2111.10672), whose algorithm is not published: the rules
are ours.  A task is a virtual node of a step.  All tasks of a step end, and
their GPUs synchronise, before the job's next step begins; meanwhile the GPUs
compute for others.  A job has copies on at most as many GPUs as it asks for,
and runs there.  A free GPU runs the longest task of the first job in an order
that can run there; tasks are not interrupted.  If a new copy does not fit into
the memory, those used least recently leave.  All copies follow all steps, at
no cost.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import count
from math import gcd
from typing import NamedTuple

from benchmarks.scheduling.jobs import GPUS_PER_NODE, Job, fewest_nodes

BACKWARD_RATIO = 2.0
"""Seconds of a whole backward over those of a forward pass: it multiplies
twice, for gradients of inputs and of weights."""


class Costs(NamedTuple):
    """Seconds before a task."""

    switch: float
    """The GPU has computed for another job."""
    load: float
    """The GPU gets a copy of the job."""


class Task(NamedTuple):
    """An entry of the log."""

    start: float
    end: float
    job: str
    step: int
    node: int
    gpu: int
    evicted: Sequence[str] = ()
    """Jobs whose copies have left the GPU for this one's."""


@dataclass(frozen=True)
class NodeJob:
    """A job with virtual nodes, of which each step is ``block`` steps."""

    job: Job
    nodes: int
    max_segments: int = 1
    block: int = 1

    @property
    def segments(self) -> int:
        """The most that divide its nodes."""
        return gcd(self.nodes, self.max_segments)

    @cached_property
    def steps(self) -> int:
        return -(-self.job.steps // self.block)

    @cached_property
    def memory(self) -> float:
        """Part of a GPU's memory; that of a whole backward."""
        return self.job.memory

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of a step with a whole backward on all its GPUs."""
        return self._block(self.job.step_seconds(self.job.gpus))

    def sync_seconds(self, nodes: int) -> float:
        """Seconds behind a step of GPUs on so many nodes of the cluster."""
        return self._block(self.job.sync_seconds(nodes))

    def _block(self, seconds: float) -> float:
        return self.job.steps / self.steps * seconds

    def depth(self, step: int, node: int) -> int:
        """First segment that is computed backwards: 0, 1, 3, 2 in turn."""
        turn = node // (self.nodes // self.segments) + step
        turn %= self.segments
        return turn ^ turn >> 1

    def seconds(self, step: int, node: int) -> float:
        """Seconds of a task."""
        return self._by_depth[self.depth(step, node)]

    @cached_property
    def _by_depth(self) -> list[float]:
        fewest = self.sync_seconds(fewest_nodes(self.job.gpus))
        whole = (self.step_seconds - fewest) * self.job.gpus / self.nodes
        forward = whole / (1 + BACKWARD_RATIO)
        segment = (whole - forward) / self.segments
        return [
            forward + segment * kept for kept in range(self.segments, 0, -1)
        ]


@dataclass(eq=False)
class Training:
    """State of a job."""

    job: NodeJob
    step: int = 0
    waiting: list[int] = field(default_factory=list)
    num_left: int = 0
    """Tasks of the step that have not ended."""
    workers: set[int] = field(default_factory=set)
    """GPUs with a copy."""
    used: set[int] = field(default_factory=set)
    """Nodes of the cluster that compute this step."""


def least_work_first(run: Training) -> float:
    """GPU-seconds that whole steps would take."""
    left = run.job.steps - run.step
    return left * run.job.step_seconds * run.job.job.gpus


def least_advanced_first(run: Training) -> float:
    """Part of the steps that is complete."""
    return run.step / run.job.steps


class Iterations:
    """GPUs, an order of jobs, and costs."""

    def __init__(
        self, num_gpus: int, order: Callable[[Training], float], costs: Costs
    ) -> None:
        self._order, self._costs, self._now = order, costs, 0.0
        self._free = {*range(num_gpus)}
        self._copies: list[dict[str, Training]] = [{} for _ in range(num_gpus)]
        """Jobs in a GPU's memory, the last used last."""
        self._last = [""] * num_gpus
        self._ready: list[Training] = []
        """Jobs that have tasks to run, in order."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._log: list[Task] = []

    def run(self, jobs: Iterable[NodeJob]) -> list[Task]:
        """All tasks, in the order of their starts."""
        for job in jobs:
            self._at(job.job.arrival, partial(self._begin, Training(job)))
        while self._events:
            self._now = self._events[0][0]
            while self._events and self._events[0][0] == self._now:
                heappop(self._events)[-1]()
            while self._free and (task := next(self._startable(), None)):
                self._start(*task)
        return self._log

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heappush(self._events, (time, next(self._numbers), act))

    def _begin(self, run: Training) -> None:
        if run.step < run.job.steps:
            nodes, seconds = range(run.job.nodes), run.job.seconds
            run.waiting = sorted(nodes, key=partial(seconds, run.step))
            run.num_left, run.used = run.job.nodes, set()
            insort(self._ready, run, key=self._order)
            return
        for gpu in run.workers:
            del self._copies[gpu][run.job.job.name]

    def _startable(self) -> Iterator[tuple[Training, int]]:
        for run in self._ready:
            if gpus := self._free & run.workers:
                yield run, min(gpus, key=partial(self._delay, run))
            elif len(run.workers) < run.job.job.gpus:
                yield run, min(self._free, key=partial(self._distance, run))

    def _delay(self, run: Training, gpu: int) -> float:
        if gpu not in run.workers:
            return self._costs.load
        is_last = self._last[gpu] == run.job.job.name
        return 0.0 if is_last else self._costs.switch

    def _distance(self, run: Training, gpu: int) -> tuple[bool, float, int]:
        """Prefers nodes with workers, then empty memory."""
        node = gpu // GPUS_PER_NODE
        nodes = {gpu // GPUS_PER_NODE for gpu in run.workers}
        return node not in nodes, self._held(gpu), gpu

    def _held(self, gpu: int) -> float:
        return sum(run.job.memory for run in self._copies[gpu].values())

    def _start(self, run: Training, gpu: int) -> None:
        name, node = run.job.job.name, run.waiting.pop()
        if not run.waiting:
            self._ready.remove(run)
        end = self._now + self._delay(run, gpu)
        end += run.job.seconds(run.step, node)
        copies, evicted = self._copies[gpu], []
        copies.pop(name, None)
        copies[name] = run
        while self._held(gpu) > 1:
            evicted.append(next(iter(copies)))
            copies.pop(evicted[-1]).workers.remove(gpu)
        task = (name, run.step, node, gpu, evicted)
        self._log.append(Task(self._now, end, *task))
        self._free.remove(gpu)
        self._last[gpu] = name
        run.workers.add(gpu)
        run.used.add(gpu // GPUS_PER_NODE)
        self._at(end, partial(self._end, run, gpu))

    def _end(self, run: Training, gpu: int) -> None:
        self._free.add(gpu)
        run.num_left -= 1
        if not run.num_left:
            run.step += 1
            seconds = run.job.sync_seconds(len(run.used))
            self._at(self._now + seconds, partial(self._begin, run))
