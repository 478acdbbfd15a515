"""More cells of ``benchmarks.splits``, by replay of measured stage times.

    python -m benchmarks.replay splits.json --json replay.json

Takes what a sample took of the link and of each tier's processes in every
measured pass (``stages`` in the file of ``benchmarks.splits``), and lets
spans with these times go through a simulated link and two simulated cores
at other rates of the link.  Mixer, meter, estimates and planner are those of
a real job, and the planner knows what it knew in the measured cell: its
profiles, with their errors.

Replayed figures are labelled ``replayed`` and are no measurements.  Every
measured cell is replayed too, at its own link: ``validation`` shows by how
much the replay of each contender is off.

What a replay cannot show: anything that depends on what does not go through
these three (latency of requests, memory, garbage collection), cuts that no
cell has measured, and the published rules, whose choice depends on the link.

The JSON file: ``source``, ``settings``, ``machine``, ``versions``,
``validation`` and ``cells``, two lists of

  name, model, freeze, link, link_bytes_per_second, replayed (true)
  samples_per_second   {contender: median over the seeds}
  rounds               {contender: [by seed]}
  best_static, regret, interval, against_stream, missed, above_best_static
                       as in benchmarks.splits
  plan                 auto's, at the end
and for ``validation`` also
  measured             {contender: samples per second}
  error                {contender: replayed / measured - 1}
  measured_regret
and ``error``: the median and the largest absolute error of all validated
figures, apart for ``auto`` and for the fixed cuts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.cells import FETCH_OPTIONS, NETWORKS
from benchmarks.commands import EXIT_FAILURE, parser_of
from benchmarks.regret import AUTO, STREAM, judge, medians
from benchmarks.results import machine, versions, write_json
from benchmarks.simulation import Knowledge, Parts, SimulatedJob, Stage

from hapi_splitter.planner.problem import RAW_ROUTE, Route

LINKS = (0.1, 0.5, 1.0, 4.0, 10.0)
SEEDS = 5
FILL_SECONDS = 90.0
MEASURED_SECONDS = 60.0
FILL_TURNS, MEASURED_TURNS = 4, 8
FORMAT = 1

Cell = Mapping[str, Any]
Task: TypeAlias = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Length:
    """Of a replay, in simulated time.

    Attributes:
        seeds: runs of each contender.
        fill_seconds: for filling the pipeline, and for the planner to find
            its plan.
        measured_seconds: after these.
        fill_turns, measured_turns: of the spans under way, at least; so
            that a slow link has as many of them as a fast one.
    """

    seeds: int
    fill_seconds: float
    measured_seconds: float
    fill_turns: int
    measured_turns: int


@dataclass(frozen=True)
class Workload:
    """All that is known of a network and a freeze point.

    Attributes:
        name: ``resnet18/backbone``.
        cells: measured ones.
        stages: of all of them, by way.
    """

    name: str
    cells: Sequence[Cell]
    stages: Mapping[Route, Sequence[Stage]]

    def knowledge(self, link: float) -> Knowledge:
        """What a job knew in the measured cell whose link is nearest."""
        nearest = min(
            self.cells,
            key=lambda cell: abs(cell["link_bytes_per_second"] - link),
        )
        known = Knowledge.from_json(nearest["problem"])
        return known.only(self.stages, without=nearest["more_cuts"])

    @property
    def parts(self) -> dict[Route, Parts]:
        """Of all ways that any cell has measured."""
        options = [
            option
            for cell in self.cells
            for option in Knowledge.from_json(cell["problem"]).options
        ]
        return {option.route: Parts.of(option) for option in options}

    @property
    def saturating(self) -> float:
        """Bytes per second at which streaming saturates the client."""
        return statistics.median(
            cell["calibration"]["saturating_bytes_per_second"]
            for cell in self.cells
        )

    def rounds(
        self, link: float, ways: Mapping[str, Route], length: Length
    ) -> tuple[dict[str, list[float]], str]:
        """Samples per second by contender and seed; ``auto``'s plan."""
        network = NETWORKS[self.cells[0]["model"]]
        rounds: dict[str, list[float]] = {}
        label = ""
        for name in [*ways, AUTO]:
            fixed = {ways[name]: 1.0} if name in ways else None
            rates = rounds.setdefault(name, [])
            for seed in range(length.seeds):
                job = SimulatedJob(
                    self.stages,
                    self.parts,
                    self.knowledge(link),
                    link,
                    span_samples=network.shard_samples,
                    weights=fixed,
                    options=FETCH_OPTIONS,
                    seed=seed,
                )
                job.run(length.fill_seconds, length.fill_turns)
                rates.append(
                    job.run(length.measured_seconds, length.measured_turns)
                )
                if job.plan is not None:
                    label = job.plan.label
        return rounds, label


def workloads(cells: Sequence[Cell]) -> Iterator[Workload]:
    """Of the complete cells of a file of ``benchmarks.splits``.

    Raises:
        ValueError: when there is none, or one lacks its stages.
    """
    complete = [cell for cell in cells if cell["complete"]]
    if not complete:
        raise ValueError("no cell of the file is complete")
    for cell in complete:
        if "stages" not in cell or cell["link_bytes_per_second"] is None:
            raise ValueError(
                f"cell {cell['name']} has no stage times of a shaped link;"
                " measure it again, without --no-netns"
            )
    names = {f"{c['model']}/{c['freeze']}": None for c in complete}
    for name in names:
        mine = [c for c in complete if f"{c['model']}/{c['freeze']}" == name]
        stages: dict[Route, list[Stage]] = {}
        for cell in mine:
            for contender, route in ways_of(cell).items():
                passes = [Stage(**each) for each in cell["stages"][contender]]
                stages.setdefault(route, []).extend(passes)
        yield Workload(name, mine, stages)


def ways_of(cell: Cell) -> dict[str, Route]:
    """The fixed contenders of a cell that have measured stages."""
    ways: dict[str, Route] = {STREAM: RAW_ROUTE}
    for name, encoding in cell["encodings"].items():
        if cell["stages"].get(name):
            ways[name] = (int(name.removeprefix("cut-")), encoding)
    return ways


def named(ways: Iterable[Route]) -> dict[str, Route]:
    """Names for ways; with the encoding where a cut has several."""
    unique = sorted(set(ways))
    cuts = Counter(cut for cut, _ in unique)
    return {
        STREAM
        if route == RAW_ROUTE
        else f"cut-{route[0]}"
        + (f" {route[1]}" if cuts[route[0]] > 1 else ""): route
        for route in unique
    }


def replay_cell(
    workload: Workload,
    multiple: float,
    link: float,
    ways: Mapping[str, Route],
    length: Length,
) -> dict[str, Any]:
    """The entry of one cell.

    Args:
        workload: see there.
        multiple: the link, as a multiple of the saturating rate.
        link: bytes per second.
        ways: of the fixed contenders.
        length: of the simulation.
    """
    rounds, plan = workload.rounds(link, ways, length)
    verdict = judge(rounds, list(ways))
    assert verdict is not None, "auto is among the rounds"
    model, freeze = workload.name.split("/")
    return {
        "name": f"{workload.name}/{multiple:g}",
        "model": model,
        "freeze": freeze,
        "link": multiple,
        "link_bytes_per_second": link,
        "replayed": True,
        "rounds": rounds,
        "samples_per_second": medians(rounds),
        "best_static": verdict.best,
        "regret": verdict.against_best.regret,
        "interval": list(verdict.against_best.interval),
        "against_stream": {
            "regret": verdict.against_stream.regret,
            "interval": list(verdict.against_stream.interval),
        },
        "missed": verdict.missed,
        "above_best_static": verdict.above_best_static,
        "plan": plan,
        "complete": True,
    }


def validate(workload: Workload, cell: Cell, length: Length) -> dict[str, Any]:
    """A measured cell, replayed at its own link, and the difference."""
    entry = replay_cell(
        workload,
        cell["link"],
        cell["link_bytes_per_second"],
        ways_of(cell),
        length,
    )
    measured = {
        name: cell["samples_per_second"][name]
        for name in entry["samples_per_second"]
    }
    return {
        **entry,
        "measured": measured,
        "error": {
            name: rate / measured[name] - 1
            for name, rate in entry["samples_per_second"].items()
        },
        "measured_regret": cell["regret"],
    }


def validation_table(entries: Sequence[Cell]) -> str:
    """Replayed against measured, a line for each contender."""
    lines = [f"{'cell':34} {'contender':>10} {'measured':>9} {'replayed':>9}"]
    for entry in entries:
        for name, rate in entry["samples_per_second"].items():
            lines.append(
                f"{entry['name']:34} {name:>10} {entry['measured'][name]:9.1f}"
                f" {rate:9.1f} {entry['error'][name]:+6.1%}"
            )
    return "\n".join(lines)


def errors(entries: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """How far off replays are, without their sign."""
    found: dict[str, list[float]] = {AUTO: [], "fixed": []}
    for entry in entries:
        for name, error in entry["error"].items():
            found[AUTO if name == AUTO else "fixed"].append(abs(error))
    return {
        who: {"median": statistics.median(each), "largest": max(each)}
        for who, each in found.items()
    }


def cells_table(entries: Sequence[Cell]) -> str:
    """Regret of each replayed cell, a line each."""
    lines = [
        f"{'cell (replayed)':34} {'auto':>7} {'stream':>7}"
        f" {'best static':>16} {'regret':>8}  plan"
    ]
    for entry in entries:
        rates = entry["samples_per_second"]
        best = entry["best_static"]
        lines.append(
            f"{entry['name']:34} {rates[AUTO]:7.1f} {rates[STREAM]:7.1f}"
            f" {best:>8} {rates[best]:7.1f} {entry['regret']:8.1%}"
            f"  {entry['plan']}"
        )
    return "\n".join(lines)


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("replay", __doc__)
    add = parser.add_argument
    add("splits", type=Path, help="the JSON file of benchmarks.splits")
    add(
        "--links",
        type=float,
        nargs="+",
        default=list(LINKS),
        metavar="MULTIPLE",
        help="of the rate at which streaming saturates the client"
        f" (default {' '.join(f'{each:g}' for each in LINKS)})",
    )
    add("--seeds", type=int, default=SEEDS, help="at least 2 (default 5)")
    for option, kind, default, what in (
        ("--fill-seconds", float, FILL_SECONDS, "before the rate counts"),
        ("--measured-seconds", float, MEASURED_SECONDS, "in which it counts"),
        (
            "--fill-turns",
            int,
            FILL_TURNS,
            "of all spans under way, before it counts",
        ),
        (
            "--measured-turns",
            int,
            MEASURED_TURNS,
            "of these, in which it counts",
        ),
    ):
        add(
            option,
            type=kind,
            default=default,
            help=f"simulated, {what}; at least so many (default {default:g})",
        )
    found = parser.parse_args(argv)
    if found.seeds < 2:
        parser.error(f"--seeds is {found.seeds}; at least 2")
    for field in dataclasses.fields(Length):
        if getattr(found, field.name) <= 0:
            option = "--" + field.name.replace("_", "-")
            parser.error(
                f"{option} is {getattr(found, field.name):g}; above 0"
            )
    if min(found.links) <= 0:
        parser.error(f"--links has {min(found.links):g}; above 0")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    try:
        body = json.loads(arguments.splits.read_text())
        return _run(arguments, body)
    except (OSError, ValueError) as error:
        print(f"benchmarks.replay: {error}", file=sys.stderr)
        return EXIT_FAILURE


def in_processes(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """What the tasks return, in their order; each core does one at a time."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            for number, future in enumerate(as_completed(futures), 1):
                name = future.result()["name"]
                progress = f"{number} of {len(tasks)}: {name}"
                print(progress, file=sys.stderr, flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _run(arguments: argparse.Namespace, body: Mapping[str, Any]) -> int:
    length = Length(
        **{
            field.name: getattr(arguments, field.name)
            for field in dataclasses.fields(Length)
        }
    )
    measured: list[Task] = []
    others: list[Task] = []
    for workload in workloads(body["cells"]):
        measured += [
            partial(validate, workload, cell, length)
            for cell in workload.cells
        ]
        ways = named(
            route
            for cell in workload.cells
            for route in ways_of(cell).values()
        )
        others += [
            partial(
                replay_cell,
                workload,
                multiple,
                multiple * workload.saturating,
                ways,
                length,
            )
            for multiple in arguments.links
        ]
    entries = in_processes([*measured, *others])
    validation, cells = entries[: len(measured)], entries[len(measured) :]
    print(validation_table(validation))
    found = errors(validation)
    for who, error in found.items():
        print(
            f"{who}: {error['median']:.1%} off in the median,"
            f" {error['largest']:.1%} at most"
        )
    print()
    print(cells_table(cells))
    if arguments.json is not None:
        write_json(
            arguments.json,
            {
                "benchmark": "replay",
                "format": FORMAT,
                "source": arguments.splits.name,
                "settings": {
                    "links": arguments.links,
                    **dataclasses.asdict(length),
                },
                "machine": machine(),
                "versions": versions(),
                "measured_on": body["machine"],
                "error": found,
                "validation": validation,
                "cells": cells,
            },
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
