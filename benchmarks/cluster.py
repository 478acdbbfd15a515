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

from benchmarks.command_line import (
    exit_status,
    parse,
    parser_of,
    print_goals,
    print_table,
)
from benchmarks.record import write_results
from benchmarks.scheduling import comparison
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
Group = tuple[Any, ...]
Figures = dict[tuple[Group, str], dict[int | str, Row]]
"""By group of simulations, policy and workload."""
Goals = Sequence[tuple[Group, tuple[str, str, str, float | None]]]


def simulate(gpus: int, workload: int, policy: str, options: Any) -> Row:
    """Mean figures of simulations whose logs can be true."""
    figures = []
    for seed in range(options.seeds):
        jobs = read_workload(workload, gpus, seed)
        jobs = jobs[:QUICK_JOBS] if options.quick else jobs
        log = Cluster(gpus, POLICIES[policy], options.resize_seconds).run(jobs)
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
    texts += ["", str(comparison.__doc__)]
    parser = parser_of("cluster", "\n".join([str(__doc__), *texts]))
    add, numbers = parser.add_argument, range(1, 9)
    add("--gpus", type=int, nargs="+", choices=(16, 32, 64), default=[32, 64])
    add("--workloads", type=int, nargs="+", choices=numbers, default=numbers)
    add("--resize-seconds", type=float, default=30.0, help="(default 30)")
    add("--seeds", type=int, default=5, help="(default 5)")
    comparison.add_options(parser)
    options = parse(parser, argv)
    if options.trace and not options.iterations:
        parser.error("--trace needs --iterations")
    if min(options.switch_seconds, options.load_seconds) < 0:
        parser.error("--switch-seconds and --load-seconds must be 0 or more")
    return exit_status("cluster", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if options.quick:
        options.gpus, options.workloads, options.seeds = [32], [1], 1
    options.workloads = [*options.workloads]
    keys: Sequence[str] = ("gpus",)
    goals: Goals = [((n,), goal) for n in options.gpus for goal in GOALS]
    figures: Figures = {}
    if options.iterations:
        keys, figures = comparison.KEYS, comparison.simulate(options)
        groups = dict.fromkeys(group for group, _ in figures)
        goals = [(g, goal) for g in groups for goal in comparison.goals(g)]
    else:
        for gpus, policy in product(options.gpus, POLICIES):
            figures[(gpus,), policy] = {
                workload: simulate(gpus, workload, policy, options)
                for workload in options.workloads
            }
    report = _report(keys, figures, goals)
    for title, table in report.items():
        texts = [[_text(value) for value in row.values()] for row in table]
        print_table(title, [key.replace("_", " ") for key in table[0]], texts)
    print_goals(
        {
            " ".join(map(_text, [*row.values()][:-2])): row["ratio"]
            <= row["goal"]
            for row in report["ratios"]
            if row["goal"] is not None
        }
    )
    settings = {**vars(options), "trace": options.trace and options.trace.name}
    del settings["json"]
    write_results(options.json, "cluster", settings, report)
    return 0


def _report(
    keys: Sequence[str], figures: Figures, goals: Goals
) -> dict[str, list[dict[str, Any]]]:
    """Adds means over workloads to the figures, and ratios of these."""
    rows, ratios = [], []
    for (group, policy), by_workload in figures.items():
        by_workload[ALL] = mean([*by_workload.values()])
        for workload, row in by_workload.items():
            names = dict(zip(keys, group, strict=True))
            of = {"policy": policy, "workload": workload}
            rows.append({**names, **of, **row})
    for group, (policy, baseline, name, goal) in goals:
        one, other = figures[group, policy], figures[group, baseline]
        values = [one[key][name] / other[key][name] for key in one]
        ratios.append(
            {
                **dict(zip(keys, group, strict=True)),
                **{"policy": policy, "baseline": baseline},
                **{"figure": name, "ratio": values[-1], "goal": goal},
                **{"lowest": min(values), "highest": max(values)},
            }
        )
    return {"rows": rows, "ratios": ratios}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value > 10 else f"{value:.3g}"
    return "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
