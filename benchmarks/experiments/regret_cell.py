"""One cell of the regret experiment: ``auto`` and every useful fixed cut."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ratios import Rates, fastest, ratio, rotated
from benchmarks.suite.calibration import calibrate, settle
from benchmarks.suite.contenders import AUTO, CLIENT, STREAM, Ours, ask
from benchmarks.suite.data_sets import store
from benchmarks.suite.experiment import Context
from benchmarks.suite.workloads import (
    QUICK_VOLUME,
    Link,
    Workload,
    streamed_size,
)
from benchmarks.testbed.remote import Remote
from benchmarks.testbed.two_tiers import Testbed

FLOOR = "lossless"
IN_REACH_RATIO = 0.75
"""Fixed cuts slower than this fraction of the best one are measured once."""
STREAM_IN_REACH_RATIO = 0.5
"""Streaming slower than this fraction of the best cut is measured twice."""
SETTLING_SECONDS, QUICK_SETTLING_SECONDS = 45.0, 5.0
MAX_REGRET = 0.05
MAX_REGRET_TO_STREAM = 0.02


@dataclass
class RegretCell:
    """Measures one cell.

    ``entry`` gets the results.
    """

    bed: Testbed
    context: Context
    workload: Workload
    link: Link
    entry: dict[str, Any]

    def run(self) -> None:
        """Fills the entry."""
        started = time.monotonic()
        container = self._store()
        with self.bed.client.remote(CLIENT) as client:
            ask(
                client,
                "prepare",
                model=self.workload.model,
                freeze=self.workload.freeze_module,
                container=container,
                floor=FLOOR,
                epochs=None,
            )
            ask(client, "open", name=STREAM, cut=STREAM)
            stream = Ours(self.bed, client, STREAM)
            self.entry |= calibrate(self.bed, stream, self.link)
            limit = self.entry["link_bytes_per_second"]
            outlook = ask(client, "outlook", link=limit, container=container)
            self._measure(client, self._warm_up(client, outlook))
        judge(self.entry)
        self.entry["complete"] = True
        self.entry["seconds"] = time.monotonic() - started

    def _store(self) -> str:
        size = self.workload.pushed_size(streamed_size(self.link))
        volume = self.workload.volumes[size]
        if self.context.quick:
            volume = QUICK_VOLUME
        volume = volume.times(self.context.scale)
        name = self.workload.container(f"{volume.samples}-regret")
        if not (self.bed.folder / "data" / name).exists():
            store(self.bed, self.context.tars, name, volume)
        self.entry["samples"] = volume.samples
        return name

    def _warm_up(self, client: Remote, view: Mapping[str, Any]) -> list[str]:
        """Opens all contenders and runs them once; returns their names."""
        self.entry |= {
            "predicted": view["predicted"],
            "shared": view["policies"],
            "encodings": {},
            "ruled_out": {},
            "fallbacks": {},
            "bytes_per_sample": {},
        }
        warm = {STREAM: self._epoch(client, STREAM, 0)}
        ask(client, "open", name=AUTO, cut=AUTO)
        quick = self.context.quick
        self.entry["settling"] = settle(
            lambda: self._epoch(client, AUTO, 0),
            lambda: ask(client, "plan", name=AUTO)["label"],
            QUICK_SETTLING_SECONDS if quick else SETTLING_SECONDS,
        )["plans"]
        for option in sorted(view["cuts"], key=lambda x: x["link_bytes"]):
            name, encoding = option["name"], option["encoding"]
            size = option["link_bytes"]
            reason = self._ruled_out(size, max(warm.values()))
            if reason is not None:
                self.entry["ruled_out"][name] = reason
                continue
            cut = option["cut"]
            ask(client, "open", name=name, cut=cut, encoding=encoding)
            self.entry["encodings"][name] = encoding
            warm[name] = self._epoch(client, name, 0)
        return [AUTO, *warm]

    def _ruled_out(self, size: float, best: float) -> str | None:
        """The reason if the link alone makes a cut slower than the best."""
        limit = self.entry["link_bytes_per_second"]
        if limit is None or limit / size >= best:
            return None
        return (
            f"at {size:.0f} bytes a sample the link allows"
            f" {limit / size:.2f} samples/s; {best:.2f} were reached"
        )

    def _measure(self, client: Remote, names: Sequence[str]) -> None:
        rounds: dict[str, list[float]] = {name: [] for name in names}
        self.entry |= {"rounds": rounds, "out_of_reach": []}
        active = list(names)
        for number in range(self.context.rounds):
            for name in rotated(active, number):
                rounds[name].append(self._epoch(client, name, number + 1))
            slow = out_of_reach(rounds)
            self.entry["out_of_reach"] = slow
            active = [name for name in active if name not in slow]
            self.context.save()
            self._note(
                f"round {number + 1}/{self.context.rounds}: "
                + ", ".join(f"{n} {rounds[n][-1]:.1f}" for n in active)
            )
        plan = ask(client, "plan", name=AUTO)
        self.entry["plan"] = plan["label"]
        self.entry["plan_samples_per_second"] = plan["samples_per_second"]

    def _epoch(self, client: Remote, name: str, epoch: int) -> float:
        [done] = Ours(self.bed, client, name).epochs(epoch, 1)
        counts = self.entry["fallbacks"]
        counts[name] = counts.get(name, 0) + done["fallbacks"]
        self.entry["bytes_per_sample"][name] = done["down_bytes"]
        return float(done["samples_per_second"])

    def _note(self, text: str) -> None:
        self.context.note(f"{self.entry['name']}: {text}")


def out_of_reach(rounds: Rates) -> list[str]:
    """Fixed cuts far behind in round 1, and streaming after round 2."""
    fixed = [name for name in rounds if name != AUTO]
    best = max(rounds[name][0] for name in fixed)
    slow = [
        name
        for name in fixed
        if name != STREAM and rounds[name][0] < IN_REACH_RATIO * best
    ]
    streamed = rounds[STREAM][:2]
    if len(streamed) == 2 and max(streamed) < STREAM_IN_REACH_RATIO * best:
        slow.append(STREAM)
    return slow


def regret(rates: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """1 - median of the rounds' ratios, with its 95 % interval.

    0.03 is 3 % slower than the other contender, -0.03 faster.
    """
    measured = ratio(rates, other)
    low, high = measured["interval"]
    return {"regret": 1 - measured["median"], "interval": [1 - high, 1 - low]}


def judge(entry: dict[str, Any]) -> None:
    """Adds medians, regret and verdict to a cell's entry.

    A cell is *missed* if the interval of its regret lies above the allowed
    one, and *above the best fixed cut* if it lies below 0.
    """
    rounds: Mapping[str, Sequence[float]] = entry["rounds"]
    best = fastest(rounds, [name for name in rounds if name != AUTO])
    rates = {name: statistics.median(trial) for name, trial in rounds.items()}
    entry["best_static"] = best
    entry["samples_per_second"] = {
        # A policy whose cut was ruled out has no rate.
        **{name: rates.get(cut) for name, cut in entry["shared"].items()},
        **rates,
        "best_static": rates[best],
    }
    entry |= regret(rounds[AUTO], rounds[best])
    streamed = rounds[STREAM]
    to_stream = regret(rounds[AUTO][: len(streamed)], streamed)
    entry["against_stream"] = to_stream
    entry["missed"] = (
        entry["interval"][0] > MAX_REGRET
        or to_stream["interval"][0] > MAX_REGRET_TO_STREAM
    )
    entry["above_best_static"] = entry["interval"][1] < 0
