"""Tenants with accounts of their own, who train at the same time."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.cell_run import rotated
from benchmarks.cells import BACKBONE, INNER
from benchmarks.opponents.training import Place
from benchmarks.regret import AUTO
from benchmarks.remote import Remote
from benchmarks.suite import entries
from benchmarks.suite.contenders import TAR_STREAM, Opponent, Ours, start
from benchmarks.suite.data_sets import SECONDS, store
from benchmarks.suite.experiment import Context, Experiment, no_goals
from benchmarks.suite.lineup import Lineup, options_at
from benchmarks.suite.tiers import calibrate, settle
from benchmarks.suite.together import (
    Span,
    Trainer,
    client_processes,
    fairness,
    fallbacks_text,
    phase,
)
from benchmarks.suite.workloads import Volume, Workload
from benchmarks.testbed import Testbed

from hapi_client.model.frozen_region import FREEZE

CONTENDERS = (AUTO, FREEZE, TAR_STREAM)
COUNTS, QUICK_COUNTS = (1, 2, 4, 8), (1, 2)
SAME = Workload("mobilenet_v3_small", BACKBONE)
MIX = (
    SAME,
    Workload("mobilenet_v3_small", INNER),
    Workload("resnet18", BACKBONE),
    Workload("resnet18", INNER),
)
LINK = 1.0
VOLUME, QUICK_VOLUME = Volume(768, 32), Volume(256, 16)
"""Of all models: tenants of a mix have the same data."""
QUICK_SPAN = Span(2.0, 3.0)
MORE_FILL_SECONDS, MORE_SECONDS = 1.0, 3.0
"""For each tenant beside the first: the core and the link that they share
begin everybody's epoch, and finish a span of each, so much more slowly."""
SETTLING_SECONDS, QUICK_SETTLING_SECONDS = 60.0, 3.0
ALONE_PHASES = 2
CONTAINER = "tenants"
MAX_TENANTS = max(COUNTS)

KEYS = """\
  opponents as of grid
  entries   list of
    name      same/N, N tenants with one network, or mix/N, with several
    workloads [by tenant]
    span      seconds of a phase of all that are not counted, and that are
    calibration, link_bytes_per_second  as of grid's cells; the link is what
              saturates one streaming client of the first workload
    alone     of a mix: {contender: [samples per second of each tenant
              by itself, the mean of two phases]}
    settling  of auto, all together, as of grid's cells
    rounds    {contender: [phase, by round]}; a phase, of one window that all
              tenants have in common, has samples_per_second (of all), each
              (by tenant), jain (Jain's index of each; in a mix of each over
              alone), relative (in a mix: sum of each over alone),
              down_bytes_per_second, client_cores and storage_cores (CPU
              seconds in a second), fallbacks (spans that were to be pushed
              and were streamed)
    samples_per_second, jain, relative  {contender: median of the rounds}
    complete
  All tenants share the client tier's core: what they would gain from
  machines of their own is not seen."""


@dataclass(frozen=True)
class Tenant:
    """One account.

    Attributes:
        name: of account and user.
    """

    name: str

    @property
    def user(self) -> str:
        return f"{self.name}:trainer"

    @property
    def key(self) -> str:
        return f"key-of-{self.name}"

    @property
    def environment(self) -> dict[str, str]:
        """Of its processes."""
        return {"ST_USER": self.user, "ST_KEY": self.key}

    def place(self, place: Place) -> Place:
        """The same data, in its account."""
        return replace(
            place,
            user=self.user,
            key=self.key,
            cache_folder=f"{place.cache_folder}-{self.name}",
        )


def tenants_of(count: int) -> list[Tenant]:
    """With these, and no others, the testbed has to be started."""
    return [Tenant(f"tenant{number}") for number in range(count)]


def with_accounts(tenants: Sequence[Tenant]) -> dict[str, Any]:
    """Options of a testbed that has these users."""
    users = {
        f"user_{each.user.replace(':', '_')}": f"{each.key} .admin"
        for each in tenants
    }
    return {"swift_options": {"proxy-server.conf": {"filter:tempauth": users}}}


def upload(remote: Remote, bed: Testbed, place: Place) -> None:
    """Stores a place's shards in the account of a process."""
    folder = Path(bed.folder, "data", place.container)
    remote.ask(
        "upload",
        seconds=SECONDS,
        shards=[str(folder / name) for name in place.shards],
        container=place.container,
    )


def span_of(tenants: int, *, quick: bool) -> Span:
    """How long so many are counted together, and from when on."""
    if quick:
        return QUICK_SPAN
    more = tenants - 1
    alone = Span()
    return Span(
        alone.fill_seconds + more * MORE_FILL_SECONDS,
        alone.seconds + more * MORE_SECONDS,
    )


def entries_of(*, quick: bool) -> dict[str, list[Workload]]:
    """Workload of each tenant, by name of the entry."""
    found = {
        f"same/{count}": [SAME] * count
        for count in (QUICK_COUNTS if quick else COUNTS)
    }
    mix = list(MIX[:2] if quick else MIX)
    return {**found, f"mix/{len(mix)}": mix}


@dataclass
class TenantsRun:
    """Measures one entry.

    Args:
        bed: the testbed, which has the tenants' accounts.
        context: of the experiment.
        name: of the entry.
        workloads: by tenant.
        place: of the data, the same in each account.
        options: of the tar stream, by network.
    """

    bed: Testbed
    context: Context
    name: str
    workloads: Sequence[Workload]
    place: Place
    options: Mapping[str, Mapping[str, Any]]
    entry: dict[str, Any] = field(default_factory=dict)
    _epochs: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def run(self) -> None:
        """Fills the entry."""
        self.entry = entries.begin(
            self.context.section,
            self.name,
            workloads=[each.name for each in self.workloads],
            span=asdict(self._span(len(self.workloads))),
            rounds={name: [] for name in CONTENDERS},
        )
        tenants = tenants_of(len(self.workloads))
        with contextlib.ExitStack() as stack:
            clients = stack.enter_context(
                client_processes(
                    self.bed, [each.environment for each in tenants]
                )
            )
            opponents = [
                stack.enter_context(start(self.bed, TAR_STREAM))
                for _ in tenants
            ]
            self._prepare(tenants, clients, opponents)
            trainers = {
                AUTO: [Trainer(each, {"name": AUTO}) for each in clients],
                FREEZE: [Trainer(each, {"name": FREEZE}) for each in clients],
                TAR_STREAM: [Trainer(each) for each in opponents],
            }
            if len(set(self.workloads)) > 1:
                self.entry["alone"] = self._alone(clients, trainers)
            self.entry["settling"] = self._settle(clients, trainers)
            self._measure(trainers)
        summarise(self.entry)
        self.entry["complete"] = True

    def _prepare(
        self,
        tenants: Sequence[Tenant],
        clients: Sequence[Remote],
        opponents: Sequence[Remote],
    ) -> None:
        if self.bed.shaped:
            self.bed.set_link(None)
        first: Opponent | None = None
        for tenant, workload, client, remote in zip(
            tenants, self.workloads, clients, opponents, strict=True
        ):
            upload(client, self.bed, self.place)
            client.ask(
                "prepare",
                seconds=SECONDS,
                model=workload.model,
                freeze=workload.freeze_module,
                container=self.place.container,
                floor="lossless",
                epochs=None,
                channels_last=self.options[workload.model]["channels_last"],
            )
            opponent = Opponent(self.bed, TAR_STREAM, remote)
            opponent.prepare(
                workload.task,
                tenant.place(self.place),
                self.options[workload.model],
            )
            first = first or opponent
        assert first is not None
        link = LINK if self.bed.shaped else None
        self.entry |= calibrate(self.bed, first, link)
        for client in clients:
            for name in (AUTO, FREEZE):
                client.ask("open", seconds=SECONDS, name=name, cut=name)
            # One after the other: a worker takes few packages at a time.
            Ours(self.bed, client, FREEZE).epochs(0, 1)

    def _span(self, tenants: int) -> Span:
        return span_of(tenants, quick=self.context.quick)

    def _phase(self, trainers: Sequence[Trainer]) -> dict[str, Any]:
        span = self._span(len(trainers))
        return phase(self.bed, trainers, next(self._epochs), span)

    def _settle(
        self,
        clients: Sequence[Remote],
        trainers: Mapping[str, Sequence[Trainer]],
    ) -> dict[str, Any]:
        """Everybody once, unmeasured; ``auto`` until its plans stay."""
        for name in (FREEZE, TAR_STREAM):
            self._phase(trainers[name])

        def plans() -> list[str] | None:
            found = [
                client.ask("plan", seconds=SECONDS, name=AUTO)["label"]
                for client in clients
            ]
            return None if None in found else found

        return settle(
            lambda: self._phase(trainers[AUTO]),
            plans,
            QUICK_SETTLING_SECONDS if self.context.quick else SETTLING_SECONDS,
        )

    def _alone(
        self,
        clients: Sequence[Remote],
        trainers: Mapping[str, Sequence[Trainer]],
    ) -> dict[str, list[float]]:
        """Each tenant by itself, ``auto`` with a plan for that."""
        found: dict[str, list[float]] = {name: [] for name in trainers}
        for number, client in enumerate(clients):
            single = {name: [each[number]] for name, each in trainers.items()}
            self._settle([client], single)
            for name, each in single.items():
                phases = [self._phase(each) for _ in range(ALONE_PHASES)]
                rates = [phase["samples_per_second"] for phase in phases]
                found[name].append(statistics.mean(rates))
            self.context.note(
                f"{self.name}: {self.workloads[number].name} alone: "
                + ", ".join(f"{n} {x[-1]:.1f}" for n, x in found.items())
            )
        return found

    def _measure(self, trainers: Mapping[str, Sequence[Trainer]]) -> None:
        for number in range(self.context.rounds):
            for name in rotated(CONTENDERS, number):
                found = self._phase(trainers[name])
                alone = self.entry.get("alone", {}).get(name)
                self.entry["rounds"][name].append(
                    {**found, **shares(found, alone)}
                )
            self.context.save()
            last = {n: each[-1] for n, each in self.entry["rounds"].items()}
            self.context.note(
                f"{self.name}: round {number + 1}/{self.context.rounds}: "
                + ", ".join(
                    f"{n} {x['samples_per_second']:.1f} (Jain {x['jain']:.3f})"
                    + fallbacks_text(x)
                    for n, x in last.items()
                )
            )


def shares(
    found: Mapping[str, Any], alone: Sequence[float] | None
) -> dict[str, float]:
    """``jain`` of a phase, and ``relative`` where ``alone`` is known."""
    more = {}
    if alone is not None:
        more["relative"] = sum(
            rate / most
            for rate, most in zip(found["each"], alone, strict=True)
        )
    return {"jain": fairness(found["each"], alone), **more}


def summarise(entry: dict[str, Any]) -> None:
    """Completes an entry with medians over its rounds."""
    for key in ("samples_per_second", "jain", "relative"):
        found = {
            name: statistics.median(each[key] for each in phases)
            for name, phases in entry["rounds"].items()
            if all(key in each for each in phases)
        }
        if found:
            entry[key] = found


def measure(context: Context) -> None:
    """Measures all entries that the section does not have."""
    wanted = entries_of(quick=context.quick)
    names = entries.missing(context, wanted)
    if not names:
        return
    accounts = with_accounts(tenants_of(MAX_TENANTS))
    with context.testbed(**accounts) as bed:
        volume = QUICK_VOLUME if context.quick else VOLUME
        volume = volume.times(context.scale)
        place = store(
            bed,
            context.tars,
            CONTAINER,
            volume.samples,
            volume.shard_samples,
        )
        workloads = [each for name in names for each in wanted[name]]
        options = _tuned(bed, context, workloads)
        for name in names:
            TenantsRun(bed, context, name, wanted[name], place, options).run()
            context.save()


def _tuned(
    bed: Testbed, context: Context, workloads: Sequence[Workload]
) -> dict[str, Mapping[str, Any]]:
    """Settings of the tar stream, by network.

    The first ones for a smoke test.
    """
    context.section.setdefault("opponents", {})
    link = LINK if bed.shaped else None
    found: dict[str, Mapping[str, Any]] = {}
    with start(bed, TAR_STREAM) as remote:
        opponent = Opponent(bed, TAR_STREAM, remote)
        lineup = Lineup(bed, context, workloads[0], {TAR_STREAM: opponent})
        for workload in workloads:
            if context.quick:
                found[workload.model] = opponent.grid[0]
            elif workload.model not in found:
                lineup.enter(workload)
                settings = lineup.settings[TAR_STREAM]
                found[workload.model] = options_at(settings, link)
    return found


def table(section: Mapping[str, Any]) -> str:
    """A line for each complete entry."""
    lines = [
        "Samples per second of all tenants, and Jain's index; of a mix also"
        " the sum of what each gets, over what it gets alone",
        f"{'tenants':8}" + "".join(f" {name:>24}" for name in CONTENDERS),
    ]
    for entry in entries.complete(section):
        shown = []
        for name in CONTENDERS:
            text = (
                f"{entry['samples_per_second'][name]:.1f}"
                f" ({entry['jain'][name]:.3f})"
            )
            if "relative" in entry:
                text += f" {entry['relative'][name]:.2f}"
            shown.append(f" {text:>24}")
        lines.append(f"{entry['name']:8}" + "".join(shown))
    return "\n".join(lines)


EXPERIMENT = Experiment(
    name="tenants",
    title="Tenants with accounts of their own, on one worker",
    keys=KEYS,
    minutes=70,
    quick_minutes=3,
    measure=measure,
    table=table,
    met=no_goals,
)
