"""Two proxies with a worker each, and two ranks, beside one."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.cell_run import rotated
from benchmarks.cells import BACKBONE, NETWORKS
from benchmarks.opponents.training import Place
from benchmarks.regret import AUTO, STREAM
from benchmarks.remote import Remote
from benchmarks.suite import entries
from benchmarks.suite.data_sets import SECONDS, store
from benchmarks.suite.experiment import Context, Experiment
from benchmarks.suite.many_tenants import (
    tenants_of,
    upload,
    with_accounts,
)
from benchmarks.suite.second_proxy import second_proxy
from benchmarks.suite.tiers import settle
from benchmarks.suite.together import (
    Span,
    Trainer,
    WorkerCounters,
    client_process,
    fallbacks_text,
    half,
    phase,
)
from benchmarks.suite.verdict import ratio
from benchmarks.suite.workloads import Volume, Workload
from benchmarks.testbed import Testbed

from hapi_client.model.frozen_region import FREEZE

WORKLOAD = Workload("mobilenet_v3_small", BACKBONE)
BATCH = NETWORKS[WORKLOAD.model].batch_size
VOLUME, QUICK_VOLUME = Volume(768, 32), Volume(256, 16)
SPAN, QUICK_SPAN = Span(), Span(2.0, 3.0)
SETTLING_SECONDS, QUICK_SETTLING_SECONDS = 60.0, 3.0
CONTAINER = "scaling"
ONE, TWO = "one", "two"
HALVED = "halved"
"""One process whose batches are as small as a rank's part of one."""
PROXIES, RANKS = "proxies", "ranks"
GOAL = 0.95
"""On one core each the second one must cost nothing."""

KEYS = """\
  span      seconds of a phase that are not counted, and that are
  cores     {storage, client}: of each tier; each proxy with its worker, and
            each rank, has one half of them, or shares the only one
  entries   list of
    name    proxies/CUT or ranks/CUT
    rounds  {one, two, halved: [phase, by round]}; a phase has
            samples_per_second (of all clients), each, down_bytes_per_second,
            client_cores and storage_cores (CPU seconds in a second),
            fallbacks, worker_batch (samples in a pass of a worker's model,
            the mean; null without any)
    settling  {one, two, halved: as of grid's cells}, of auto
    samples_per_second  {one, two, halved: median of the rounds}
    ratio   two over one: {median, interval}, of the rounds' ratios, 95 % by
            bootstrap
    halved_ratio  halved over one, likewise; of ranks only
    complete
  proxies: two clients with accounts of their own, at one proxy and worker,
  or each at one of its own in front of the same Swift servers, which have
  all cores.  ranks: one
  process, or two that share each batch (RANK and WORLD_SIZE, no process
  group), or (halved) one with batches of half the size.  The link has no
  limit."""


@dataclass(frozen=True)
class Setups:
    """Trainers of each setup, and what they need beside.

    Attributes:
        members: processes of each setup; some are of both.
        parts: of a batch that ranks can share.
        workers: counters of all that compute.
        storage: sessions of the storage tier beside the cluster's.
    """

    members: Mapping[str, Sequence[Remote]]
    workers: Sequence[WorkerCounters]
    parts: int = 1
    storage: Sequence[int] = ()

    def open(self, cut: str) -> None:
        """Makes a job in every process."""
        clients = {x.pid: x for each in self.members.values() for x in each}
        for client in clients.values():
            client.ask(
                "open", seconds=SECONDS, name=cut, cut=cut, parts=self.parts
            )


@contextlib.contextmanager
def proxies(bed: Testbed, place: Place) -> Iterator[Setups]:
    """Two clients; with ``two`` the second one is at a proxy of its own."""
    tenants = tenants_of(2)
    with contextlib.ExitStack() as stack:
        near, far = (
            stack.enter_context(second_proxy(bed, half(bed.storage, number)))
            for number in range(2)
        )
        first, other, second = (
            stack.enter_context(
                client_process(
                    half(bed.client, number),
                    {**tenants[number].environment, **proxy.environment},
                )
            )
            for number, proxy in ((0, near), (1, near), (1, far))
        )
        for client in (first, other):
            upload(client, bed, place)
        for client in (first, other, second):
            _prepare(client, place)
        yield Setups(
            {ONE: [first, other], TWO: [first, second]},
            [near.worker_counters, far.worker_counters],
            storage=[*near.sessions, *far.sessions],
        )


@contextlib.contextmanager
def ranks(bed: Testbed, place: Place) -> Iterator[Setups]:
    """One process, two that share each batch, or one of half batches."""
    [tenant] = tenants_of(1)
    with contextlib.ExitStack() as stack:
        alone, halved, *both = (
            stack.enter_context(
                client_process(
                    half(bed.client, number), {**tenant.environment, **more}
                )
            )
            for number, more in (
                (0, {}),
                (0, {}),
                (0, rank_of(0, 2)),
                (1, rank_of(1, 2)),
            )
        )
        upload(alone, bed, place)
        for client in (alone, *both):
            _prepare(client, place)
        _prepare(halved, place, batch_size=BATCH // 2)
        yield Setups(
            {ONE: [alone], TWO: both, HALVED: [halved]},
            [bed.worker_counters],
            parts=2,
        )


def rank_of(rank: int, world_size: int) -> dict[str, str]:
    """As torchrun tells it."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size)}


def _prepare(client: Remote, place: Place, batch_size: int = BATCH) -> None:
    client.ask(
        "prepare",
        seconds=SECONDS,
        model=WORKLOAD.model,
        freeze=WORKLOAD.freeze_module,
        container=place.container,
        floor="lossless",
        epochs=None,
        batch_size=batch_size,
    )


KINDS = {PROXIES: proxies, RANKS: ranks}
CUTS = {PROXIES: (FREEZE, AUTO), RANKS: (STREAM, AUTO)}
"""Those that the second one may help."""


def entries_of(*, quick: bool) -> dict[str, tuple[str, str]]:
    """Kind and cut, by name of the entry; those of a kind together."""
    return {
        f"{kind}/{cut}": (kind, cut)
        for kind in KINDS
        for cut in (CUTS[kind][:1] if quick else CUTS[kind])
    }


@dataclass
class ScalingRun:
    """Measures one entry.

    Args:
        bed: the testbed.
        context: of the experiment.
        name: of the entry.
        cut: of all jobs.
        setups: who trains.
        epochs: numbers of epochs.
    """

    bed: Testbed
    context: Context
    name: str
    cut: str
    setups: Setups
    epochs: Iterator[int]
    entry: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Fills the entry."""
        self.entry = entries.begin(
            self.context.section,
            self.name,
            rounds={setup: [] for setup in self.setups.members},
        )
        self.setups.open(self.cut)
        self.entry["settling"] = {
            setup: self._settle(setup) for setup in self.setups.members
        }
        for number in range(self.context.rounds):
            for setup in rotated(tuple(self.setups.members), number):
                self.entry["rounds"][setup].append(self._phase(setup))
            self.context.save()
            last = {n: each[-1] for n, each in self.entry["rounds"].items()}
            self.context.note(
                f"{self.name}: round {number + 1}/{self.context.rounds}: "
                + ", ".join(
                    f"{n} {x['samples_per_second']:.1f}{fallbacks_text(x)}"
                    for n, x in last.items()
                )
            )
        judge(self.entry)
        self.entry["complete"] = True

    def _settle(self, setup: str) -> dict[str, Any] | None:
        """Once, unmeasured; ``auto`` until its plans stay."""
        if self.cut != AUTO:
            self._phase(setup)
            return None

        def plans() -> list[str] | None:
            found = [
                client.ask("plan", seconds=SECONDS, name=AUTO)["label"]
                for client in self.setups.members[setup]
            ]
            return None if None in found else found

        return settle(
            lambda: self._phase(setup),
            plans,
            QUICK_SETTLING_SECONDS if self.context.quick else SETTLING_SECONDS,
        )

    def _phase(self, setup: str) -> dict[str, Any]:
        return phase(
            self.bed,
            [
                Trainer(each, {"name": self.cut})
                for each in self.setups.members[setup]
            ],
            next(self.epochs),
            QUICK_SPAN if self.context.quick else SPAN,
            self.setups.storage,
            self.setups.workers,
        )


def judge(entry: dict[str, Any]) -> None:
    """Completes an entry with what follows from its rounds."""
    rates = {
        setup: [each["samples_per_second"] for each in phases]
        for setup, phases in entry["rounds"].items()
    }
    entry["samples_per_second"] = {
        setup: statistics.median(each) for setup, each in rates.items()
    }
    entry["ratio"] = ratio(rates[TWO], rates[ONE])
    if HALVED in rates:
        entry["halved_ratio"] = ratio(rates[HALVED], rates[ONE])


def measure(context: Context) -> None:
    """Measures all entries that the section does not have."""
    section = context.section
    quick = context.quick
    section["span"] = asdict(QUICK_SPAN if quick else SPAN)
    wanted = entries_of(quick=quick)
    names = entries.missing(context, wanted)
    if not names:
        return
    with context.testbed(**with_accounts(tenants_of(2))) as bed:
        section["cores"] = {
            tier.name: len(tier.cores) for tier in (bed.storage, bed.client)
        }
        volume = QUICK_VOLUME if quick else VOLUME
        volume = volume.times(context.scale)
        place = store(
            bed,
            context.tars,
            CONTAINER,
            volume.samples,
            volume.shard_samples,
        )
        epochs = itertools.count()
        for kind, found in itertools.groupby(
            names, key=lambda name: wanted[name][0]
        ):
            with KINDS[kind](bed, place) as setups:
                for name in found:
                    cut = wanted[name][1]
                    ScalingRun(bed, context, name, cut, setups, epochs).run()
                    context.save()


def table(section: Mapping[str, Any]) -> str:
    """A line for each complete entry."""
    lines = [f"{'':16} {'one':>8} {'two':>8} {'two over one':>24}"]
    for entry in entries.complete(section):
        rates, found = entry["samples_per_second"], entry["ratio"]
        low, high = found["interval"]
        lines.append(
            f"{entry['name']:16} {rates[ONE]:8.1f} {rates[TWO]:8.1f}"
            f" {found['median']:8.3f} ({low:.3f} … {high:.3f})"
        )
    if shares_a_core(section):
        lines.append(
            "Both share one core of their tier: 1 means that the second one"
            " costs nothing, and more cannot be seen."
        )
    return "\n".join(lines)


def shares_a_core(section: Mapping[str, Any]) -> bool:
    """Whether the second one adds no core of either tier."""
    return set(section.get("cores", {}).values()) == {1}


def met(section: Mapping[str, Any]) -> dict[str, bool | None]:
    """The goal, of all complete entries; none is known for more cores."""
    ratios = [each["ratio"]["median"] for each in entries.complete(section)]
    goal = f"two proxies or ranks on the core of one at {GOAL} of it or more"
    if not ratios or not shares_a_core(section):
        return {goal: None}
    return {goal: all(each >= GOAL for each in ratios)}


EXPERIMENT = Experiment(
    name="scaling",
    title="Two proxies with workers, and two ranks",
    keys=KEYS,
    minutes=25,
    quick_minutes=3,
    measure=measure,
    table=table,
    met=met,
)
