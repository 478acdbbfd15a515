"""The opponents of a workload: their processes, data and settings."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from benchmarks.opponents.training import Place
from benchmarks.suite.contenders import (
    RESIZED,
    STORED_AS,
    TAR_STREAM,
    Opponent,
    start,
    unavailable,
)
from benchmarks.suite.data_sets import store
from benchmarks.suite.experiment import Context
from benchmarks.suite.workloads import (
    LONG,
    QUICK_VOLUME,
    Workload,
)
from benchmarks.testbed.two_tiers import Testbed

TUNED_AS: Mapping[str, str] = MappingProxyType(
    {"local-features": TAR_STREAM, RESIZED: TAR_STREAM}
)
"""Opponent whose settings another one, which comes later, shares."""


@dataclass
class Lineup:
    """Opponents with their data and settings, for several workloads.

    ``context.section["opponents"]`` gets the settings.  They are the fastest
    ones without a limit: on a slow link they were within 4 % of the fastest
    there (measured with ResNet-18).
    """

    bed: Testbed
    context: Context
    workload: Workload
    opponents: Mapping[str, Opponent]
    _places: dict[tuple[str, int], Place] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of all opponents for the present network."""
        opponents: dict[str, Any] = self.context.section["opponents"]
        return opponents.setdefault(self.workload.model, {})

    def place(self, size: str) -> Place:
        """The data set of a size; stored at first use."""
        volume = self.workload.volumes[size]
        if self.context.quick:
            volume = QUICK_VOLUME
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
                volume,
                [STORED_AS[n] for n in self.opponents if n in STORED_AS],
            )
        return self._places[key]

    def enter(self, workload: Workload) -> None:
        """Switches to a workload; tunes the opponents for a new network."""
        self.workload = workload
        known = self.context.tuned.get(workload.model, {})
        for name, opponent in self.opponents.items():
            if name in self.settings:
                continue
            tuned_as = TUNED_AS.get(name, name)
            tuned = known.get(tuned_as) or self.settings.get(tuned_as)
            if tuned is None:
                tuned = self._tuned(opponent)
            self.settings[name] = tuned
            self.context.note(f"{name}: {tuned['options']}")
            self.context.save()

    def prepare(self, name: str, size: str) -> Opponent:
        """Gives an opponent the workload, with its settings."""
        opponent = self.opponents[name]
        opponent.prepare(
            self.workload.task,
            self.place(size),
            self.settings[name]["options"],
        )
        return opponent

    def _tuned(self, opponent: Opponent) -> dict[str, Any]:
        """Options with the fastest epoch, and the rates of all."""
        if self.bed.shaped:
            self.bed.set_link(None)
        versions = dict(opponent.versions)
        if self.context.quick:
            options = dict(opponent.grid[0])
            return {"versions": versions, "options": options, "grid": {}}
        rates: dict[str, float] = {}
        for options in opponent.grid:
            opponent.prepare(self.workload.task, self.place(LONG), options)
            opponent.forget()
            [epoch] = opponent.epochs(0, 1)
            name = json.dumps(options, sort_keys=True)
            rates[name] = epoch["samples_per_second"]
        fastest = max(rates, key=lambda name: rates[name])
        return {
            "versions": versions,
            "options": json.loads(fastest),
            "grid": rates,
        }


@contextlib.contextmanager
def lineup(
    bed: Testbed, context: Context, workload: Workload, names: Sequence[str]
) -> Iterator[Lineup]:
    """Starts opponents; records why others cannot run."""
    context.section["absent"] = absent = unavailable(names)
    for name, reason in absent.items():
        context.note(f"{name} is left out: {reason}")
    with contextlib.ExitStack() as stack:
        opponents = {
            name: Opponent(bed, name, stack.enter_context(start(bed, name)))
            for name in names
            if name not in absent
        }
        yield Lineup(bed, context, workload, opponents)
