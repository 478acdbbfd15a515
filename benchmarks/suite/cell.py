"""One cell of the grid: calibration, warm-up, interleaved rounds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cell_run import rotated
from benchmarks.cells import BACKBONE
from benchmarks.regret import AUTO, STREAM
from benchmarks.remote import Remote
from benchmarks.suite.contenders import (
    RESIZED,
    TAR_STREAM,
    Contender,
    Opponent,
    Ours,
)
from benchmarks.suite.data_sets import CLIENT, SECONDS
from benchmarks.suite.lineup import Lineup, options_at
from benchmarks.suite.results import stamp
from benchmarks.suite.tiers import calibrate, saturating_rate, settle
from benchmarks.suite.verdict import (
    AGAIN,
    AUTO_RESIZED,
    CHOOSING_ROUNDS,
    FLOAT16,
    FREEZE_ALL,
    MAX_OPPONENTS,
    MAX_SLOW,
    best_external,
    in_reach,
    rates_of,
)
from benchmarks.suite.workloads import LONG, cell_name, is_slow, streamed

from hapi_client.model.frozen_region import FREEZE

RESIZED_LINKS = (None, 0.25, 10.0)
"""Where what reads resized photographs is measured too."""
FLOAT16_LINKS = (None, 0.25)
"""Where backbones are pushed in float16 as well."""
MAX_SETTLING_SECONDS = 45.0
QUICK_SETTLING_SECONDS = 5.0
SETTLING_WINDOW_SECONDS = 8.0


@dataclass
class CellRun:
    """Measures one cell.

    Args:
        lineup: the opponents, and the workload.
        link: as a multiple of what saturates the client; None: unshaped.
        calibrator: a tar stream beside that of the lineup, which says how
            fast the machine is at the moment.
    """

    lineup: Lineup
    link: float | None
    calibrator: Opponent
    entry: dict[str, Any] = field(default_factory=dict)
    _epoch: int = 0

    def __post_init__(self) -> None:
        self.bed, self.context = self.lineup.bed, self.lineup.context
        workload = self.lineup.workload
        self.entry |= {
            "name": cell_name(workload, self.link),
            "model": workload.model,
            "freeze": workload.freeze,
            "link": self.link,
            **stamp(),
            "complete": False,
        }

    def run(self) -> None:
        """Fills the entry, all but what follows from the rounds."""
        size = streamed(self.link)
        pushed = self.lineup.workload.pushed(size)
        # What is not stored yet is stored without a limit: before it is set.
        for each in (size, pushed, LONG):
            self.lineup.place(each)
        if self.bed.shaped:
            self.bed.set_link(None)
        self.lineup.warm_up(self.link)
        self.calibrator.prepare(
            self.lineup.workload.task,
            self.lineup.place(LONG),
            options_at(self.lineup.settings[TAR_STREAM], None),
        )
        with self.bed.client.remote(CLIENT) as client:
            # Packages are sent without a limit too: that of a large network
            # takes a slow link most of an hour.
            contenders = self._opened(client, size, pushed)
            self.entry |= calibrate(self.bed, self.calibrator, self.link)
            self.lineup.prepare(size, self.link)
            rate = self.entry["calibration"]["samples_per_second"]
            self._note(f"the tar stream saturates at {rate:.1f}")
            self._warm_up(client, contenders)
            self._measure(contenders)
            self.entry["plan"] = _ask(client, "plan", name=AUTO)["label"]

    @property
    def _is_slow(self) -> bool:
        """Whether it carries less than streaming could use."""
        return is_slow(self.link)

    def _note(self, text: str) -> None:
        self.context.note(f"{self.entry['name']}: {text}")

    def _pass(self, contender: Contender) -> dict[str, Any]:
        """A whole epoch that finds nothing of an earlier one."""
        if isinstance(contender, Opponent):
            contender.forget()
        self._epoch += 1
        [found] = contender.epochs(self._epoch, 1)
        planned = contender.name in (AUTO, AUTO_RESIZED)
        if found.get("fallbacks") and not planned:
            self._note(
                f"{contender.name}: {found['fallbacks']} spans fell back to"
                " streaming; this pass is not of what its name says"
            )
        return found

    def _opened(
        self, client: Remote, size: str, pushed: str
    ) -> dict[str, Contender]:
        """Every contender of the cell; ours are opened here."""
        workload = self.lineup.workload
        _ask(
            client,
            "prepare",
            model=workload.model,
            freeze=workload.freeze_module,
            container=self.lineup.place(pushed).container,
            floor="lossless",
            epochs=None,
            channels_last=options_at(
                self.lineup.settings[TAR_STREAM], self.link
            )["channels_last"],
        )
        contenders: dict[str, Contender] = dict(self.lineup.opponents)
        photographs = self.lineup.place(pushed).container
        ours: dict[str, dict[str, Any]] = {
            STREAM: {
                "cut": STREAM,
                "container": self.lineup.place(size).container,
            },
            FREEZE_ALL: {"cut": FREEZE, "container": photographs},
            AUTO: {"cut": AUTO, "container": photographs},
        }
        if self.link in FLOAT16_LINKS and workload.freeze == BACKBONE:
            ours[FLOAT16] = {**ours[FREEZE_ALL], "encoding": "float16"}
        if self.link in RESIZED_LINKS:
            resized = self.lineup.place(LONG).resized
            ours[AUTO_RESIZED] = {"cut": AUTO, "container": resized}
        else:
            contenders.pop(RESIZED, None)
        for name, options in ours.items():
            _ask(client, "open", name=name, **options)
            contenders[name] = Ours(self.bed, client, name)
        return contenders

    def _warm_up(
        self, client: Remote, contenders: Mapping[str, Contender]
    ) -> None:
        """Ours once, and until plans stay; opponents have run by now."""
        self.entry["settling"] = settling = {}
        for name, each in contenders.items():
            if name in (AUTO, AUTO_RESIZED):
                settling[name] = self._settle(client, each)
            elif isinstance(each, Ours):
                self._pass(each)

    def _settle(self, client: Remote, contender: Contender) -> dict[str, Any]:
        def window() -> None:
            # Not an epoch: until there is a plan, it goes at the link's rate.
            self._epoch += 1
            _ask(
                client,
                "diary",
                name=contender.name,
                epoch=self._epoch,
                until=time.monotonic() + SETTLING_WINDOW_SECONDS,
            )

        def plan() -> Any:
            return _ask(client, "plan", name=contender.name)

        quick = self.context.quick
        return settle(
            window,
            lambda: plan()["label"],
            QUICK_SETTLING_SECONDS if quick else MAX_SETTLING_SECONDS,
            lambda: quick or plan()["is_decided"],
        )

    def _measure(self, contenders: Mapping[str, Contender]) -> None:
        rounds: dict[str, list[dict[str, Any]]] = {n: [] for n in contenders}
        self.entry["rounds"] = rounds
        active, again = list(contenders), ""
        beside = self.entry["calibration"]["beside"] = []
        limit = self.entry["link_bytes_per_second"]
        for number in range(self.context.rounds):
            measured = rotated(active, number)
            for index, name in enumerate(measured):
                if index == len(measured) // 2:
                    beside.append(
                        saturating_rate(self.bed, self.calibrator, limit)
                    )
                each = contenders[again if name == AGAIN else name]
                rounds[name].append(self._pass(each))
            if number + 1 == CHOOSING_ROUNDS:
                first = {name: rates_of(rounds[name]) for name in rounds}
                self.entry["again"] = again = best_external(first)
                rounds[AGAIN] = [self._pass(contenders[again])]
                most = MAX_SLOW if self._is_slow else MAX_OPPONENTS
                active = [*in_reach(first, most), AGAIN]
            self.context.save()
            self._note(
                f"round {number + 1}/{self.context.rounds}: "
                + ", ".join(
                    f"{name} {rates_of(rounds[name])[-1]:.1f}"
                    for name in sorted(measured)
                )
            )


def _ask(client: Remote, do: str, **arguments: Any) -> Any:
    return client.ask(do, seconds=SECONDS, **arguments)
