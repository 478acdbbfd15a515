"""How running jobs react: link, worker, other jobs.

    python -m benchmarks.adaptation --data DIR --json adaptation.json

Jobs with ``cut="auto"`` train for some minutes on a testbed of two tiers
(benchmarks/testbed.py), and keep a diary of what they got and of each plan:

``link``
    The rate changes twice in the middle of an epoch.
``worker``
    The worker is stopped while spans are under way, and started again.
``tenants``
    Four jobs, each a process of its own, share one worker, one link and one
    core of the client tier (benchmarks/tenants.py).  Their samples per
    second, together, stand beside the optimum of a linear program with all
    four in it, whose costs are measured, and beside what they have with that
    program's mix dealt to them; all in turn, several times, at equal speed of
    the cores (benchmarks/speedometer.py).

The label of each sample is its number in the data set, so that every epoch
shows whether samples were lost or doubled.

The JSON file: ``settings``, ``machine``, ``versions`` and, by scenario,

  lost, doubled   samples, of all epochs and jobs
and for ``link`` and ``worker``
  events      [{time, what}]
  jobs        [{progress, plans, epochs, fallbacks, retries}], as
              benchmarks.client_tier.ClientTier.follow returns them
  phases      between two events: samples_per_second of its last part
and for ``tenants``
  link_bytes_per_second
  passes      [{contender: {link_bytes, storage_seconds, client_seconds,
              speeds}}]: costs of a sample of each fixed cut alone, before the
              first round and after each; and by tier what its speedometer
              read meanwhile: seconds (of CPU time, for its piece of work),
              used (part of the core)
  settling    a phase of ``auto`` before the first round
  rounds      [{mix, auto, joint}]: the mix of the optimum with the costs of
              the last phases, and a phase of each contender:
              samples_per_second, speeds, used (part of link, storage core
              and client core), by_cut (samples), jobs
  samples_per_second, used   of ``auto``, mean of the rounds
  optimum     samples per second of the linear program, at the speed that
              the cores had in each phase of ``auto``; mean of the rounds
  ratios, ratio, interval    rate to optimum, by round; median; 95 % by
              bootstrap
  goal        what ``ratio`` should be at least
  dearer      what a sample took of each tier, over what it takes alone, at
              equal speed; mean of the rounds
  joint       the same of the dealt mix; and by which part ``auto`` is slower
              (negative: faster): regret, regret_interval
  alone       without regard to speed: stages (mean of the passes), optimum,
              optima (of each pass), ratio
  plan_changes_per_minute    [by job]
  most_changes_per_minute    that the pace of re-planning allows
  fallbacks, retries         of all jobs

Times are seconds since the start of the scenario.  Root, iproute2 and
util-linux are needed.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cell_run import CLIENT, store_data
from benchmarks.cells import NETWORKS
from benchmarks.commands import (
    add_workload,
    exit_status,
    parser_of,
    require_data,
)
from benchmarks.contenders import Outlook
from benchmarks.regret import AUTO, STREAM
from benchmarks.remote import Remote
from benchmarks.results import machine, versions, write_json
from benchmarks.shards import find_tars
from benchmarks.tenants import JOINT, Tenants, Throughput, rate_of, since
from benchmarks.tenants import report as report_tenants
from benchmarks.testbed import Testbed, two_tiers

from hapi_client.model.frozen_region import FREEZE as FREEZE_CUT
from hapi_splitter.planner.problem import RAW_ROUTE

MODEL = "mobilenet_v3_small"
FREEZE = "features"
SCENARIOS = ("link", "worker", "tenants")
NUM_TENANTS = 4
FAST_LINK = 2.0
SLOW_LINK = 0.25
TENANTS_LINK = 0.5
"""Multiples of the rate at which streaming saturates the client tier."""
SPEEDOMETER = "benchmarks.speedometer"
CONTAINER = f"adaptation-{MODEL}"
QUESTION_SECONDS = 1800.0
MAX_PHASE_SECONDS = 300.0
LAST_PART = 0.4
"""Of a phase: what is taken to be its steady state."""
MIN_ROUNDS = 2


@dataclass(frozen=True)
class Event:
    """Something that is done while jobs run.

    Attributes:
        seconds: after their start.
        what: for people.
        act: does it.
    """

    seconds: float
    what: str
    act: Callable[[], None]


@dataclass
class Scenarios:
    """Runs them on one testbed.

    Args:
        bed: the testbed.
        tars: files to make the data set from.
        floor: of the encodings.
        phase_seconds: between two events.
        pace: of ``tenants``.
    """

    bed: Testbed
    tars: Sequence[Path]
    floor: str
    phase_seconds: float
    pace: Throughput = field(default_factory=Throughput)
    _saturating: float = 0.0

    def link(self) -> dict[str, Any]:
        """The link becomes slow, and fast again."""
        with self.bed.client.remote(CLIENT) as client:
            self._prepare(client)
            fast, slow = (
                multiple * self._saturating
                for multiple in (FAST_LINK, SLOW_LINK)
            )
            self.bed.set_link(fast)
            _ask(client, "open", name=AUTO, cut=AUTO)
            return self._run(
                client,
                [
                    Event(
                        self.phase_seconds,
                        f"link from {fast / 1e6:.1f} to {slow / 1e6:.1f} MB/s",
                        lambda: self.bed.set_link(slow),
                    ),
                    Event(
                        2 * self.phase_seconds,
                        f"link from {slow / 1e6:.1f} to {fast / 1e6:.1f} MB/s",
                        lambda: self.bed.set_link(fast),
                    ),
                ],
            )

    def worker(self) -> dict[str, Any]:
        """The worker goes, and comes back."""
        with self.bed.client.remote(CLIENT) as client:
            self._prepare(client)
            self.bed.set_link(FAST_LINK * self._saturating)
            _ask(client, "open", name=AUTO, cut=AUTO)
            return self._run(
                client,
                [
                    Event(
                        self.phase_seconds,
                        "worker stopped",
                        self.bed.stop_worker,
                    ),
                    Event(
                        2 * self.phase_seconds,
                        "worker started",
                        self.bed.restart_worker,
                    ),
                ],
            )

    def tenants(self) -> dict[str, Any]:
        """Four jobs at a time."""
        with ExitStack() as stack:
            clients = [
                stack.enter_context(self.bed.client.remote(CLIENT))
                for _ in range(NUM_TENANTS)
            ]
            speedometers = {
                tier.name: stack.enter_context(tier.remote(SPEEDOMETER))
                for tier in (self.bed.storage, self.bed.client)
            }
            for client in clients:
                self._prepare(client)
            link = TENANTS_LINK * self._saturating
            ways = self._open_fixed(clients[0], link)
            self.bed.set_link(link)
            for client in clients:
                _ask(client, "open", name=AUTO, cut=AUTO)
                _ask(client, "open", name=JOINT, cut=FREEZE_CUT)
            return Tenants(
                bed=self.bed,
                clients=clients,
                speedometers=speedometers,
                ways=ways,
                fixed=fixed_name,
                link=link,
                pace=self.pace,
                note=lambda line: print(line, flush=True),
            ).run()

    def _prepare(self, client: Remote) -> None:
        network = NETWORKS[MODEL]
        self.bed.set_link(None)
        store_data(
            self.bed.folder,
            client,
            self.tars,
            CONTAINER,
            network.samples,
            network.shard_samples,
        )
        _ask(
            client,
            "prepare",
            model=MODEL,
            freeze=FREEZE,
            container=CONTAINER,
            floor=self.floor,
            epochs=None,
        )
        if not self._saturating:
            _ask(client, "open", name=STREAM, cut=STREAM)
            for epoch in range(2):  # the first one warms up
                done = _ask(client, "run", name=STREAM, epoch=epoch)
            self._saturating = (
                done["samples_per_second"] * done["bytes_per_sample"]
            )

    def _open_fixed(
        self, client: Remote, link: float
    ) -> dict[str, tuple[int, str]]:
        """Jobs of all fixed cuts worth it; their ways."""
        answer = _ask(
            client, "outlook", link=link, container=CONTAINER, thorough=True
        )
        ways = {
            each.name: each.route for each in Outlook.from_json(answer).statics
        }
        ways.setdefault(STREAM, RAW_ROUTE)
        for name, (cut, encoding) in ways.items():
            fixed = {"cut": cut, "encoding": encoding} if cut else {}
            _ask(
                client,
                "open",
                name=fixed_name(name),
                **{"cut": STREAM, **fixed},
            )
            _ask(client, "run", name=fixed_name(name), epoch=0)
        return ways

    def _run(self, client: Remote, events: Sequence[Event]) -> dict[str, Any]:
        """A job for a while, with events."""
        length = (len(events) + 1) * self.phase_seconds
        started = time.monotonic()
        happened: list[dict[str, Any]] = []
        over = threading.Event()

        def act() -> None:
            for event in events:
                due = started + event.seconds - time.monotonic()
                if over.wait(max(0.0, due)):
                    return
                begun = time.monotonic() - started
                event.act()
                happened.append({"time": begun, "what": event.what})

        with ThreadPoolExecutor(1) as pool:
            acting = pool.submit(act)
            try:
                job = _ask(client, "follow", name=AUTO, length=length)
            finally:
                over.set()
            acting.result()
        since(started, job)
        bounds = [0.0, *(event["time"] for event in happened), length]
        return {
            "events": happened,
            "jobs": [job],
            "phases": phases_of(job["progress"], bounds),
            "lost": sum(epoch["lost"] for epoch in job["epochs"]),
            "doubled": sum(epoch["doubled"] for epoch in job["epochs"]),
        }


def phases_of(
    progress: Sequence[tuple[float, int]], bounds: Sequence[float]
) -> list[dict[str, Any]]:
    """Samples per second in the last part of each phase.

    Args:
        progress: (time, samples so far).
        bounds: times at which phases begin and end.
    """
    phases = []
    for begin, end in pairwise(bounds):
        part = (end - LAST_PART * (end - begin), end)
        phases.append(
            {
                "begin": begin,
                "end": end,
                "part": part,
                "samples_per_second": rate_of([progress], *part),
            }
        )
    return phases


def report(name: str, entry: Mapping[str, Any]) -> str:
    """Events, plans and phases in the order of time."""
    [job] = entry["jobs"]
    lines = [(e["time"], f"== {e['what']}") for e in entry["events"]]
    lines += [(p["time"], f"{p['mix']}: {p['why']}") for p in job["plans"]]
    lines += [
        (
            phase["end"],
            f"-- {phase['samples_per_second']:.1f} samples/s in the last"
            f" {phase['part'][1] - phase['part'][0]:.0f} s",
        )
        for phase in entry["phases"]
    ]
    shown = [f"{time:7.1f} s  {text}" for time, text in sorted(lines)]
    shown.append(
        f"{len(job['epochs'])} epochs: {entry['lost']} samples lost,"
        f" {entry['doubled']} doubled; {job['fallbacks']} spans fell back"
    )
    return "\n".join([f"{name}:", *shown])


def fixed_name(contender: str) -> str:
    """Of the job of a fixed contender."""
    return f"fixed-{contender}"


def _ask(client: Remote, do: str, **arguments: Any) -> Any:
    return client.ask(do, seconds=QUESTION_SECONDS, **arguments)


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("adaptation", __doc__)
    add_workload(parser)
    add = parser.add_argument
    add(
        "--scenarios",
        nargs="+",
        choices=SCENARIOS,
        default=list(SCENARIOS),
        help="only these",
    )
    add(
        "--phase-seconds",
        type=float,
        default=60.0,
        help="between two events (default 60)",
    )
    add(
        "--rounds",
        type=int,
        default=Throughput.rounds,
        help=f"of tenants, two or more (default {Throughput.rounds})",
    )
    found = parser.parse_args(argv)
    if not 0 < found.phase_seconds <= MAX_PHASE_SECONDS:
        parser.error(
            f"--phase-seconds is {found.phase_seconds:g}; above 0, and"
            f" {MAX_PHASE_SECONDS:g} at most"
        )
    if found.rounds < MIN_ROUNDS:
        parser.error(f"--rounds is {found.rounds}; {MIN_ROUNDS} or more")
    require_data(parser, found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    return exit_status("adaptation", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    tars = find_tars(arguments.data)
    body: dict[str, Any] = {
        "benchmark": "adaptation",
        "settings": {
            "model": MODEL,
            "freeze": FREEZE,
            "floor": arguments.floor,
            "phase_seconds": arguments.phase_seconds,
            "rounds": arguments.rounds,
            "tars": [tar.name for tar in tars],
        },
        "machine": machine(),
        "versions": versions(),
    }
    with two_tiers() as bed:
        scenarios = Scenarios(
            bed,
            tars,
            arguments.floor,
            arguments.phase_seconds,
            Throughput(rounds=arguments.rounds),
        )
        for name in arguments.scenarios:
            body[name] = getattr(scenarios, name)()
            text = (
                report_tenants(body[name])
                if name == "tenants"
                else report(name, body[name])
            )
            print(text, flush=True)
            if arguments.json is not None:
                write_json(arguments.json, body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
