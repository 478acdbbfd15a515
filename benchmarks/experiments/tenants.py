"""Tenants with accounts of their own, which train at the same time."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.micro.fair_shares import jain_index
from benchmarks.networks import BACKBONE
from benchmarks.opponents.training import Place
from benchmarks.ratios import rotated
from benchmarks.record import begin, matching, missing
from benchmarks.suite.calibration import calibrate, settle
from benchmarks.suite.contenders import (
    AUTO,
    FREEZE,
    TAR_STREAM,
    Opponent,
    Ours,
    ask,
    start,
)
from benchmarks.suite.data_sets import store
from benchmarks.suite.experiment import Context, Experiment, no_goals
from benchmarks.suite.lineup import lineup
from benchmarks.suite.together import (
    Trainer,
    Window,
    client_processes,
    measure_together,
)
from benchmarks.suite.workloads import Volume, Workload
from benchmarks.testbed.remote import Remote
from benchmarks.testbed.two_tiers import Testbed

CONTENDERS = (AUTO, FREEZE, TAR_STREAM)
COUNTS, QUICK_COUNTS = (1, 4, 8), (2,)
WORKLOAD = Workload("mobilenet_v3_small", BACKBONE)
LINK = 1.0
VOLUME, QUICK_VOLUME = Volume(768, 32), Volume(256, 16)
QUICK_WINDOW = Window(2.0, 3.0)
MORE_FILL_SECONDS, MORE_SECONDS = 1.0, 3.0
"""Added for each further tenant: all share one core and one link."""
SETTLING_SECONDS, QUICK_SETTLING_SECONDS = 60.0, 3.0
CONTAINER = "tenants"


def key_of(name: str) -> str:
    """Key of a tenant's user."""
    return f"key-of-{name}"


def user_of(name: str) -> str:
    """User of a tenant, in an account of the tenant's name."""
    return f"{name}:trainer"


def environment_of(name: str) -> dict[str, str]:
    """Credentials of a tenant's processes."""
    return {"ST_USER": user_of(name), "ST_KEY": key_of(name)}


def tenants_of(count: int) -> list[str]:
    """Names of a number of tenants."""
    return [f"tenant{number}" for number in range(count)]


def with_accounts(tenants: Sequence[str]) -> dict[str, Any]:
    """Options of a testbed that has these tenants' users."""
    users = {
        f"user_{name}_trainer": f"{key_of(name)} .admin" for name in tenants
    }
    return {"swift_options": {"proxy-server.conf": {"filter:tempauth": users}}}


def window_of(tenants: int, *, quick: bool) -> Window:
    """Window in which so many tenants are measured together."""
    if quick:
        return QUICK_WINDOW
    alone, more = Window(), tenants - 1
    return Window(
        alone.fill_seconds + more * MORE_FILL_SECONDS,
        alone.seconds + more * MORE_SECONDS,
    )


@dataclass
class TenantsRun:
    """Measures a number of tenants.

    ``entry`` gets the results.
    """

    bed: Testbed
    context: Context
    entry: dict[str, Any]
    tenants: Sequence[str]
    place: Place
    options: Mapping[str, Any]
    _epochs: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def run(self) -> None:
        """Fills the entry."""
        self._window = window_of(len(self.tenants), quick=self.context.quick)
        self.entry |= {
            "workloads": [WORKLOAD.name] * len(self.tenants),
            "span": asdict(self._window),
            "rounds": {name: [] for name in CONTENDERS},
        }
        with contextlib.ExitStack() as stack:
            clients = stack.enter_context(
                client_processes(
                    self.bed,
                    [environment_of(tenant) for tenant in self.tenants],
                )
            )
            opponents = [
                stack.enter_context(start(self.bed, TAR_STREAM))
                for _ in self.tenants
            ]
            self._prepare(clients, opponents)
            trainers = {
                AUTO: [Trainer(client, {"name": AUTO}) for client in clients],
                FREEZE: [
                    Trainer(client, {"name": FREEZE}) for client in clients
                ],
                TAR_STREAM: [Trainer(opponent) for opponent in opponents],
            }
            self.entry["settling"] = self._settle(clients, trainers)
            self._measure(trainers)
        for key in ("samples_per_second", "jain"):
            self.entry[key] = {
                name: statistics.median(trial[key] for trial in rounds)
                for name, rounds in self.entry["rounds"].items()
            }
        self.entry["complete"] = True

    def _prepare(
        self, clients: Sequence[Remote], remotes: Sequence[Remote]
    ) -> None:
        if self.bed.shaped:
            self.bed.set_link(None)
        folder = Path(self.bed.folder, "data", self.place.container)
        shards = [str(folder / name) for name in self.place.shards]
        opponents = []
        for tenant, client, remote in zip(
            self.tenants, clients, remotes, strict=True
        ):
            container = self.place.container
            ask(client, "upload", shards=shards, container=container)
            ask(
                client,
                "prepare",
                model=WORKLOAD.model,
                freeze=WORKLOAD.freeze_module,
                container=container,
                floor="lossless",
                epochs=None,
                channels_last=self.options["channels_last"],
            )
            opponents.append(Opponent(self.bed, TAR_STREAM, remote))
            place = replace(
                self.place, user=user_of(tenant), key=key_of(tenant)
            )
            opponents[-1].prepare(WORKLOAD.task, place, self.options)
        link = LINK if self.bed.shaped else None
        self.entry |= calibrate(self.bed, opponents[0], link)
        for client in clients:
            for name in (AUTO, FREEZE):
                ask(client, "open", name=name, cut=name)
            # One after the other: a worker accepts few uploads at a time.
            Ours(self.bed, client, FREEZE).epochs(0, 1)

    def _together(self, trainers: Sequence[Trainer]) -> dict[str, Any]:
        return measure_together(trainers, next(self._epochs), self._window)

    def _settle(
        self,
        clients: Sequence[Remote],
        trainers: Mapping[str, Sequence[Trainer]],
    ) -> dict[str, Any]:
        """Runs all once, and ``auto`` until its plans are stable."""
        for name in (FREEZE, TAR_STREAM):
            self._together(trainers[name])

        def plans() -> list[str] | None:
            labels = [
                ask(client, "plan", name=AUTO)["label"] for client in clients
            ]
            return None if None in labels else labels

        quick = self.context.quick
        return settle(
            lambda: self._together(trainers[AUTO]),
            plans,
            QUICK_SETTLING_SECONDS if quick else SETTLING_SECONDS,
        )

    def _measure(self, trainers: Mapping[str, Sequence[Trainer]]) -> None:
        for number in range(self.context.rounds):
            for name in rotated(CONTENDERS, number):
                trial = self._together(trainers[name])
                trial["jain"] = jain_index(trial["each"])
                self.entry["rounds"][name].append(trial)
            self.context.save()
            last = {n: trial[-1] for n, trial in self.entry["rounds"].items()}
            self.context.note(
                f"{self.entry['name']}: round"
                f" {number + 1}/{self.context.rounds}: "
                + ", ".join(
                    f"{n} {trial['samples_per_second']:.1f}"
                    for n, trial in last.items()
                )
            )


def measure(context: Context) -> None:
    """Measures all entries that the section lacks."""
    section = context.section
    section.setdefault("opponents", {})
    counts = {
        f"same/{count}": count
        for count in (QUICK_COUNTS if context.quick else COUNTS)
    }
    names = missing(section, matching(counts, context.only))
    if not names:
        return
    accounts = with_accounts(tenants_of(max(counts.values())))
    with context.testbed(**accounts) as bed:
        volume = QUICK_VOLUME if context.quick else VOLUME
        volume = volume.times(context.scale)
        place = store(bed, context.tars, CONTAINER, volume)
        with lineup(bed, context, WORKLOAD, [TAR_STREAM]) as lined:
            lined.enter(WORKLOAD)
            options = lined.settings[TAR_STREAM]["options"]
        for name in names:
            entry = begin(section, name)
            tenants = tenants_of(counts[name])
            TenantsRun(bed, context, entry, tenants, place, options).run()
            context.save()


EXPERIMENT = Experiment(
    name="tenants",
    title="Tenants: samples per second of all, and Jain's index",
    minutes=50,
    quick_minutes=2,
    measure=measure,
    goals=no_goals,
)
