"""Runs the experiments that compare HAPI with other loaders.

    python -m benchmarks run --quick --data DIR --json record.json
    python -m benchmarks run grid --only 'vit*' --json record.json --resume
    python -m benchmarks.report record.json --html report

Two tiers stand for two machines: Swift and the worker on some cores and in one
network namespace, the training process on others and in another namespace,
with a shaped link between.  Contenders are measured one after the other, in
interleaved rounds, and the record is written after each round.

experiments (default: all):
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.command_line import (
    PHOTOGRAPHS,
    add_rounds,
    clock,
    exit_status,
    parse,
    parser_of,
    print_goals,
    print_table,
)
from benchmarks.experiments import (
    accuracy,
    grid,
    regret,
    runs,
    tenants,
    wire_bytes,
)
from benchmarks.record import SuiteRecord
from benchmarks.rendering.tables import TABLES
from benchmarks.suite.contenders import LIBRARIES
from benchmarks.suite.experiment import Context, Experiment
from benchmarks.testbed.process_resources import CPU
from benchmarks.testbed.shards import find_tars
from benchmarks.testbed.two_tiers import two_tiers

ROUNDS = 3
EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {
        module.name: module
        for module in (
            wire_bytes.EXPERIMENT,
            grid.EXPERIMENT,
            runs.EXPERIMENT,
            tenants.EXPERIMENT,
            regret.EXPERIMENT,
            accuracy.EXPERIMENT,
        )
    }
)


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    listed = "\n".join(
        f"  {experiment.name:9} {experiment.title} (about"
        f" {experiment.minutes:g} min; quick {experiment.quick_minutes:g})"
        for experiment in EXPERIMENTS.values()
    )
    parser = parser_of("run", f"{__doc__}{listed}", data=PHOTOGRAPHS)
    add_rounds(parser, ROUNDS)
    add = parser.add_argument
    add("experiments", nargs="*", metavar="EXPERIMENT", help="see above")
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="cells, such as 'resnet18/*/0.25'",
    )
    add("--resume", action="store_true", help="continue the record")
    add(
        "--no-netns",
        action="store_true",
        help="no namespaces and no root; no link is shaped",
    )
    add("--cores", type=int, default=1, help="cores of each tier (default 1)")
    for tier in ("worker", "client"):
        add(
            f"--{tier}-device",
            choices=(CPU, "cuda"),
            default=CPU,
            help=f"device of the {tier} (default {CPU})",
        )
    add(
        "--scale",
        type=float,
        default=1.0,
        help="multiplies the samples of each data set: an epoch of streaming"
        " should take 5 to 20 s (default 1)",
    )
    options = parse(parser, argv)
    if unknown := {*options.experiments} - {*EXPERIMENTS}:
        parser.error(
            f"unknown experiments {', '.join(sorted(unknown))}; there are"
            f" {', '.join(EXPERIMENTS)}"
        )
    if not 0 < options.scale < math.inf or options.cores < 1:
        parser.error("--scale must be above 0, and --cores 1 or more")
    options.json = options.json or Path("record.json")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments_of(argv)
    return exit_status("run", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    tars = find_tars(options.data)
    record = SuiteRecord(
        options.json,
        {
            "quick": options.quick,
            "rounds": options.rounds,
            "shaped": not options.no_netns,
            "tars": [tar.name for tar in tars],
            "cores": options.cores,
            "worker_device": options.worker_device,
            "client_device": options.client_device,
            "scale": options.scale,
        },
        libraries=itertools.chain(*LIBRARIES.values()),
        resume=options.resume,
        requested={
            "experiments": options.experiments,
            "only": options.only,
        },
    )
    for name in options.experiments or EXPERIMENTS:
        experiment, section = EXPERIMENTS[name], record.section(name)
        if not section["complete"]:
            context = Context(
                sources=options.data,
                tars=tars,
                quick=options.quick,
                rounds=options.rounds,
                only=options.only,
                section=section,
                save=record.save,
                note=clock(f"{name} "),
                testbed=functools.partial(
                    two_tiers,
                    netns=not options.no_netns,
                    cores=options.cores,
                    worker_device=options.worker_device,
                    client_device=options.client_device,
                ),
                scale=options.scale,
                tuned=record.tuned,
            )
            experiment.measure(context)
            section["met"] = experiment.goals(section)
            section["complete"] = not options.only
            record.save()
        table = TABLES[name](record.body)
        print_table(table.title, table.columns, table.rows)
        print_goals(section["met"])
    print(f"written to {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
