"""With --iterations: an order of single iterations, after JigSaw.

JigSaw's algorithm (arXiv 2111.10672) is not published; the rules are ours.  A
free GPU computes one virtual node of one step of the job with the fewest
GPU-seconds left, and computes for others while a job synchronises.  With SPB
(partial backward), nodes of a step compute only the last of K equal segments
backwards; a whole backward takes twice as long as a forward pass.  K is the
largest divisor of --segments that divides a job's nodes.  The number of steps
stays: what SPB costs in accuracy is not in these figures.

Jobs are AdaptDL's, and those of --trace on 8 GPUs in the format of Tiresias'
simulator (60_job.csv of github.com/SymbioticLab/Tiresias).  These arrive as
written (density 1), three times as densely, and a third as densely.  Of
AdaptDL's, 32 steps are simulated as one, with 32 times the costs.

gang SRTF        the policy above; a restart costs --load-seconds
gang least work  the same by GPU-seconds left
iterations       one node for each GPU, whole backward
SPB              one node for each GPU: a job of one GPU gains nothing
SPB all          as many nodes as K needs: such a job gains, too
control          SPB, but the job that has done the least part comes first

Keys besides:

load               GPU-seconds of all jobs, if each ran alone, over those
                   between the first and the last arrival, of at least 1 s
gpu_seconds        for which jobs have GPUs, with changes of jobs
with_sync_seconds  gpu_seconds and, of single iterations, those in which a
                   job's GPUs synchronise and may compute for others; gang
                   policies' gpu_seconds have them
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import lcm
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.command_line import clock
from benchmarks.scheduling import policies
from benchmarks.scheduling.checker import completions
from benchmarks.scheduling.iteration_checker import iteration_ends
from benchmarks.scheduling.iterations import (
    Costs,
    Iterations,
    NodeJob,
    least_advanced_first,
    least_work_first,
)
from benchmarks.scheduling.jobs import GPUS_PER_NODE, Job, read_workload
from benchmarks.scheduling.simulation import Cluster
from benchmarks.scheduling.trace import read_trace

ADAPTDL, TRACE_GPUS, DENSITIES = "AdaptDL", 8, (1 / 3, 1.0, 3.0)
KEYS = ("trace", "gpus", "density")
Group = tuple[str, int, float]
Row = dict[str, float]
JCT, MAKESPAN = "mean_jct_seconds", "makespan_seconds"
GPU, SYNC = "gpu_seconds", "with_sync_seconds"
GANG, SPB, CONTROL = "gang SRTF", "SPB", "control"
GANGS = {GANG: policies.gang_srtf, "gang least work": policies.gang_least_work}
ORDERS = {
    "iterations": (least_work_first, False, False),
    SPB: (least_work_first, True, False),
    "SPB all": (least_work_first, True, True),
    CONTROL: (least_advanced_first, True, False),
}
"""Orders of jobs; SPB or not; as many nodes as segments, or as GPUs."""
GOALS = {
    (1 / 3, JCT): 1.02,
    (3.0, JCT): 0.85,
    (3.0, GPU): 0.83,
    (3.0, SYNC): 0.83,
}
"""Highest ratios of SPB to gang SRTF for a trace, by density."""
BLOCK_STEPS, QUICK_JOBS = 32, 20
SWITCH_SECONDS, LOAD_SECONDS = 0.0066, 0.1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of single iterations."""
    add = parser.add_argument_group("single iterations").add_argument
    add("--iterations", action="store_true", help="simulate these instead")
    add("--trace", type=Path, metavar="CSV", help="more jobs, see above")
    text = "(default 4)"
    add("--segments", type=int, choices=(2, 4, 8), default=4, help=text)
    text = (
        "of a GPU from job to job, both in its memory (default 0.0066, the"
        " longest start of PipeSwitch, OSDI 2020)"
    )
    add("--switch-seconds", type=float, default=SWITCH_SECONDS, help=text)
    text = (
        "until a job is in memory (default 0.1, three times the longest"
        " overhead of PipeSwitch: momentum and gradients come with weights)"
    )
    add("--load-seconds", type=float, default=LOAD_SECONDS, help=text)


def goals(group: Group) -> Iterator[tuple[str, str, str, float | None]]:
    """Figures of a scheduler to compare with a baseline's; highest ratios."""
    names = [name for name in (*GANGS, *ORDERS) if name != GANG]
    for name, figure in product(names, (JCT, MAKESPAN, GPU, SYNC)):
        has_goal = name == SPB and group[0] != ADAPTDL
        goal = GOALS.get((group[-1], figure)) if has_goal else None
        yield name, GANG, figure, goal
    yield SPB, CONTROL, JCT, 1.0


def simulate(options: Any) -> dict[tuple[Group, str], dict[int | str, Row]]:
    """Figures by group, scheduler and workload, of logs that can be true."""
    note = clock()
    figures: dict[tuple[Group, str], dict[int | str, Row]] = {}
    for group, workload, jobs in _workloads(options):
        jobs = jobs[:QUICK_JOBS] if options.quick else jobs
        for name in (*GANGS, *ORDERS):
            row = _simulate(name, group, jobs, options)
            figures.setdefault((group, name), {})[workload] = row
        note("{}, {} GPUs, density {:.3g}".format(*group) + f": {workload}")
    return figures


def _workloads(options: Any) -> Iterator[tuple[Group, int, list[Job]]]:
    for gpus, number in product(options.gpus, options.workloads):
        yield (ADAPTDL, gpus, 1.0), number, read_workload(number, gpus)
    if options.trace:
        jobs = read_trace(options.trace, TRACE_GPUS)
        for density in DENSITIES:
            group = (options.trace.name, TRACE_GPUS, density)
            arrivals = (replace(j, arrival=j.arrival / density) for j in jobs)
            yield group, 1, [*arrivals]


def _simulate(name: str, group: Group, jobs: list[Job], options: Any) -> Row:
    simulate = _gang if name in GANGS else _single
    ends, used, waits = simulate(name, group, jobs, options)
    work = sum(j.gpus * j.steps * j.step_seconds(j.gpus) for j in jobs)
    span = jobs[-1].arrival - jobs[0].arrival
    return {
        "load": work / group[1] / max(1.0, span),
        JCT: fmean(ends[job.name] - job.arrival for job in jobs),
        MAKESPAN: max(ends.values()) - jobs[0].arrival,
        GPU: used,
        SYNC: used + waits,
    }


def _gang(
    name: str, group: Group, jobs: list[Job], options: Any
) -> tuple[dict[str, float], float, float]:
    """Ends, GPU-seconds with synchronisation, and none."""
    _, gpus, _ = group
    log = Cluster(gpus, GANGS[name], options.load_seconds).run(jobs)
    used = 0.0
    for entry in log:
        seconds = entry["time"] * len(entry["gpus"])
        used += seconds if entry["event"] == "stop" else -seconds
    return completions(log, jobs, gpus, options.load_seconds), used, 0.0


def _single(
    name: str, group: Group, jobs: list[Job], options: Any
) -> tuple[dict[str, float], float, float]:
    """Ends, GPU-seconds, and those of synchronisation."""
    (trace, gpus, _), (order, is_partial, more) = group, ORDERS[name]
    block = BLOCK_STEPS if trace == ADAPTDL else 1
    segments = options.segments if is_partial else 1
    divided = {
        job.name: NodeJob(
            job, lcm(job.gpus, segments if more else 1), segments, block
        )
        for job in jobs
    }
    costs = Costs(block * options.switch_seconds, block * options.load_seconds)
    log = Iterations(gpus, order, costs).run(divided.values())
    nodes: dict[tuple[str, int], set[int]] = defaultdict(set)
    for task in log:
        nodes[task.job, task.step].add(task.gpu // GPUS_PER_NODE)
    waits = sum(
        divided[job].job.gpus * divided[job].sync_seconds(len(used))
        for (job, _), used in nodes.items()
    )
    ends = iteration_ends(log, divided.values(), gpus, costs)
    return ends, sum(task.end - task.start for task in log), waits
