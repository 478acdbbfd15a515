"""How running jobs react: link, worker, other jobs.

    python -m benchmarks.adaptation --data DIR --json adaptation.json

Jobs with ``cut="auto"`` train for some minutes on a testbed of two tiers
(benchmarks/testbed.py), and keep a diary of what they got and of each plan:

``link``
    The rate changes twice in the middle of an epoch.
``worker``
    The worker is stopped while spans are under way, and started again.
``tenants``
    Four jobs, each a process of its own, with epochs of 960 samples, share
    one worker, one link and one core of the client tier.  Their samples per
    second, together, stand beside the optimum of a linear program with all
    four in it, whose costs are measured: CPU seconds of each tier's processes
    for one sample of each fixed cut.

The label of each sample is its number in the data set, so that every epoch
shows whether samples were lost or doubled.

The JSON file: ``settings``, ``machine``, ``versions`` and, by scenario,

  events      [{time, what}]
  jobs        [{progress, plans, epochs, fallbacks, retries}], as
              benchmarks.client_tier.ClientTier.follow returns them
  phases      between two events: samples_per_second of its last part
  lost, doubled   samples, of all epochs and jobs
and for ``tenants`` also
  stages      {contender: link_bytes, storage_seconds, client_seconds}, mean
              of before and after the run
  optima      samples per second of the linear program, with the costs
              measured before the run, and after it
  optimum     the larger one; a ratio above 1 says that the machine became
              faster meanwhile, or that mixes of more ways do better
  samples_per_second   of all jobs in the last part
  ratio, goal   of the two, and what it should be at least
  plan_changes_per_minute   [by job, in the last part]
  most_changes_per_minute   that the pace of re-planning allows

Times are seconds since the start of the scenario.  Root, iproute2 and
util-linux are needed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.cell_run import CLIENT, stage_of, store_data
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
from benchmarks.testbed import Testbed, two_tiers
from scipy.optimize import linprog

from hapi_client.replan import ReplanOptions

MODEL = "mobilenet_v3_small"
FREEZE = "features"
SCENARIOS = ("link", "worker", "tenants")
NUM_TENANTS = 4
FAST_LINK = 2.0
SLOW_LINK = 0.25
TENANTS_LINK = 0.5
"""Multiples of the rate at which streaming saturates the client tier."""
EPOCH_SAMPLES = NETWORKS[MODEL].samples
TENANTS_EPOCH_SAMPLES = 2 * EPOCH_SAMPLES
"""Of jobs that share: an epoch that is over within seconds is mostly filling
and emptying of the job's own pipeline.  Labels are numbers of samples, so
there cannot be more of them than the model has classes (1,000)."""
QUESTION_SECONDS = 900.0
GOAL = 0.95
MOST_CHANGES_PER_MINUTE = 60 / (0.75 * ReplanOptions().seconds)
"""The shortest time between two looks, and a change at each."""
LAST_PART = 0.4
"""Of a phase: what is taken to be its steady state."""


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
    """

    bed: Testbed
    tars: Sequence[Path]
    floor: str
    phase_seconds: float
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
                [client],
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
                [client],
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
            self._prepare(clients[0])
            names = self._open_fixed(clients[0])
            measured = [self._stages(clients[0], names)]
            for client in clients:
                self._prepare(client, TENANTS_EPOCH_SAMPLES)
            link = TENANTS_LINK * self._saturating
            self.bed.set_link(link)
            for client in clients:
                _ask(client, "open", name=AUTO, cut=AUTO)
            entry = self._run(clients, [], seconds=3 * self.phase_seconds)
            # The machine's speed may have changed meanwhile.
            measured.append(self._stages(clients[0], names))
        stages = {
            name: {
                key: statistics.mean(each[name][key] for each in measured)
                for key in measured[0][name]
            }
            for name in names
        }
        optima = [joint_optimum(each.values(), link) for each in measured]
        optimum = max(optima)
        rate = entry["phases"][-1]["samples_per_second"]
        return {
            **entry,
            "link_bytes_per_second": link,
            "stages": stages,
            "optima": optima,
            "optimum": optimum,
            "samples_per_second": rate,
            "ratio": rate / optimum,
            "goal": GOAL,
            "most_changes_per_minute": MOST_CHANGES_PER_MINUTE,
            "plan_changes_per_minute": [
                changes_per_minute(job["plans"], *entry["phases"][-1]["part"])
                for job in entry["jobs"]
            ],
        }

    def _prepare(self, client: Remote, samples: int = EPOCH_SAMPLES) -> None:
        network = NETWORKS[MODEL]
        container = _container(samples)
        self.bed.set_link(None)
        store_data(
            self.bed.folder,
            client,
            self.tars,
            container,
            samples,
            network.shard_samples,
        )
        _ask(
            client,
            "prepare",
            model=MODEL,
            freeze=FREEZE,
            container=container,
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

    def _open_fixed(self, client: Remote) -> list[str]:
        """Jobs of all fixed cuts worth it; their names."""
        answer = _ask(
            client,
            "outlook",
            link=TENANTS_LINK * self._saturating,
            container=_container(EPOCH_SAMPLES),
            thorough=True,
        )
        jobs: dict[str, dict[str, Any]] = {
            each.name: {"cut": each.cut, "encoding": each.encoding}
            for each in Outlook.from_json(answer).statics
        }
        jobs.setdefault(STREAM, {"cut": STREAM})
        for name, arguments in jobs.items():
            _ask(client, "open", name=f"fixed-{name}", **arguments)
            _ask(client, "run", name=f"fixed-{name}", epoch=0)
        return list(jobs)

    def _stages(
        self, client: Remote, names: Sequence[str]
    ) -> dict[str, dict[str, float]]:
        """What a sample of each fixed cut takes, without a limit."""
        self.bed.set_link(None)
        stages = {}
        for name in names:
            before = self.bed.storage_seconds()
            done = _ask(client, "run", name=f"fixed-{name}", epoch=1)
            if done["fallbacks"]:
                raise ValueError(
                    f"{name}: {done['fallbacks']} spans were streamed; such "
                    "a pass does not measure its cut"
                )
            seconds = self.bed.storage_seconds() - before
            stages[name] = stage_of(done, seconds)
        return stages

    def _run(
        self,
        clients: Sequence[Remote],
        events: Sequence[Event],
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """All jobs for a while, with events."""
        length = seconds or (len(events) + 1) * self.phase_seconds
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

        with ThreadPoolExecutor(len(clients) + 1) as pool:
            acting = pool.submit(act)
            try:
                jobs = list(
                    pool.map(
                        lambda client: client.ask(
                            "follow",
                            seconds=length + QUESTION_SECONDS,
                            name=AUTO,
                            length=length,
                        ),
                        clients,
                    )
                )
            finally:
                over.set()
            acting.result()
        for job in jobs:
            job["progress"] = [(t - started, n) for t, n in job["progress"]]
            for plan in job["plans"]:
                plan["time"] -= started
        bounds = [0.0, *(event["time"] for event in happened), length]
        epochs = [epoch for job in jobs for epoch in job["epochs"]]
        return {
            "events": happened,
            "jobs": jobs,
            "phases": phases_of([job["progress"] for job in jobs], bounds),
            "lost": sum(epoch["lost"] for epoch in epochs),
            "doubled": sum(epoch["doubled"] for epoch in epochs),
        }


def phases_of(
    progress: Sequence[Sequence[tuple[float, int]]], bounds: Sequence[float]
) -> list[dict[str, Any]]:
    """Samples per second of all jobs, in the last part of each phase.

    Args:
        progress: of each job, (time, samples so far).
        bounds: times at which phases begin and end.
    """
    phases = []
    for begin, end in pairwise(bounds):
        part = (end - LAST_PART * (end - begin), end)
        samples = sum(
            float(np.interp(part[1], *zip(*each, strict=True)))
            - float(np.interp(part[0], *zip(*each, strict=True)))
            for each in progress
        )
        phases.append(
            {
                "begin": begin,
                "end": end,
                "part": part,
                "samples_per_second": samples / (part[1] - part[0]),
            }
        )
    return phases


def joint_optimum(
    stages: Sequence[Mapping[str, float]] | Any, link: float
) -> float:
    """The most samples per second of all jobs together.

    Args:
        stages: of each way, what a sample takes: ``link_bytes``,
            ``storage_seconds``, ``client_seconds``.
        link: bytes per second.
    """
    ways = list(stages)
    names = {"link_bytes": link, "storage_seconds": 1.0, "client_seconds": 1.0}
    found = linprog(
        [-1.0] * len(ways),
        A_ub=[
            [way[name] / most for way in ways] for name, most in names.items()
        ],
        b_ub=[1.0] * len(names),
    )
    return float(-found.fun)


def changes_per_minute(
    plans: Sequence[Mapping[str, Any]], begin: float, end: float
) -> float:
    """Of the plans between two times."""
    count = sum(begin <= plan["time"] < end for plan in plans)
    return 60 * count / (end - begin)


def report(name: str, entry: Mapping[str, Any]) -> str:
    """Events, plans and phases in the order of time."""
    lines = [(e["time"], f"== {e['what']}") for e in entry["events"]]
    for number, job in enumerate(entry["jobs"]):
        which = f"job {number}: " if len(entry["jobs"]) > 1 else ""
        lines += [
            (p["time"], f"{which}{p['mix']}: {p['why']}") for p in job["plans"]
        ]
    lines += [
        (
            phase["end"],
            f"-- {phase['samples_per_second']:.1f} samples/s in the last"
            f" {phase['part'][1] - phase['part'][0]:.0f} s",
        )
        for phase in entry["phases"]
    ]
    shown = [f"{time:7.1f} s  {text}" for time, text in sorted(lines)]
    epochs = sum(len(job["epochs"]) for job in entry["jobs"])
    shown.append(
        f"{epochs} epochs: {entry['lost']} samples lost,"
        f" {entry['doubled']} doubled;"
        f" {sum(job['fallbacks'] for job in entry['jobs'])} spans fell back"
    )
    if "optimum" in entry:
        shown.append(
            f"together {entry['samples_per_second']:.1f} samples/s, joint"
            f" optimum {entry['optimum']:.1f}: {entry['ratio']:.3f} of it"
            f" (goal {entry['goal']}); plan changes per minute: "
            + ", ".join(f"{n:.1f}" for n in entry["plan_changes_per_minute"])
        )
    return "\n".join([f"{name}:", *shown])


def _container(samples: int) -> str:
    return f"adaptation-{MODEL}-{samples}"


def _ask(client: Remote, do: str, **arguments: Any) -> Any:
    return client.ask(do, seconds=QUESTION_SECONDS, **arguments)


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("adaptation", __doc__)
    add_workload(parser)
    add = parser.add_argument
    add("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    add(
        "--phase-seconds",
        type=float,
        default=60.0,
        help="between two events (default 60)",
    )
    found = parser.parse_args(argv)
    if found.phase_seconds <= 0:
        parser.error(f"--phase-seconds is {found.phase_seconds:g}; above 0")
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
            "tars": [tar.name for tar in tars],
        },
        "machine": machine(),
        "versions": versions(),
    }
    with two_tiers() as bed:
        scenarios = Scenarios(
            bed, tars, arguments.floor, arguments.phase_seconds
        )
        for name in arguments.scenarios:
            body[name] = getattr(scenarios, name)()
            print(report(name, body[name]), flush=True)
            if arguments.json is not None:
                write_json(arguments.json, body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
