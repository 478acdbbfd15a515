"""Verifies the log of scheduled iterations, from the log and the jobs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.scheduling.checker import ROUNDING_SECONDS
from benchmarks.scheduling.iterations import Costs, NodeJob, Task
from benchmarks.scheduling.jobs import GPUS_PER_NODE


@dataclass
class Progress:
    """Last step of a job, and when the next one may begin."""

    job: NodeJob
    ready: float
    begin: float = 0.0
    """Earliest start of the last step's tasks."""
    step: int = -1
    nodes: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    end: float = 0.0

    @property
    def is_complete(self) -> bool:
        """The last step has all its nodes."""
        last = self.step == self.job.steps - 1
        return last and len(self.nodes) == self.job.nodes


@dataclass
class GPU:
    """When it is free, and whose copies it has."""

    end: float = 0.0
    last: str = ""
    copies: set[str] = field(default_factory=set)


def iteration_ends(
    log: Iterable[Task], jobs: Iterable[NodeJob], num_gpus: int, costs: Costs
) -> dict[str, float]:
    """Times of the jobs' last steps, with their synchronisation.

    Raises:
        ValueError: with the first task that cannot be true.
    """
    runs = {job.job.name: Progress(job, job.job.arrival) for job in jobs}
    gpus, now = [GPU() for _ in range(num_gpus)], 0.0

    def require(is_true: bool, text: str) -> None:
        if not is_true:
            raise ValueError(f"{text}: {task}")

    for task in log:
        require(task.start >= now, "follows a later start")
        now, name = task.start, task.job
        require(name in runs, "unknown job")
        require(task.gpu in range(num_gpus), "unknown GPU")
        run, gpu = runs[name], gpus[task.gpu]
        if run.step < 0 or len(run.nodes) == run.job.nodes:
            run.step, run.begin = run.step + 1, run.ready
            run.nodes, run.used = set(), set()
        require(task.step == run.step < run.job.steps, "wrong step")
        new = task.node in range(run.job.nodes) and task.node not in run.nodes
        require(new, "wrong node")
        require(now > run.begin - ROUNDING_SECONDS, "begins too early")
        require(now >= gpu.end, "GPU is in use")

        require(gpu.copies.issuperset(task.evicted), "has no such copy")
        if name not in gpu.copies:
            delay = costs.load
        else:
            delay = 0.0 if gpu.last == name else costs.switch
        gpu.copies = {name, *gpu.copies}.difference(task.evicted)
        gpu.copies -= {
            other
            for other in gpu.copies
            if runs[other].is_complete and runs[other].ready <= now
        }
        memory = sum(runs[other].job.memory for other in gpu.copies)
        require(name in gpu.copies and memory <= 1, "too little memory")
        copies = sum(name in gpu.copies for gpu in gpus)
        require(copies <= run.job.job.gpus, "too many GPUs")

        seconds = task.end - now - delay - run.job.seconds(run.step, task.node)
        require(abs(seconds) < ROUNDING_SECONDS, "wrong seconds")
        gpu.end, gpu.last, run.end = task.end, name, max(run.end, task.end)
        run.nodes.add(task.node)
        run.used.add(task.gpu // GPUS_PER_NODE)
        run.ready = run.end + run.job.sync_seconds(len(run.used))

    missing = [name for name, run in runs.items() if not run.is_complete]
    if missing:
        raise ValueError(f"not complete: {missing}")
    return {name: run.ready for name, run in runs.items()}
