"""The opponents of a workload: their data in Swift, and their settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.opponents.training import Place
from benchmarks.opponents.tuning import choose, first_enough
from benchmarks.opponents.window import Throughput
from benchmarks.suite.contenders import (
    EXTERNALS,
    RESIZED,
    STORED_AS,
    TAR_STREAM,
    Opponent,
    absent,
    start,
)
from benchmarks.suite.data_sets import store
from benchmarks.suite.experiment import Context
from benchmarks.suite.workloads import LONG, SHORT, Workload, is_slow
from benchmarks.testbed import Testbed

MEASURED = (*EXTERNALS, RESIZED)
TUNING_PACE = Throughput(
    fill_seconds=1.0, fill_batches=2, seconds=3.0, batches=6, most_seconds=6.0
)
SLOW, EVEN = "slow", "even"
TUNED_AT: Mapping[str, float] = {SLOW: 0.25, EVEN: 1.0}
"""Links, as multiples of what an opponent reads without a limit."""
MAX_EVEN = 4.0
"""A link that carries more has the settings of one without a limit."""
READS_AS: Mapping[str, str] = {"local-features": TAR_STREAM}
"""Whose settings an opponent takes over from another experiment."""
ENOUGH = 0.97
"""Of what a slow link carries."""


def options_at(
    settings: Mapping[str, Any], link: float | None
) -> Mapping[str, Any]:
    """An opponent's, for a link.

    Args:
        settings: of an opponent, as in the results; empty without tuning.
        link: as a multiple of what saturates the client; None: no limit.
    """
    found = settings
    if link is not None and link <= MAX_EVEN:
        found = settings.get(SLOW if is_slow(link) else EVEN, settings)
    options: Mapping[str, Any] = found.get("options", {})
    return options


@dataclass
class Lineup:
    """Who runs, on what; kept from workload to workload.

    Args:
        bed: the testbed.
        context: of the experiment; ``section["opponents"]`` gets the
            settings.
        workload: the one at present.
        opponents: processes that are there.
    """

    bed: Testbed
    context: Context
    workload: Workload
    opponents: Mapping[str, Opponent]
    _places: dict[tuple[str, int], Place] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Of the opponents for the present network."""
        found: dict[str, Any] = self.context.section["opponents"]
        return found.setdefault(self.workload.model, {})

    def place(self, size: str) -> Place:
        """The present workload's data set of a size, stored once."""
        volume = self.workload.volumes[SHORT if self.context.quick else size]
        volume = volume.times(self.context.scale)
        key = (self.workload.model, volume.samples)
        if key not in self._places:
            self.context.note(
                f"{self.workload.model}: storing {volume.samples} samples"
            )
            self._places[key] = store(
                self.bed,
                self.context.tars,
                self.workload.container(str(volume.samples)),
                volume.samples,
                volume.shard_samples,
                [STORED_AS[n] for n in self.opponents if n in STORED_AS],
                self.workload.task.resize_size,
            )
        return self._places[key]

    def enter(self, workload: Workload) -> None:
        """Goes on to a workload, and tunes for its network if that is new."""
        self.workload = workload
        known = self.context.tuned.get(workload.model, {})
        for name, opponent in self.opponents.items():
            if name not in self.settings:
                found = known.get(READS_AS.get(name, name))
                if found is None:
                    found = self._tuned(opponent)
                self.settings[name] = found
                self.context.note(
                    f"{name}: {found['options']}; "
                    + "; ".join(
                        f"{link}: {found[link]['options']}"
                        for link in TUNED_AT
                        if link in found
                    )
                )
                self.context.save()

    def prepare(self, size: str, link: float | None) -> None:
        """Has every opponent take the workload.

        Args:
            size: of the data set; what reads resized photographs is not at
                the link's rate where others are, and has the long one.
            link: whose settings they get.
        """
        for name in self.opponents:
            self.prepared(name, LONG if name == RESIZED else size, link)

    def prepared(self, name: str, size: str, link: float | None) -> Opponent:
        """One opponent that has taken the workload."""
        opponent = self.opponents[name]
        opponent.prepare(
            self.workload.task,
            self.place(size),
            options_at(self.settings[name], link),
        )
        return opponent

    def warm_up(self, link: float | None) -> None:
        """A short epoch of everybody, without a limit."""
        self.prepare(SHORT, link)
        for opponent in self.opponents.values():
            opponent.forget()
            opponent.epochs(0, 1)

    def _tuned(self, opponent: Opponent) -> dict[str, Any]:
        """Without a limit on the link, and with others."""
        found = self._tuned_fast(opponent)
        if self.bed.shaped:
            found[EVEN] = self._tuned_even(opponent, found)
            found[SLOW] = self._tuned_slow(opponent, found)
        return found

    def _tuned_fast(self, opponent: Opponent) -> dict[str, Any]:
        """Without a limit on the link."""
        if self.bed.shaped:
            self.bed.set_link(None)
        grid = opponent.grid[:1] if self.context.quick else opponent.grid
        return {
            "versions": dict(opponent.versions),
            **self._fastest(opponent, grid),
        }

    def _tuned_even(
        self, opponent: Opponent, found: Mapping[str, Any]
    ) -> dict[str, Any]:
        """On a link that carries just what it reads without a limit."""
        # In a short epoch, starting its workers would make it seem slower,
        # and on a link so slow all settings are as fast.
        self._set_link(opponent, found["options"], TUNED_AT[EVEN], LONG)
        if self.context.quick:
            return self._fastest(opponent, [found["options"]])
        return self._fastest(opponent, opponent.grid)

    def _fastest(
        self, opponent: Opponent, grid: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        place = self.place(LONG)

        def rate(options: Mapping[str, Any]) -> float:
            opponent.prepare(self.workload.task, place, options)
            found = opponent.window(0, TUNING_PACE)
            return float(found["samples_per_second"])

        options, tried = choose(rate, grid)
        return {"options": dict(options), "grid": tried}

    def _set_link(
        self,
        opponent: Opponent,
        options: Mapping[str, Any],
        part: float,
        size: str,
    ) -> float:
        """To a part of what an opponent reads in an epoch without a limit.

        Returns:
            Samples per second that the link carries.
        """
        self.bed.set_link(None)
        opponent.prepare(self.workload.task, self.place(size), options)
        opponent.forget()
        fast = opponent.epochs(0, 1)[0]
        rate = float(part * fast["samples_per_second"])
        self.bed.set_link(rate * fast["down_bytes"])
        return rate

    def _tuned_slow(
        self, opponent: Opponent, found: Mapping[str, Any]
    ) -> dict[str, Any]:
        """On a slow link, where readers have to overlap.

        Args:
            opponent: who.
            found: its settings without a limit, which come first.
        """
        place, options = self.place(SHORT), found["options"]
        rate = self._set_link(opponent, options, TUNED_AT[SLOW], SHORT)

        def slow_rate(options: Mapping[str, Any]) -> float:
            opponent.prepare(self.workload.task, place, options)
            opponent.forget()
            return float(opponent.epochs(0, 1)[0]["samples_per_second"])

        others = [each for each in opponent.grid if each != options]
        grid = [options] if self.context.quick else [options, *others]
        chosen, tried = first_enough(slow_rate, grid, ENOUGH * rate)
        return {"options": dict(chosen), "grid": tried}


@contextlib.contextmanager
def gathered(
    bed: Testbed, context: Context, workload: Workload
) -> Iterator[Lineup]:
    """Starts every opponent that can be measured here.

    Of the others it is told why not.
    """
    context.section["absent"] = missing = {}
    with contextlib.ExitStack() as stack:
        opponents = {}
        for name in MEASURED:
            if reason := absent(name):
                context.note(f"{name} is left out: {reason}")
                missing[name] = reason
                continue
            remote = stack.enter_context(start(bed, name))
            opponents[name] = Opponent(bed, name, remote)
        yield Lineup(bed, context, workload, opponents)
