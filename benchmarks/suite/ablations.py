"""What each part of ours is worth: with it, and without it."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cell_run import rotated
from benchmarks.cells import BACKBONE
from benchmarks.memory_lp import MARGIN, Request, batch_sizes
from benchmarks.opponents.training import Place
from benchmarks.regret import AUTO
from benchmarks.remote import Remote
from benchmarks.suite import entries
from benchmarks.suite.contenders import TAR_STREAM, Opponent, Ours, start
from benchmarks.suite.data_sets import CLIENT, SECONDS, store
from benchmarks.suite.experiment import Context, Experiment, no_goals
from benchmarks.suite.second_proxy import second_proxy
from benchmarks.suite.tiers import calibrate, settle
from benchmarks.suite.together import (
    Span,
    Trainer,
    client_process,
    client_processes,
    fallbacks_text,
    phase,
)
from benchmarks.suite.verdict import rates_of, ratio
from benchmarks.suite.workloads import Volume, Workload, cell_name
from benchmarks.testbed import Testbed
from benchmarks.worker_process import frozen_model

from hapi_client.model.frozen_region import FREEZE
from hapi_protocol.headers import CACHE_READWRITE
from hapi_splitter.profiling.memory_model import needs_of

WORKLOADS = (
    Workload("mobilenet_v3_small", BACKBONE),
    Workload("resnet18", BACKBONE),
)
LINKS = (0.25, 2.0)
SHARD_SAMPLES = 32
"""HAPI's linear program knows no batches below 25, of shards as small."""
VOLUMES: Mapping[str, Volume] = {
    "mobilenet_v3_small": Volume(960, SHARD_SAMPLES),
    "resnet18": Volume(256, SHARD_SAMPLES),
}
QUICK_VOLUME = Volume(256, SHARD_SAMPLES)
SETTLING_SECONDS, QUICK_SETTLING_SECONDS = 45.0, 3.0
STORED_SECONDS = 60.0
NEVER_SECONDS = 1e9
"""Between two looks at a plan."""

FLOAT32 = "auto-float32"
FIRST_PLAN = "auto-first-plan"
KEPT = "freeze-kept"
BATCH_OWN = "freeze-batch-own"
BATCH_1 = "freeze-batch-1"
BATCH_LP = "freeze-batch-lp"
BATCHES = (BATCH_OWN, BATCH_1, BATCH_LP)
"""Each with a proxy, worker and client process of its own."""
CONTENDERS = (AUTO, FLOAT32, FIRST_PLAN, FREEZE, KEPT, *BATCHES)
PARTS: Mapping[str, tuple[str, str]] = {
    "encodings": (AUTO, FLOAT32),
    "re-planning": (AUTO, FIRST_PLAN),
    "kept features": (KEPT, FREEZE),
    "batches": (BATCH_OWN, BATCH_1),
    "batches, not the LP's": (BATCH_OWN, BATCH_LP),
}
"""With each part, and without it."""

COALESCING = "coalescing"
STREAMS = 4
SMALL_SHARD = 5
"""Samples: three places of a batch of 8 would stay empty."""
SHARED, APART = "shared", "apart"
SPAN, QUICK_SPAN = Span(), Span(2.0, 3.0)
MEGABYTE = 1e6

KEYS = f"""\
  lp_batch  {{workload: samples}}: the least batch that HAPI's linear program
            (benchmarks/memory_lp.py) gives {STREAMS} requests of a shard
            each, with half of this machine's memory; all samples of a shard
            where these fit
  entries   list of
    name, model, freeze, link  e.g. resnet18/backbone/0.25, and
              {COALESCING}/MODEL
    calibration, link_bytes_per_second  as of grid's cells
    rounds    {{contender: [pass, by round]}}, as of grid's cells; of
              {COALESCING} phases as of tenants
    samples_per_second  {{contender: median of the rounds}}
    parts     {{part: with it over without it: {{median, interval}}}}, of the
              rounds' ratios, 95 % by bootstrap
    settling  {{auto, auto-float32: as of grid's cells}}
    plan      auto's, at the end
    complete
  Parts: encodings (auto, beside auto in float32); re-planning (auto, beside
  its first plan); kept features (a later epoch of freeze that finds them,
  beside one that computes them); batches (freeze with the worker's own
  batches, beside max_batch = 1, and beside max_batch = lp_batch, each with a
  proxy and worker of its own); coalescing
  ({STREAMS} processes of one account, shards of {SMALL_SHARD} samples, no
  limit of the link: with one package, whose batches they share, beside a
  package for each).
  There is no option to turn coalescing off: with four packages a worker has
  four models in turn as well."""


@dataclass
class Ablation:
    """Measures one cell.

    Args:
        bed: the testbed, with the filter's cache.
        context: of the experiment.
        workload: what is trained.
        link: as a multiple of what saturates the client; None: unshaped.
        place: of the data.
        lp_batch: samples.
    """

    bed: Testbed
    context: Context
    workload: Workload
    link: float | None
    place: Place
    lp_batch: int
    entry: dict[str, Any] = field(default_factory=dict)
    _epochs: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def run(self) -> None:
        """Fills the cell's entry."""
        self.entry = entries.begin(
            self.context.section,
            cell_name(self.workload, self.link),
            model=self.workload.model,
            freeze=self.workload.freeze,
            link=self.link,
            rounds={name: [] for name in CONTENDERS},
        )
        with start(self.bed, TAR_STREAM) as remote:
            opponent = Opponent(self.bed, TAR_STREAM, remote)
            opponent.prepare(self.workload.task, self.place, opponent.grid[0])
            self.entry |= calibrate(self.bed, opponent, self.link)
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(self.bed.client.remote(CLIENT))
            measures = self._open_all(stack, client)
            for name, measured in measures.items():
                if name not in (AUTO, FLOAT32):
                    measured()
            self.entry["settling"] = {
                name: self._settle(client, name, measures[name])
                for name in (AUTO, FLOAT32)
            }
            self._measure(measures)
            plan = ask(client, "plan", name=AUTO)
        self.entry["plan"] = plan["label"]
        judge(self.entry, PARTS)
        self.entry["complete"] = True

    def _open_all(
        self, stack: contextlib.ExitStack, client: Remote
    ) -> dict[str, Callable[[], dict[str, Any]]]:
        """Every contender, as a function that measures it once."""
        self._prepare(client)
        jobs: Mapping[str, Mapping[str, Any]] = {
            AUTO: {"cut": AUTO},
            FLOAT32: {"cut": AUTO, "encoding": "float32"},
            FIRST_PLAN: {"cut": AUTO, "replan_seconds": NEVER_SECONDS},
            FREEZE: {"cut": FREEZE},
            KEPT: {"cut": FREEZE, "cache": CACHE_READWRITE},
        }
        for name, options in jobs.items():
            ask(client, "open", name=name, **options)
        self._keep(client)
        found: dict[str, Callable[[], dict[str, Any]]] = {
            name: self._pass_of(client, name)
            for name in (AUTO, FLOAT32, FIRST_PLAN, FREEZE)
        }
        found[KEPT] = lambda: self._kept_epoch(client)
        options = {
            BATCH_OWN: {},
            BATCH_1: {"max_batch": "1"},
            BATCH_LP: {"max_batch": str(self.lp_batch)},
        }
        for name in BATCHES:
            found[name] = self._beside(stack, name, options[name])
        return {name: found[name] for name in CONTENDERS}

    def _beside(
        self,
        stack: contextlib.ExitStack,
        name: str,
        options: Mapping[str, str],
    ) -> Callable[[], dict[str, Any]]:
        """Measures a process at a worker of its own, with these options."""
        proxy = stack.enter_context(
            second_proxy(self.bed, self.bed.storage, options)
        )
        client = stack.enter_context(
            client_process(self.bed.client, proxy.environment)
        )
        self._prepare(client)
        ask(client, "open", name=name, cut=FREEZE)
        return self._pass_of(client, name, proxy.sessions)

    def _prepare(self, client: Remote) -> None:
        ask(
            client,
            "prepare",
            model=self.workload.model,
            freeze=self.workload.freeze_module,
            container=self.place.container,
            floor="lossless",
            epochs=None,
        )

    def _pass_of(
        self, client: Remote, name: str, storage: Sequence[int] = ()
    ) -> Callable[[], dict[str, Any]]:
        ours = Ours(self.bed, client, name, storage)
        return lambda: ours.epochs(next(self._epochs), 1)[0]

    def _keep(self, client: Remote) -> None:
        """Has the store keep the features of all shards."""
        Ours(self.bed, client, KEPT).epochs(0, 1)
        deadline = time.monotonic() + STORED_SECONDS
        wanted = len(self.place.shards)
        while (kept := ask(client, "kept")["entries"]) < wanted:
            if time.monotonic() > deadline:
                raise ValueError(f"{kept} of {wanted} shards were kept")
            time.sleep(0.2)

    def _kept_epoch(self, client: Remote) -> dict[str, Any]:
        ours = Ours(self.bed, client, KEPT)
        [found] = ours.epochs(next(self._epochs), 1)
        if found["cached"] != found["samples"]:
            raise ValueError(
                f"{found['cached']} of {found['samples']} samples had been"
                " kept"
            )
        return found

    def _settle(
        self, client: Remote, name: str, measured: Callable[[], object]
    ) -> dict[str, Any]:
        return settle(
            measured,
            lambda: ask(client, "plan", name=name)["label"],
            QUICK_SETTLING_SECONDS if self.context.quick else SETTLING_SECONDS,
        )

    def _measure(
        self, measures: Mapping[str, Callable[[], dict[str, Any]]]
    ) -> None:
        rounds = self.entry["rounds"]
        for number in range(self.context.rounds):
            for name in rotated(list(measures), number):
                rounds[name].append(measures[name]())
            self.context.save()
            self.context.note(
                f"{self.entry['name']}: round"
                f" {number + 1}/{self.context.rounds}: "
                + ", ".join(
                    f"{name} {each[-1]['samples_per_second']:.1f}"
                    for name, each in rounds.items()
                )
            )


def judge(entry: dict[str, Any], parts: Mapping[str, tuple[str, str]]) -> None:
    """Completes an entry with what follows from its rounds.

    Args:
        entry: with ``rounds``.
        parts: contenders with each part, and without it.
    """
    rates = {name: rates_of(each) for name, each in entry["rounds"].items()}
    entry["samples_per_second"] = {
        name: statistics.median(each) for name, each in rates.items()
    }
    entry["parts"] = {
        part: ratio(rates[there], rates[left_out])
        for part, (there, left_out) in parts.items()
    }


def coalescing(bed: Testbed, context: Context, name: str) -> None:
    """Processes of one account, with one package or with one each."""
    workload = _coalescing()[name]
    entry = entries.begin(
        context.section,
        name,
        model=workload.model,
        freeze=workload.freeze,
        link=None,
        rounds={SHARED: [], APART: []},
    )
    volume = _volume(context, workload)
    place = store(
        bed,
        context.tars,
        workload.container(COALESCING),
        volume.samples,
        SMALL_SHARD,
    )
    with client_processes(bed, [{}] * STREAMS * 2) as clients:
        for number, client in enumerate(clients):
            own = number < STREAMS
            ask(
                client,
                "prepare",
                model=workload.model,
                freeze=workload.freeze_module,
                container=place.container,
                floor="lossless",
                epochs=None,
                seed=number if own else STREAMS,
            )
            ask(client, "open", name=FREEZE, cut=FREEZE)
            # One after the other: a worker takes few packages at a time.
            Ours(bed, client, FREEZE).epochs(0, 1)
        trainers = [Trainer(each, {"name": FREEZE}) for each in clients]
        setups = {APART: trainers[:STREAMS], SHARED: trainers[STREAMS:]}
        span = QUICK_SPAN if context.quick else SPAN
        for each in setups.values():
            phase(bed, each, 0, span)
        for number in range(context.rounds):
            for setup in rotated(list(setups), number):
                entry["rounds"][setup].append(
                    phase(bed, setups[setup], number + 1, span)
                )
            context.save()
            last = {n: each[-1] for n, each in entry["rounds"].items()}
            context.note(
                f"{name}: round {number + 1}/{context.rounds}: "
                + ", ".join(
                    f"{n} {x['samples_per_second']:.1f}{fallbacks_text(x)}"
                    for n, x in last.items()
                )
            )
    judge(entry, {COALESCING: (SHARED, APART)})
    entry["complete"] = True


def _volume(context: Context, workload: Workload) -> Volume:
    if context.quick:
        return QUICK_VOLUME.times(context.scale)
    return VOLUMES[workload.model].times(context.scale)


def _coalescing() -> dict[str, Workload]:
    return {f"{COALESCING}/{each.model}": each for each in WORKLOADS}


def lp_batch(workload: Workload, memory_bytes: float, samples: int) -> int:
    """The least batch that HAPI's rule gives to as many requests as streams.

    Args:
        workload: of all of them.
        memory_bytes: of the worker.
        samples: that each asks for.
    """
    frozen = frozen_model(workload.model, workload.freeze_module)
    needs = needs_of(frozen, frozen.num_cuts)
    request = Request(
        per_sample=(needs.peak_bytes(2) - needs.peak_bytes(1)) / MEGABYTE,
        fixed=needs.parameter_bytes / MEGABYTE,
        wanted=samples,
    )
    found = batch_sizes(
        [request] * STREAMS, memory_bytes / MEGABYTE, margin=MARGIN
    )
    return max(1, min(found))


def half_of_memory() -> float:
    """Bytes; what a worker takes on a CPU."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2


def cells_of(
    *, quick: bool, shaped: bool
) -> dict[str, tuple[Workload, float | None]]:
    """All cells by name, those of a workload together."""
    links: Sequence[float | None] = LINKS if shaped else (None,)
    pairs = itertools.product(WORKLOADS, links)
    chosen = [(WORKLOADS[0], links[0])] if quick else pairs
    return {cell_name(*each): each for each in chosen}


def measure(context: Context) -> None:
    """Measures all entries that the section does not have."""
    section = context.section
    section.setdefault("lp_batch", {})
    with context.testbed(filter_options={"cache": "true"}) as bed:
        cells = cells_of(quick=context.quick, shaped=bed.shaped)
        more = list(_coalescing())[: 1 if context.quick else None]
        places: dict[str, Place] = {}
        for name in entries.missing(context, [*cells, *more]):
            if name in more:
                coalescing(bed, context, name)
            else:
                workload, link = cells[name]
                _measure_cell(bed, context, workload, link, places)
            context.save()


def _measure_cell(
    bed: Testbed,
    context: Context,
    workload: Workload,
    link: float | None,
    places: dict[str, Place],
) -> None:
    volume = _volume(context, workload)
    if workload.model not in places:
        context.note(f"{workload.model}: storing {volume.samples} samples")
        places[workload.model] = store(
            bed,
            context.tars,
            workload.container("ablations"),
            volume.samples,
            volume.shard_samples,
        )
    batch = lp_batch(workload, half_of_memory(), volume.shard_samples)
    context.section["lp_batch"][workload.name] = batch
    with bed.client.remote(CLIENT) as keeper:
        ask(keeper, "purge")
    place = places[workload.model]
    Ablation(bed, context, workload, link, place, batch).run()


def ask(client: Remote, do: str, **arguments: Any) -> Any:
    """A question that may take long."""
    return client.ask(do, seconds=SECONDS, **arguments)


def table(section: Mapping[str, Any]) -> str:
    """A line for each part of each complete entry."""
    lines = [
        f"{'':34} {'part':24} {'with':>8} {'without':>8}"
        f" {'with over without':>24}"
    ]
    both = {**PARTS, COALESCING: (SHARED, APART)}
    for entry in entries.complete(section):
        rates = entry["samples_per_second"]
        for part, found in entry["parts"].items():
            there, left_out = both[part]
            low, high = found["interval"]
            lines.append(
                f"{entry['name']:34} {part:24} {rates[there]:8.1f}"
                f" {rates[left_out]:8.1f} {found['median']:8.3f}"
                f" ({low:.3f} … {high:.3f})"
            )
    return "\n".join(lines)


EXPERIMENT = Experiment(
    name="ablations",
    title="What each part of ours is worth",
    keys=KEYS,
    minutes=35,
    quick_minutes=4,
    measure=measure,
    table=table,
    met=no_goals,
)
