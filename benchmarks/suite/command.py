"""The command line of ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.commands import (
    clock,
    exit_status,
    require_data,
)
from benchmarks.devices import CPU
from benchmarks.options import DATA_VARIABLE
from benchmarks.shards import find_tars
from benchmarks.suite.experiment import Context, Experiment
from benchmarks.suite.experiments import EXPERIMENTS
from benchmarks.suite.report.command import add_report
from benchmarks.suite.results import FORMAT, SuiteResults
from benchmarks.testbed import Cores, two_tiers

DEFAULT_JSON = Path("bench.json")
MIN_ROUNDS = 5
QUICK_ROUNDS = 2

DESCRIPTION = """\
Measures HAPI against what people use today.

    python -m benchmarks run --quick --data DIR --json bench.json
    python -m benchmarks report bench.json --html report

Two tiers stand for two machines: Swift and the worker on some cores and in
one network namespace, the training process on others and in another one,
with a shaped link between (benchmarks/testbed.py).  Contenders are measured
one after the other, in interleaved rounds.
"""
RUN = """\
Runs experiments, all of them unless some are named, and writes what they
measure to a JSON file after each round.

experiments:
{experiments}

The JSON file: ``benchmark`` ("suite"), ``format`` ({format}), ``settings``,
``versions``, ``begun`` (date, git commit, machine, experiments and patterns
of each run that wrote to the file) and ``experiments``, of which each has
``complete``, ``met`` (goal to true, false, or null where it could not be told)
and its own keys:

{keys}
"""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = found.add_subparsers(dest="command", required=True)
    _add_run(commands)
    add_report(commands)
    return found


def _add_run(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    run = commands.add_parser(
        "run",
        help="measure",
        description=RUN.format(
            format=FORMAT,
            experiments="\n".join(map(_listed, EXPERIMENTS.values())),
            keys="\n\n".join(map(_keys, EXPERIMENTS.values())),
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = run.add_argument
    add(
        "experiments",
        nargs="*",
        metavar="EXPERIMENT",
        help="of those above; default: all",
    )
    add(
        "--data",
        nargs="+",
        type=Path,
        metavar="DIR|TAR",
        help=f"WebDataset tars of photographs; else {DATA_VARIABLE}",
    )
    add(
        "--json",
        type=Path,
        metavar="PATH",
        default=DEFAULT_JSON,
        help=f"where the results go (default {DEFAULT_JSON})",
    )
    add(
        "--quick",
        action="store_true",
        help="a smoke test: few cells and short passes, which prove nothing",
    )
    add(
        "--rounds",
        type=int,
        help=f"interleaved passes of each contender, {MIN_ROUNDS} or more"
        f" (default {MIN_ROUNDS}; quick {QUICK_ROUNDS})",
    )
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="cells, such as 'resnet18/*/0.25'",
    )
    add(
        "--resume",
        action="store_true",
        help="go on with the JSON file: keep what is complete in it",
    )
    add(
        "--no-netns",
        action="store_true",
        help="no namespaces, no root; no link is shaped",
    )
    for tier in ("storage", "client"):
        add(
            f"--{tier}-cores",
            type=core_list,
            metavar="LIST",
            help=f"of the {tier} tier, such as 0-3,8 (default: one core)",
        )
    for tier in ("worker", "client"):
        add(
            f"--{tier}-device",
            choices=(CPU, "cuda"),
            default=CPU,
            help=f"where the {tier} computes (default {CPU})",
        )
    add(
        "--scale",
        type=int,
        default=1,
        help="times the samples of each data set: machines that are fast go"
        " through an epoch before it can be measured; the experiment runs"
        " does without, as it makes its epochs 15 s long (default 1)",
    )
    run.set_defaults(action=functools.partial(_run, run))


def _listed(each: Experiment) -> str:
    return (
        f"  {each.name:12} {each.title} (about {each.minutes:g} min; quick"
        f" {each.quick_minutes:g})"
    )


def _keys(each: Experiment) -> str:
    return f"{each.name}:\n{each.keys}"


def core_list(text: str) -> tuple[int, ...]:
    """``0-3,8`` as numbers.

    Raises:
        argparse.ArgumentTypeError: when it is none.
    """
    cores: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if found is None:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no list of cores such as 0-3,8"
            )
        first, last = int(found[1]), int(found[2] or found[1])
        cores += range(first, last + 1)
    return tuple(sorted({*cores}))


def _run(command: argparse.ArgumentParser, found: argparse.Namespace) -> int:
    least = 2 if found.quick else MIN_ROUNDS
    if found.rounds is None:
        found.rounds = QUICK_ROUNDS if found.quick else MIN_ROUNDS
    if found.rounds < least:
        command.error(f"--rounds is {found.rounds}; at least {least}")
    for name in found.experiments:
        if name not in EXPERIMENTS:
            command.error(
                f"there is no experiment {name!r}; there are"
                f" {', '.join(EXPERIMENTS)}"
            )
    if found.scale < 1:
        command.error(f"--scale is {found.scale}; at least 1")
    if (found.storage_cores is None) != (found.client_cores is None):
        command.error("give --storage-cores and --client-cores, or neither")
    require_data(command, found)
    return _measure(found)


def _measure(found: argparse.Namespace) -> int:
    cores: Cores | None = None
    if found.storage_cores is not None:
        cores = (found.storage_cores, found.client_cores)
    tars = find_tars(found.data)
    results = SuiteResults(
        found.json,
        {
            "quick": found.quick,
            "rounds": found.rounds,
            "shaped": not found.no_netns,
            "cores": cores and [list(each) for each in cores],
            "tars": [tar.name for tar in tars],
            **_unusual(found),
        },
        resume=found.resume,
        asked={"experiments": found.experiments, "only": found.only},
    )
    for key in ("commit", "processor"):
        if others := results.others(key):
            print(
                f"{found.json} has figures of another {key}"
                f" ({', '.join(others)}); every entry tells its own"
            )
    if found.no_netns:
        print("--no-netns: no link is shaped; one network for both tiers")
    for name in found.experiments or EXPERIMENTS:
        experiment = EXPERIMENTS[name]
        section = results.section(name)
        if not section["complete"] or experiment.lacks_here(section):
            context = Context(
                sources=found.data,
                tars=tars,
                quick=found.quick,
                rounds=found.rounds,
                only=found.only,
                section=section,
                save=results.save,
                note=clock(f"{name} "),
                testbed=functools.partial(
                    two_tiers,
                    netns=not found.no_netns,
                    cores=cores,
                    worker_device=found.worker_device,
                    client_device=found.client_device,
                ),
                scale=found.scale,
                tuned=results.tuned,
            )
            experiment.measure(context)
            section["met"] = dict(experiment.met(section))
            section["complete"] = not found.only
            results.save()
        print(f"\n{experiment.title}\n")
        print(experiment.table(section), flush=True)
        print_goals(section["met"])
    print(f"\nwritten to {found.json}")
    return 0


def _unusual(found: argparse.Namespace) -> dict[str, object]:
    """Settings that most runs have at their defaults, and do not tell."""
    usual = {"worker_device": CPU, "client_device": CPU, "scale": 1}
    return {
        name: getattr(found, name)
        for name, default in usual.items()
        if getattr(found, name) != default
    }


def print_goals(met: dict[str, bool | None]) -> None:
    """A line for each goal."""
    words = {True: "met", False: "missed", None: "not told by this run"}
    for goal, is_met in met.items():
        print(f"{words[is_met]}: {goal}")


def main(argv: Sequence[str] | None = None) -> int:
    found = parser().parse_args(argv)
    return exit_status(found.command, lambda: int(found.action(found)))
