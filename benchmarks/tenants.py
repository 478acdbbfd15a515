"""Jobs that each plan for themselves, beside one plan for all of them.

Their samples per second are compared with two others:

* the optimum of a linear program with all jobs in it;
* what the same jobs have with that program's mix, dealt to them
  (``joint``): planned by somebody who knows all jobs and all costs so far.

The program's costs are CPU seconds of each tier's processes, and bytes, for
one sample of each fixed cut.  They are measured alone, one cut by one job
after the other, in turn with the rounds.

The speed of a machine that others share changes by more than 10 % within
minutes, so a speedometer runs on each tier's core all the time
(:mod:`benchmarks.speedometer`): costs of a pass count in pieces of its work,
and the optimum of a phase is that at the phase's own speed.  What the jobs
themselves waste makes the speedometer no slower, and so counts against them.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from benchmarks.cell_run import stage_of
from benchmarks.cpu_seconds import session_seconds
from benchmarks.joint_plan import (
    at_speed,
    dearer,
    joint_optimum,
    mean_costs,
    optimal_mix,
    scaled,
)
from benchmarks.network import FRAME_BYTES, PAYLOAD_BYTES
from benchmarks.regret import AUTO, interval_of, regret_of
from benchmarks.remote import Remote
from benchmarks.testbed import Testbed

from hapi_client.planning.replanner import ReplanOptions

JOINT = "joint"
GOAL = 0.95
MAX_CHANGES_PER_MINUTE = 60 / (0.75 * ReplanOptions().seconds)
"""The shortest time between two looks, and a change at each."""
QUESTION_SECONDS = 900.0


@dataclass(frozen=True)
class Throughput:
    """How long is measured.

    Attributes:
        rounds: in each, costs, then both contenders.
        settling_seconds: of the planning jobs, before the first round.
        filling_seconds: at the start of a phase, not counted.
        seconds: that are counted.
    """

    rounds: int = 8
    settling_seconds: float = 90.0
    filling_seconds: float = 15.0
    seconds: float = 45.0


@dataclass(frozen=True)
class Tenants:
    """Measures jobs that run already.

    Args:
        bed: the testbed.
        clients: one for each job; each has contenders ``auto`` and
            ``joint``, the first one also those of ``ways``.
        speedometers: of each tier.
        ways: cut and encoding of each fixed contender.
        fixed: name of such a contender's job.
        link: bytes per second.
        pace: how long.
        note: told of the progress, a line at a time.
    """

    bed: Testbed
    clients: Sequence[Remote]
    speedometers: Mapping[str, Remote]
    ways: Mapping[str, tuple[int, str]]
    fixed: Callable[[str], str]
    link: float
    pace: Throughput
    note: Callable[[str], None]

    def run(self) -> dict[str, Any]:
        """The entry in the results; see :mod:`benchmarks.adaptation`."""
        passes = [self._costs()]
        settling = self._phase(AUTO, self.pace.settling_seconds)
        last = [settling]
        rounds: list[dict[str, Any]] = []
        for number in range(self.pace.rounds):
            mix = self._joint_mix(passes, last)
            self._deal(mix)
            order = (AUTO, JOINT) if number % 2 else (JOINT, AUTO)
            phases = {name: self._phase(name) for name in order}
            rounds.append({"mix": mix, **phases})
            last = list(phases.values())
            passes.append(self._costs())
        return {
            "link_bytes_per_second": self.link,
            "passes": passes,
            "settling": settling,
            "rounds": rounds,
            "most_changes_per_minute": MAX_CHANGES_PER_MINUTE,
            "goal": GOAL,
            **judge(passes, settling, rounds, self.link),
        }

    def _costs(self) -> dict[str, dict[str, Any]]:
        """What a sample of each fixed cut takes, without a limit."""
        self.bed.set_link(None)
        found = {}
        for name in self.ways:
            begin = time.monotonic()
            before = self.bed.storage_seconds()
            done = _ask(self.clients[0], "run", name=self.fixed(name), epoch=1)
            if done["fallbacks"]:
                raise ValueError(
                    f"{name}: {done['fallbacks']} spans were streamed; such "
                    "a pass does not measure its cut"
                )
            seconds = self.bed.storage_seconds() - before
            found[name] = {
                **stage_of(done, seconds),
                "speeds": self._speeds(begin, time.monotonic()),
            }
        self.bed.set_link(self.link)
        self.note(
            f"costs: optimum {joint_optimum(found, self.link):.1f} samples/s"
        )
        return found

    def _speeds(self, begin: float, end: float) -> dict[str, Any]:
        return {
            tier: _ask(speedometer, "read", begin=begin, end=end)
            for tier, speedometer in self.speedometers.items()
        }

    def _joint_mix(
        self,
        passes: Sequence[Mapping[str, Any]],
        phases: Sequence[Mapping[str, Any]],
    ) -> dict[str, float]:
        """The optimum's, with the costs that held in the last phases."""
        held = [
            scaled(costs, dearer(phase, costs))
            for phase in phases
            for costs in [at_speed(passes, phase["speeds"])]
        ]
        return optimal_mix(mean_costs(held), self.link)

    def _deal(self, mix: Mapping[str, float]) -> None:
        parts = [(*self.ways[name], part) for name, part in mix.items()]
        for client in self.clients:
            _ask(client, "deal", name=JOINT, mix=parts)

    def _phase(
        self, name: str, seconds: float | None = None
    ) -> dict[str, Any]:
        """All jobs for a while."""
        started = time.monotonic()
        begin = started + self.pace.filling_seconds
        end = begin + (seconds or self.pace.seconds)
        length = end - started

        def follow(client: Remote) -> Any:
            return _ask(client, "follow", name=name, length=length)

        with ThreadPoolExecutor(len(self.clients)) as pool:
            following = [pool.submit(follow, each) for each in self.clients]
            readings = [self._read(begin), self._read(end)]
            jobs = [each.result() for each in following]
        for job in jobs:
            since(started, job)
        part = (begin - started, end - started)
        entry = {
            "speeds": self._speeds(begin, end),
            "samples_per_second": rate_of(
                [job["progress"] for job in jobs], *part
            ),
            "used": used(*readings, self.link),
            "by_cut": by_cut(jobs, *part),
            "plan_changes_per_minute": [
                changes_per_minute(job["plans"], *part) for job in jobs
            ],
            "jobs": jobs,
        }
        self.note(f"{name}: {describe(entry)}")
        return entry

    def _read(self, due: float) -> dict[str, float]:
        """Counters at a time of the monotonic clock."""
        time.sleep(max(0.0, due - time.monotonic()))
        assert self.bed.link is not None
        return {
            "time": time.monotonic(),
            "link": self.bed.link.traffic().down * PAYLOAD_BYTES / FRAME_BYTES,
            "storage": self.bed.storage_seconds(),
            "client": session_seconds({each.pid for each in self.clients}),
        }


def judge(
    passes: Sequence[Mapping[str, Any]],
    settling: Mapping[str, Any],
    rounds: Sequence[Mapping[str, Any]],
    link: float,
) -> dict[str, Any]:
    """What all measurements together say.

    Args:
        passes: costs, alone.
        settling: the phase before the first round.
        rounds: with a phase of each contender.
        link: bytes per second.
    """
    alone = mean_costs(passes)
    optimum = joint_optimum(alone, link)
    planned, joint = (
        contender([each[name] for each in rounds], passes, link)
        for name in (AUTO, JOINT)
    )
    against = regret_of(
        *(
            [each[n]["samples_per_second"] for each in rounds]
            for n in (AUTO, JOINT)
        )
    )
    phases = [
        settling,
        *(each[name] for each in rounds for name in (AUTO, JOINT)),
    ]
    epochs = [e for p in phases for job in p["jobs"] for e in job["epochs"]]
    return {
        **planned,
        "joint": {
            **joint,
            "regret": against.regret,
            "regret_interval": against.interval,
        },
        "alone": {
            "stages": alone,
            "optimum": optimum,
            "optima": [joint_optimum(each, link) for each in passes],
            "ratio": planned["samples_per_second"] / optimum,
        },
        "plan_changes_per_minute": [
            statistics.mean(each)
            for each in zip(
                *(r[AUTO]["plan_changes_per_minute"] for r in rounds),
                strict=True,
            )
        ],
        "lost": sum(epoch["lost"] for epoch in epochs),
        "doubled": sum(epoch["doubled"] for epoch in epochs),
        **{
            key: sum(job[key] for p in phases for job in p["jobs"])
            for key in ("fallbacks", "retries")
        },
    }


def contender(
    phases: Sequence[Mapping[str, Any]],
    passes: Sequence[Mapping[str, Any]],
    link: float,
) -> dict[str, Any]:
    """What one contender had, of what could be had.

    Args:
        phases: of it.
        passes: costs, alone.
        link: bytes per second.
    """
    costs = [at_speed(passes, phase["speeds"]) for phase in phases]
    optima = [
        joint_optimum(each, link, phase["speeds"])
        for each, phase in zip(costs, phases, strict=True)
    ]
    rates = [phase["samples_per_second"] for phase in phases]
    ratios = [rate / most for rate, most in zip(rates, optima, strict=True)]
    return {
        "samples_per_second": statistics.mean(rates),
        "optimum": statistics.mean(optima),
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "interval": interval_of(ratios, np.median),
        "used": _means([phase["used"] for phase in phases]),
        "dearer": _means(list(map(dearer, phases, costs))),
    }


def by_cut(
    jobs: Sequence[Mapping[str, Any]], begin: float, end: float
) -> dict[str, int]:
    """Samples of all jobs that came between two times.

    Args:
        jobs: diaries, with ``progress`` and, at its times, ``cuts``.
        begin, end: seconds.
    """
    sums: Counter[str] = Counter()
    for job in jobs:
        times = [when for when, _ in job["progress"]]
        counts = Counter(job["cuts"][bisect(times, end) - 1])
        counts.subtract(job["cuts"][bisect(times, begin) - 1])
        sums.update(counts)
    return {cut: count for cut, count in sums.items() if count}


def _means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: statistics.mean(p[key] for p in parts) for key in parts[0]}


def rate_of(
    progress: Sequence[Sequence[tuple[float, int]]], begin: float, end: float
) -> float:
    """Samples per second of all jobs between two times.

    Args:
        progress: of each job, (time, samples so far).
        begin, end: seconds.
    """
    samples = sum(
        float(np.interp(end, *zip(*each, strict=True)))
        - float(np.interp(begin, *zip(*each, strict=True)))
        for each in progress
    )
    return samples / (end - begin)


def since(started: float, job: dict[str, Any]) -> None:
    """Makes all times of a job's diary relative to a time."""
    job["progress"] = [(t - started, n) for t, n in job["progress"]]
    for plan in job["plans"]:
        plan["time"] -= started


def changes_per_minute(
    plans: Sequence[Mapping[str, Any]], begin: float, end: float
) -> float:
    """Of the plans between two times."""
    count = sum(begin <= plan["time"] < end for plan in plans)
    return 60 * count / (end - begin)


def used(
    before: Mapping[str, float], after: Mapping[str, float], link: float
) -> dict[str, float]:
    """Part of each resource that was in use between two readings.

    Args:
        before, after: ``time``, ``link`` (payload bytes so far),
            ``storage`` and ``client`` (CPU seconds so far of one core each).
        link: bytes per second.
    """
    seconds = after["time"] - before["time"]
    most = {"link": link, "storage": 1.0, "client": 1.0}
    return {
        key: (after[key] - before[key]) / seconds / limit
        for key, limit in most.items()
    }


def describe(phase: Mapping[str, Any]) -> str:
    """One line of a phase."""
    parts = ", ".join(
        f"{key} {100 * part:.0f} %" for key, part in phase["used"].items()
    )
    return f"{phase['samples_per_second']:.1f} samples/s; used: {parts}"


def report(entry: Mapping[str, Any]) -> str:
    """Rounds, and what they say together."""
    lines = ["tenants:"]
    for number, each in enumerate(entry["rounds"]):
        for name in (AUTO, JOINT):
            lines.append(f"round {number + 1}: {name}: {describe(each[name])}")
    alone = entry["alone"]
    lines += [
        f"{entry['lost']} samples lost, {entry['doubled']} doubled;"
        f" {entry['fallbacks']} spans fell back",
        "plan changes per minute: "
        + ", ".join(f"{n:.1f}" for n in entry["plan_changes_per_minute"]),
        f"joint optimum without regard to speed: {alone['optimum']:.1f}"
        f" ({min(alone['optima']):.1f} to {max(alone['optima']):.1f});"
        f" {AUTO} has {alone['ratio']:.3f} of it",
        f"{JOINT}: {_verdict(entry['joint'])}",
        f"{AUTO}: {_verdict(entry)}; goal {entry['goal']}",
    ]
    return "\n".join(lines)


def _verdict(found: Mapping[str, Any]) -> str:
    low, high = found["interval"]
    more = ", ".join(
        f"{tier} {part:.2f}" for tier, part in found["dearer"].items()
    )
    return (
        f"together {found['samples_per_second']:.1f} samples/s,"
        f" {found['ratio']:.3f} of the joint optimum at equal speed"
        f" ({low:.3f} to {high:.3f});"
        f" dearer than alone: {more}"
    )


def _ask(client: Remote, do: str, **arguments: Any) -> Any:
    return client.ask(do, seconds=QUESTION_SECONDS, **arguments)
