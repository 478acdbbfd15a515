"""The opponents of a workload: their data in Swift, and their settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.opponents.training import Place
from benchmarks.opponents.tuning import choose, first_enough
from benchmarks.opponents.window import Pace
from benchmarks.suite.contenders import (
    EXTERNALS,
    RESIZED,
    STORED_AS,
    Opponent,
    absent,
    start,
)
from benchmarks.suite.data_sets import store
from benchmarks.suite.experiment import Context
from benchmarks.suite.workloads import LONG, SHORT, Workload
from benchmarks.testbed import Testbed

MEASURED = (*EXTERNALS, RESIZED)
TUNING_PACE = Pace(
    fill_seconds=1.0, fill_batches=2, seconds=3.0, batches=6, most_seconds=6.0
)
SLOW_LINK = 0.25
"""Of what an opponent reads without a limit."""
ENOUGH = 0.97
"""Of what the link carries."""


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
        for name, opponent in self.opponents.items():
            if name not in self.settings:
                found = self._tuned(opponent)
                if self.bed.shaped:
                    found["slow"] = self._tuned_slow(opponent, found)
                self.settings[name] = found
                self.context.note(f"{name}: {found['options']}")
                self.context.save()

    def prepare(self, size: str, *, slow: bool) -> None:
        """Has every opponent take the workload.

        Args:
            size: of the data set.
            slow: whether with the settings for links that carry less than
                streaming could use.
        """
        for name, opponent in self.opponents.items():
            settings = self.settings[name]
            chosen = settings["slow"] if slow else settings
            opponent.prepare(
                self.workload.task, self.place(size), chosen["options"]
            )

    def _tuned(self, opponent: Opponent) -> dict[str, Any]:
        """Without a limit on the link."""
        place = self.place(LONG)
        if self.bed.shaped:
            self.bed.set_link(None)

        def rate(options: Mapping[str, Any]) -> float:
            opponent.prepare(self.workload.task, place, options)
            found = opponent.window(0, TUNING_PACE)
            return float(found["samples_per_second"])

        grid = opponent.grid[:1] if self.context.quick else opponent.grid
        options, tried = choose(rate, grid)
        return {
            "options": dict(options),
            "versions": dict(opponent.versions),
            "grid": tried,
        }

    def _tuned_slow(
        self, opponent: Opponent, found: Mapping[str, Any]
    ) -> dict[str, Any]:
        """On a slow link, where readers have to overlap.

        Args:
            opponent: who.
            found: its settings without a limit, which come first.
        """
        place = self.place(SHORT)
        options = found["options"]
        opponent.prepare(self.workload.task, place, options)
        opponent.forget()
        fast = opponent.epochs(0, 1)[0]
        rate = SLOW_LINK * fast["samples_per_second"]
        self.bed.set_link(rate * fast["down_bytes"])

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
