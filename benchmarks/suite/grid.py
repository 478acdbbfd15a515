"""Epoch 1, cell by cell: ours beside what people use today."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from benchmarks.cell_run import rotated
from benchmarks.opponents.training import Place
from benchmarks.opponents.tuning import choose
from benchmarks.opponents.window import Pace
from benchmarks.regret import AUTO, STREAM, interval_of
from benchmarks.remote import Remote
from benchmarks.suite.contenders import (
    EXTERNALS,
    RESIZED,
    STORED_AS,
    TAR_STREAM,
    Contender,
    Opponent,
    Ours,
    absent,
    start,
)
from benchmarks.suite.data_sets import CLIENT, SECONDS, store
from benchmarks.suite.experiment import Context, Experiment
from benchmarks.suite.results import Section
from benchmarks.suite.workloads import Workload, cell_name, chosen
from benchmarks.testbed import Testbed

from hapi_client.frozen import FREEZE

AGAIN = "again"
"""The second pass of the best opponent in each round: the noise floor."""
AUTO_RESIZED = "auto-resized"
OURS = (AUTO, STREAM, FREEZE)
PREPARED = (RESIZED, AUTO_RESIZED)
"""Those that read photographs which were resized beforehand."""

MEASURED = (*EXTERNALS, RESIZED)
GOAL = 0.97
OUT_OF_REACH = 0.85
"""An opponent slower than this part of the best one, in the first round, is
not measured again; nor is, of ours, a fixed cut so much slower than auto."""

MOST_OPPONENTS = 2
"""That are measured after the first round, the best ones."""
AHEAD_SPANS = 4
"""That our jobs fetch ahead, so that the pipeline is full when a window
begins."""

PACE = Pace()
QUICK_PACE = Pace(fill_seconds=1.0, seconds=2.0, batches=6, most_seconds=6.0)
SETTLED_SECONDS = 12.0
MOST_SETTLING_SECONDS = 45.0
QUICK_SETTLING_SECONDS = 8.0

KEYS = """\
  pace      of a window: seconds and batches that are filled and counted
  opponents {workload: {name: {options, versions, grid: {settings: samples
            per second}}}}: settings, and how they were chosen
  cells     list of
    name, model, freeze, link  e.g. resnet18/backbone/0.25
    calibration         {samples_per_second, bytes_per_sample}: the tar
                        stream's without a limit, beside the cell
    link_bytes_per_second
    rounds              {contender: [window, by round]}; a window has samples,
                        batches, seconds, samples_per_second, and of one
                        sample down_bytes, up_bytes (interface counters, the
                        package apart), client_seconds, storage_seconds (CPU)
    samples_per_second  {contender: median over the rounds}
    best_external       the fastest that reads the same photographs
    ratio               auto over it: {median, interval}, of the rounds'
                        ratios, 95 % by bootstrap
    ratio_resized       auto-resized over tar-stream-resized, likewise
    noise               best_external over itself, likewise
    plan                auto's, at the end
    complete
  Opponents whose libraries are not installed have {absent: why} instead."""


@dataclass
class CellRun:
    """Measures one cell.

    Args:
        bed: the testbed.
        context: of the experiment.
        workload: what is trained.
        link: as a multiple of what saturates the client; None: unshaped.
        opponents: prepared for the workload.
        place: of the data.
    """

    bed: Testbed
    context: Context
    workload: Workload
    link: float | None
    opponents: Mapping[str, Opponent]
    place: Place
    entry: dict[str, Any] = field(default_factory=dict)
    _epoch: int = 0

    def run(self) -> dict[str, Any]:
        """The cell's entry."""
        self.entry = {
            "name": cell_name(self.workload, self.link),
            "model": self.workload.model,
            "freeze": self.workload.freeze,
            "link": self.link,
            "complete": False,
        }
        self._calibrate()
        with self.bed.client.remote(CLIENT) as client:
            contenders = self._warm_up(client)
            self._measure(contenders)
            plan = _ask(client, "plan", name=AUTO)
        self.entry["plan"] = plan["label"]
        judge(self.entry)
        self.entry["complete"] = True
        return self.entry

    @property
    def _pace(self) -> Pace:
        return QUICK_PACE if self.context.quick else PACE

    def _note(self, text: str) -> None:
        self.context.note(f"{self.entry['name']}: {text}")

    def _calibrate(self) -> None:
        """Sets the link, beside what saturates the client now."""
        if self.bed.shaped:
            self.bed.set_link(None)
        found = self._window(self.opponents[TAR_STREAM])
        rate, size = found["samples_per_second"], found["down_bytes"]
        self.entry["calibration"] = {
            "samples_per_second": rate,
            "bytes_per_sample": size,
        }
        limit = None if self.link is None else self.link * rate * size
        self.entry["link_bytes_per_second"] = limit
        if limit is not None:
            self.bed.set_link(limit)
        shown = "unshaped" if limit is None else f"{limit / 1e6:.2f} MB/s"
        self._note(f"the tar stream saturates at {rate:.1f}; link {shown}")

    def _window(self, contender: Contender) -> dict[str, Any]:
        self._epoch += 1
        return contender.window(self._epoch, self._pace)

    def _warm_up(self, client: Remote) -> dict[str, Contender]:
        """Every contender once, unmeasured; ``auto`` until its plan stays."""
        _ask(
            client,
            "prepare",
            model=self.workload.model,
            freeze=self.workload.freeze_module,
            container=self.place.container,
            floor="lossless",
            epochs=None,
            ahead_spans=AHEAD_SPANS,
        )
        contenders: dict[str, Contender] = dict(self.opponents)
        for name, cut, container in (
            (STREAM, STREAM, self.place.container),
            (FREEZE, FREEZE, self.place.container),
            (AUTO, AUTO, self.place.container),
            (AUTO_RESIZED, AUTO, self.place.resized),
        ):
            _ask(client, "open", name=name, cut=cut, container=container)
            contenders[name] = Ours(self.bed, client, name)
        for name, each in contenders.items():
            if name in (AUTO, AUTO_RESIZED):
                self._settle(client, each)
            elif name != TAR_STREAM:  # it was, without a limit
                self._window(each)
        return contenders

    def _settle(self, client: Remote, contender: Contender) -> None:
        plans: list[str | None] = []
        began = changed = time.monotonic()
        most = (
            QUICK_SETTLING_SECONDS
            if self.context.quick
            else MOST_SETTLING_SECONDS
        )
        while True:
            self._window(contender)
            plan = _ask(client, "plan", name=contender.name)["label"]
            now = time.monotonic()
            if plan is None or plans[-1:] != [plan]:
                changed = now
            plans.append(plan)
            if now - changed >= SETTLED_SECONDS or now - began >= most:
                return

    def _measure(self, contenders: Mapping[str, Contender]) -> None:
        rounds: dict[str, list[dict[str, Any]]] = {
            name: [] for name in contenders
        }
        self.entry["rounds"] = rounds
        active = list(contenders)
        again = TAR_STREAM
        for number in range(self.context.rounds):
            for name in rotated([*active, AGAIN], number):
                measured = contenders[again if name == AGAIN else name]
                rounds.setdefault(name, []).append(self._window(measured))
            rates = {n: rates_of(rounds[n]) for n in rounds}
            if not number:
                again = best_external(rates)
                if again != TAR_STREAM:
                    rounds[AGAIN] = [self._window(contenders[again])]
                active = in_reach(rates)
            self.context.save()
            self._note(
                f"round {number + 1}/{self.context.rounds}: "
                + ", ".join(f"{n} {rates[n][-1]:.1f}" for n in active)
            )


def rates_of(windows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [each["samples_per_second"] for each in windows]


Rates = Mapping[str, Sequence[float]]


def best_external(rates: Rates) -> str:
    """Of those measured most often, the one of the highest median."""
    there = {name: rates[name] for name in EXTERNALS if name in rates}
    most = max(map(len, there.values()))
    full = {n: each for n, each in there.items() if len(each) == most}
    return max(full, key=lambda name: statistics.median(full[name]))


def in_reach(rates: Rates) -> list[str]:
    """Who is measured again after the first round.

    Opponents near the best one, ``auto``, what reads resized photographs,
    and of ours the fixed ones that are near ``auto``.
    """
    first = {name: each[0] for name, each in rates.items() if name != AGAIN}
    opponents = sorted(
        (name for name in first if name in EXTERNALS),
        key=lambda name: -first[name],
    )
    least = {
        **dict.fromkeys(opponents, OUT_OF_REACH * first[opponents[0]]),
        **dict.fromkeys((STREAM, FREEZE), OUT_OF_REACH * first[AUTO]),
    }
    out = opponents[MOST_OPPONENTS:]
    return [
        name
        for name, rate in first.items()
        if name not in out and rate >= least.get(name, 0.0)
    ]


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Median of the rounds' ratios, and its 95 % interval."""
    values = [a / b for a, b in zip(above, below, strict=True)]
    return {
        "median": statistics.median(values),
        "interval": list(interval_of(values, np.median)),
    }


def judge(entry: dict[str, Any]) -> None:
    """Completes a cell's entry with what follows from its rounds."""
    rates = {name: rates_of(each) for name, each in entry["rounds"].items()}
    again = rates.pop(AGAIN)
    entry["samples_per_second"] = {
        name: statistics.median(each) for name, each in rates.items()
    }
    best = best_external(rates)
    entry["best_external"] = best
    entry["ratio"] = ratio(rates[AUTO], rates[best])
    entry["ratio_resized"] = ratio(rates[AUTO_RESIZED], rates[RESIZED])
    entry["noise"] = ratio(again, rates[best][: len(again)])


def measure(context: Context) -> None:
    """Measures all cells that the section does not have."""
    section = context.section
    section["pace"] = asdict(QUICK_PACE if context.quick else PACE)
    section.setdefault("cells", [])
    section.setdefault("opponents", {})
    with context.testbed() as bed:
        todo = [
            (workload, missing)
            for workload, links in chosen(
                context.only, quick=context.quick, shaped=bed.shaped
            )
            if (
                missing := [x for x in links if not _has(section, workload, x)]
            )
        ]
        places: dict[str, Place] = {}
        for workload, links in todo:
            with _workload(bed, context, workload, places) as opponents:
                for link in links:
                    run = CellRun(
                        bed,
                        context,
                        workload,
                        link,
                        opponents,
                        places[workload.model],
                    )
                    section["cells"].append(run.entry)
                    _put(section, run.run())
                    context.save()
                    context.note(line_of(run.entry))


def _todo(
    context: Context, *, shaped: bool
) -> list[tuple[Workload, list[float | None]]]:
    found = []
    for workload, links in chosen(
        context.only, quick=context.quick, shaped=shaped
    ):
        missing = [
            link for link in links if not _has(context.section, workload, link)
        ]
        if missing:
            found.append((workload, missing))
    return found


def _has(section: Section, workload: Workload, link: float | None) -> bool:
    name = cell_name(workload, link)
    return any(c["name"] == name and c["complete"] for c in section["cells"])


def _put(section: Section, entry: dict[str, Any]) -> None:
    others = [c for c in section["cells"] if c.get("name") != entry["name"]]
    section["cells"] = [*(c for c in others if c), entry]


def present(context: Context, chosen_options: dict[str, Any]) -> list[str]:
    """The opponents that can be measured here; of others it is told why."""
    for name in MEASURED:
        if reason := absent(name):
            context.note(f"{name} is left out: {reason}")
            chosen_options[name] = {"absent": reason}
    return [name for name in MEASURED if name not in chosen_options]


@contextlib.contextmanager
def _workload(
    bed: Testbed,
    context: Context,
    workload: Workload,
    places: dict[str, Place],
) -> Iterator[dict[str, Opponent]]:
    """Data in Swift, and every opponent at its best settings."""
    task, volume = workload.task, workload.volume.times(context.scale)
    chosen_options: dict[str, Any] = {}
    context.section["opponents"][workload.name] = chosen_options
    names = present(context, chosen_options)
    if workload.model not in places:
        context.note(f"{workload.model}: storing {volume.samples} samples")
        places[workload.model] = store(
            bed,
            context.tars,
            workload.container,
            volume.samples,
            volume.shard_samples,
            [STORED_AS[name] for name in names if name in STORED_AS],
            task.resize_size,
        )
    if bed.shaped:
        bed.set_link(None)
    with contextlib.ExitStack() as stack:
        opponents = {}
        for name in names:
            remote = stack.enter_context(start(bed, name))
            opponents[name] = Opponent(bed, name, remote)
            chosen_options[name] = tune(
                opponents[name],
                lambda o, each=opponents[name]: each.prepare(
                    task, places[workload.model], o
                ),
                QUICK_PACE,
                quick=context.quick,
            )
            context.note(f"{name}: {chosen_options[name]['options']}")
        yield opponents


def tune(
    opponent: Opponent,
    prepare: Callable[[Mapping[str, Any]], None],
    pace: Pace,
    *,
    quick: bool,
) -> dict[str, Any]:
    """Prepares an opponent with the fastest of its settings."""

    def rate(options: Mapping[str, Any]) -> float:
        prepare(options)
        return float(opponent.window(0, pace)["samples_per_second"])

    grid = opponent.grid[:1] if quick else opponent.grid
    options, tried = choose(rate, grid)
    prepare(options)
    return {
        "options": dict(options),
        "versions": dict(opponent.versions),
        "grid": tried,
    }


def line_of(entry: Mapping[str, Any]) -> str:
    """A complete cell in one line."""
    rates, found = entry["samples_per_second"], entry["ratio"]
    low, high = found["interval"]
    best = entry["best_external"]
    return (
        f"{entry['name']:34} {rates[AUTO]:7.1f} {best:>10} {rates[best]:7.1f}"
        f" {found['median']:7.3f} ({low:.3f} … {high:.3f})"
        f" {entry['noise']['median']:7.3f}"
        f" {entry['ratio_resized']['median']:7.3f}"
    )


def table(section: Mapping[str, Any]) -> str:
    """A line for each complete cell."""
    header = (
        f"{'cell':34} {'auto':>7} {'best opponent':>18} {'auto over it':>23}"
        f" {'noise':>7} {'resized':>7}"
    )
    cells = [cell for cell in section["cells"] if cell["complete"]]
    return "\n".join([header, *map(line_of, cells)])


def met(section: Mapping[str, Any]) -> dict[str, bool | None]:
    """The goal, of all complete cells."""
    cells = [cell for cell in section["cells"] if cell["complete"]]
    missed = [c["name"] for c in cells if c["ratio"]["median"] < GOAL]
    goal = f"epoch 1 at {GOAL} of the best opponent or more, in every cell"
    return {goal: not missed if cells else None}


def _ask(client: Remote, do: str, **arguments: Any) -> Any:
    return client.ask(do, seconds=SECONDS, **arguments)


EXPERIMENT = Experiment(
    name="grid",
    title="Epoch 1, beside what people use today",
    keys=KEYS,
    minutes=240,
    quick_minutes=6,
    measure=measure,
    table=table,
    met=met,
)
