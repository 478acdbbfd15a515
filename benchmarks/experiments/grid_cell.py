"""One cell of the grid: calibration, warm-up, interleaved rounds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.experiments.verdict import (
    AGAIN,
    MAX_OPPONENTS,
    MAX_SLOW_OPPONENTS,
    in_reach,
    rates_of,
)
from benchmarks.ratios import fastest, rotated
from benchmarks.suite.calibration import calibrate, settle
from benchmarks.suite.contenders import (
    AUTO,
    CLIENT,
    EXTERNALS,
    FREEZE,
    STREAM,
    TAR_STREAM,
    Contender,
    Opponent,
    Ours,
    ask,
)
from benchmarks.suite.lineup import Lineup
from benchmarks.suite.workloads import (
    LONG,
    SHORT,
    Link,
    is_slow,
    streamed_size,
)
from benchmarks.testbed.remote import Remote

MAX_SETTLING_SECONDS = 45.0
QUICK_SETTLING_SECONDS = 5.0
SETTLING_WINDOW_SECONDS = 8.0


@dataclass
class GridCell:
    """Measures one cell.

    ``entry`` gets the results.
    """

    lineup: Lineup
    link: Link
    entry: dict[str, Any]
    _epoch: int = 0

    def __post_init__(self) -> None:
        self.bed, self.context = self.lineup.bed, self.lineup.context

    def run(self) -> None:
        """Fills the entry, except for the verdict."""
        size = streamed_size(self.link)
        pushed = self.lineup.workload.pushed_size(size)
        # Data and packages are stored before the link is limited: a large
        # package takes a slow link most of an hour.
        for workload in (size, pushed, LONG):
            self.lineup.place(workload)
        if self.bed.shaped:
            self.bed.set_link(None)
        for name in self.lineup.opponents:
            opponent = self.lineup.prepare(name, SHORT)
            opponent.forget()
            opponent.epochs(0, 1)
        with self.bed.client.remote(CLIENT) as client:
            contenders = self._open(client, size, pushed)
            self._calibrate()
            for name in self.lineup.opponents:
                self.lineup.prepare(name, size)
            self._warm_up(client, contenders)
            self._measure(contenders)
            self.entry["plan"] = ask(client, "plan", name=AUTO)["label"]

    def _note(self, text: str) -> None:
        self.context.note(f"{self.entry['name']}: {text}")

    def _calibrate(self) -> None:
        tar_stream = self.lineup.prepare(TAR_STREAM, LONG)
        self.entry |= calibrate(self.bed, tar_stream, self.link)
        rate = self.entry["calibration"]["samples_per_second"]
        self._note(f"the tar stream saturates at {rate:.1f} samples/s")

    def _epoch_of(self, contender: Contender) -> dict[str, Any]:
        """Trains a whole epoch with empty caches."""
        if isinstance(contender, Opponent):
            contender.forget()
        self._epoch += 1
        [epoch] = contender.epochs(self._epoch, 1)
        if epoch.get("fallbacks") and contender.name != AUTO:
            self._note(
                f"{contender.name}: {epoch['fallbacks']} spans fell back to"
                " raw reads; this epoch does not measure the fixed cut"
            )
        return epoch

    def _open(
        self, client: Remote, size: str, pushed: str
    ) -> dict[str, Contender]:
        """Opens HAPI's jobs; returns all contenders of the cell."""
        workload = self.lineup.workload
        ask(
            client,
            "prepare",
            model=workload.model,
            freeze=workload.freeze_module,
            container=self.lineup.place(pushed).container,
            floor="lossless",
            epochs=None,
            channels_last=self.lineup.settings[TAR_STREAM]["options"][
                "channels_last"
            ],
        )
        contenders: dict[str, Contender] = dict(self.lineup.opponents)
        for name in (STREAM, FREEZE, AUTO):
            place = self.lineup.place(size if name == STREAM else pushed)
            container = place.container
            ask(client, "open", name=name, cut=name, container=container)
            contenders[name] = Ours(self.bed, client, name)
        return contenders

    def _warm_up(
        self, client: Remote, contenders: Mapping[str, Contender]
    ) -> None:
        """Runs our jobs once, and ``auto`` until its plan is stable."""
        for name in (STREAM, FREEZE):
            self._epoch_of(contenders[name])

        def train() -> None:
            # Less than an epoch: until there is a plan, the job streams.
            self._epoch += 1
            ask(
                client,
                "follow",
                name=AUTO,
                epoch=self._epoch,
                until=time.monotonic() + SETTLING_WINDOW_SECONDS,
            )

        def plan() -> Any:
            return ask(client, "plan", name=AUTO)

        quick = self.context.quick
        self.entry["settling"] = {
            AUTO: settle(
                train,
                lambda: plan()["label"],
                QUICK_SETTLING_SECONDS if quick else MAX_SETTLING_SECONDS,
                lambda: quick or plan()["is_decided"],
            )
        }

    def _measure(self, contenders: Mapping[str, Contender]) -> None:
        rounds: dict[str, list[dict[str, Any]]] = {n: [] for n in contenders}
        self.entry["rounds"] = rounds
        active, again = list(contenders), ""
        for number in range(self.context.rounds):
            order = rotated(active, number)
            for name in order:
                contender = contenders[again if name == AGAIN else name]
                rounds[name].append(self._epoch_of(contender))
            if not number:
                first = {name: rates_of(rounds[name]) for name in rounds}
                self.entry["again"] = again = fastest(first, EXTERNALS)
                rounds[AGAIN] = [self._epoch_of(contenders[again])]
                slow = is_slow(self.link)
                most = MAX_SLOW_OPPONENTS if slow else MAX_OPPONENTS
                active = [*in_reach(first, most), AGAIN]
            self.context.save()
            self._note(
                f"round {number + 1}/{self.context.rounds}: "
                + ", ".join(
                    f"{name} {rates_of(rounds[name])[-1]:.1f}"
                    for name in sorted(order)
                )
            )
