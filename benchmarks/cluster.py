"""Simulates policies that give the GPUs of a cluster to training jobs.

    python -m benchmarks.cluster --json cluster.json

Jobs are AdaptDL's eight workloads of 160, with measured step times
(benchmarks/data/adaptdl).  Their batches and steps are fixed.  Nodes have four
GPUs.  Gang policies give a job what it asks for, or nothing.  Elastic policies
give any divisor of its virtual nodes, of which it has the least power of two
>= what it asks for.  A change costs --resize-seconds, a first start nothing.
A checker reads each log, and the command fails if it cannot be true.

Keys of the JSON's rows are means over --seeds random choices of the weights,
which are 1, 5 or 10, and for workload "all" over the workloads:

mean_jct_seconds  from a job's arrival to its last step
makespan_seconds  from the first arrival to the last step of all
restarts          changes of a job's GPUs behind its first start

Ratios are those of two policies' means over all workloads, with the lowest and
the highest of a workload, and the goal.  Policies:

"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import Any

from benchmarks.command_line import exit_status, parse, parser_of, print_table
from benchmarks.record import write_results
from benchmarks.scheduling.checker import completions
from benchmarks.scheduling.jobs import read_workload
from benchmarks.scheduling.policies import POLICIES
from benchmarks.scheduling.simulation import Cluster

JCT, MAKESPAN, ALL = "mean_jct_seconds", "makespan_seconds", "all"
GOALS = (
    ("fair shares", "gang FIFO", JCT, 0.52),
    ("fair shares", "gang priority", JCT, 0.52),
    ("fair shares", "gang SRTF", JCT, None),
    ("fair shares", "gang SRTF", MAKESPAN, 0.85),
    ("elastic SRTF", "gang SRTF", JCT, 0.97),
    ("elastic SRTF", "gang SRTF", MAKESPAN, None),
)
"""Highest ratios of a policy's figure to another's."""
QUICK_JOBS = 20
Row = dict[str, float]


def simulate(gpus: int, workload: int, policy: str, options: Any) -> Row:
    """Mean figures of simulations whose logs can be true."""
    figures = []
    for seed in range(options.seeds):
        jobs = read_workload(workload, gpus, seed)
        jobs = jobs[:QUICK_JOBS] if options.quick else jobs
        log = Cluster(gpus, policy, options.resize_seconds).run(jobs)
        ends = completions(log, jobs, gpus, options.resize_seconds)
        jct = fmean(ends[job.name] - job.arrival for job in jobs)
        makespan = max(ends.values()) - jobs[0].arrival
        restarts = len(log) / 2 - len(jobs)
        figures.append({JCT: jct, MAKESPAN: makespan, "restarts": restarts})
    return mean(figures)


def mean(rows: Sequence[Row]) -> Row:
    """Means of rows."""
    return {key: fmean(row[key] for row in rows) for key in rows[0]}


def main(argv: Sequence[str] | None = None) -> int:
    texts = [f"{name:14} {POLICIES[name].__doc__}" for name in POLICIES]
    parser = parser_of("cluster", "\n".join([str(__doc__), *texts]))
    add, numbers = parser.add_argument, range(1, 9)
    add("--gpus", type=int, nargs="+", choices=(16, 32, 64), default=[32, 64])
    add("--workloads", type=int, nargs="+", choices=numbers, default=numbers)
    add("--resize-seconds", type=float, default=30.0, help="(default 30)")
    add("--seeds", type=int, default=5, help="(default 5)")
    options = parse(parser, argv)
    return exit_status("cluster", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if options.quick:
        options.gpus, options.workloads, options.seeds = [32], [1], 1
    workloads = [*options.workloads]
    figures: dict[tuple[int, str, int | str], Row] = {}
    for gpus, policy in product(options.gpus, POLICIES):
        rows = [simulate(gpus, w, policy, options) for w in workloads]
        for workload, row in zip(workloads, rows, strict=True):
            figures[gpus, policy, workload] = row
        figures[gpus, policy, ALL] = mean(rows)
    ratios = []
    for gpus, (policy, baseline, name, goal) in product(options.gpus, GOALS):
        values = [
            figures[gpus, policy, w][name] / figures[gpus, baseline, w][name]
            for w in (ALL, *workloads)
        ]
        ratios.append(
            {
                **{"gpus": gpus, "policy": policy, "baseline": baseline},
                **{"figure": name, "ratio": values[0], "goal": goal},
                **{"lowest": min(values), "highest": max(values)},
            }
        )
    keys = ("gpus", "policy", "workload")
    report = {
        "rows": [
            {**dict(zip(keys, key, strict=True)), **row}
            for key, row in figures.items()
        ],
        "ratios": ratios,
    }
    for title, table in report.items():
        texts = [[_text(value) for value in row.values()] for row in table]
        print_table(title, [key.replace("_", " ") for key in table[0]], texts)
    settings = {**vars(options), "workloads": workloads}
    del settings["json"]
    write_results(options.json, "cluster", settings, report)
    return 0


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value > 10 else f"{value:.3g}"
    return "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
