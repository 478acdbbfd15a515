"""Whole runs from cold, one-off costs included."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from benchmarks.cell_run import rotated
from benchmarks.cells import BACKBONE, INNER
from benchmarks.opponents.training import Place
from benchmarks.remote import Remote
from benchmarks.suite import entries
from benchmarks.suite.contenders import (
    RESIZED,
    TAR_STREAM,
    Opponent,
    Ours,
    absent,
    start,
)
from benchmarks.suite.data_sets import CLIENT, CONVERT, SECONDS, store
from benchmarks.suite.experiment import Context, Experiment
from benchmarks.suite.lineup import Lineup, options_at
from benchmarks.suite.run_sums import (
    AUTO,
    AUTO_CACHED,
    AUTO_ONCE,
    BESIDE,
    CACHED,
    CONVERSIONS,
    INDEX,
    STREAM,
    epoch_of,
    judged,
)
from benchmarks.suite.tiers import calibrate, read
from benchmarks.suite.workloads import Volume, Workload, cell_name
from benchmarks.testbed import Testbed

from hapi_client.model.frozen_region import FREEZE
from hapi_protocol.headers import CACHE_OFF, CACHE_READWRITE

SLOW, FAST = 0.25, 2.0
CELLS = (
    (Workload("mobilenet_v3_small", BACKBONE), SLOW),
    (Workload("mobilenet_v3_small", BACKBONE), FAST),
    (Workload("resnet18", BACKBONE), SLOW),
    (Workload("resnet18", INNER), SLOW),
)
"""Backbones where what they compute is the most worth keeping, and what
differs from that in both directions: a fast link, and features that are
larger than photographs on a slow one.  Not ViT-B/16: the slow link takes a
quarter of an hour for its package, in each run that pushes."""
PROBES: Mapping[str, Volume] = {
    "mobilenet_v3_small": Volume(768, 32),
    "resnet18": Volume(128, 8),
}
"""Data sets that tell how fast the machine is."""
QUICK_VOLUME = Volume(128, 16)
EPOCHS, QUICK_EPOCHS = 5, 2
EPOCH_SECONDS = 15.0
"""Of an epoch of streaming over the cell's link: a job that would be over in
a minute does not plan
(:data:`hapi_client.planning.planner.MIN_TO_COME_SECONDS`)."""
MIN_SHARDS = 8
"""A shard goes one way as a whole: with fewer there is no mix to speak of."""
MAX_ROUNDS, QUICK_ROUNDS = 3, 1

GOAL = 20.0
MAX_OVER_STREAM = 1.05

OPPONENTS = (TAR_STREAM, "webdataset", "mosaic", "local-features", RESIZED)

KEYS = """\
  epochs    of a run
  opponents, absent  as of grid, from where settings are taken if it has them
  entries   list of
    name, model, freeze, link, samples  e.g. resnet18/backbone/0.25
    calibration, link_bytes_per_second  as of grid's cells, in each round
    one_offs            {index, mds, resized}: what has to be made once, of
                        tars that lie in Swift, over this link: seconds,
                        down_bytes, up_bytes, client_seconds, storage_seconds
                        (hapi index; shards of mosaicml-streaming; tars with
                        photographs resized)
    runs                {contender: [{before, epochs}, by round]}: before is
                        what a process that has imported torch takes until
                        the first epoch begins (model, tracing, index; with
                        a fixed cut its package too), plan of auto is what it
                        had in the end (null: it never planned, and
                        streamed); an epoch has seconds,
                        samples, package_bytes, and without these down_bytes,
                        up_bytes; client_seconds, storage_seconds (CPU)
    first_seconds, later_seconds  {contender: {median, least, most}} of the
                        rounds: epoch 1; the median of those after it
    best_first          the opponent with the fastest first epoch
    speedup             {ours: {stream and best_first: first_seconds of it
                        over later_seconds of ours}}
    beside              {ours: {opponent: its later_seconds over ours}}
    cumulative          {contender: {seconds, with_one_off}}: at the end of
                        each epoch, without and with the one-off
    auto_over_stream    {1, epochs: seconds of whole runs of so many epochs,
                        over those of our own streaming}
    auto_over_best      {1, epochs: {best, median, least, most}}: over those
                        of the best opponent for so many epochs
    complete
  Contenders: auto is told of all epochs, auto-1 of one, and runs one;
  auto-cache and freeze-cache keep features in the store."""


@dataclass(frozen=True)
class Route:
    """One of ours.

    Attributes:
        cut: of the job.
        cache: of the job.
        once: it is told of one epoch, and runs one.
    """

    cut: str
    cache: str = CACHE_OFF
    once: bool = False


WAYS_OF_OURS: Mapping[str, Route] = {
    AUTO: Route(AUTO),
    AUTO_ONCE: Route(AUTO, once=True),
    AUTO_CACHED: Route(AUTO, CACHE_READWRITE),
    CACHED: Route(FREEZE, CACHE_READWRITE),
    STREAM: Route(STREAM),
}


def ours_of(workload: Workload) -> list[str]:
    """Names; all features of inner layers are seldom kept."""
    return [
        name
        for name in WAYS_OF_OURS
        if name != CACHED or workload.freeze == BACKBONE
    ]


@dataclass
class CellRuns:
    """Measures one cell.

    Args:
        bed: the testbed, with the filter's cache.
        context: of the experiment.
        workload: what is trained.
        link: as a multiple of what saturates the client; None: unshaped.
        place: of the data.
        keeper: a process of the client tier that does no training.
    """

    bed: Testbed
    context: Context
    workload: Workload
    link: float | None
    place: Place
    keeper: Remote
    entry: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Fills the cell's entry."""
        names = [*ours_of(self.workload), *_present(self.context)]
        self.entry = entries.begin(
            self.context.section,
            cell_name(self.workload, self.link),
            model=self.workload.model,
            freeze=self.workload.freeze,
            link=self.link,
            samples=self.place.num_samples,
            rounds=[],
            runs={name: [] for name in names},
        )
        for number in range(rounds_of(self.context)):
            found = self._calibrate(self.link)
            rate = found["calibration"]["samples_per_second"]
            self._note(f"the tar stream saturates at {rate:.1f}")
            self.entry["rounds"].append(found)
            if not number:
                self.entry["one_offs"] = self._one_offs()
            for name in rotated(names, number):
                self.entry["runs"][name].append(self._cold(name))
                self.context.save()
        self.entry |= judged(self.entry["runs"], self.entry["one_offs"])
        self.entry["complete"] = True

    def saturating_rate(self) -> float:
        """Samples per second that the tar stream trains without a limit."""
        found = self._calibrate(None)
        return float(found["calibration"]["samples_per_second"])

    def _note(self, text: str) -> None:
        self.context.note(f"{self.entry['name']}: {text}")

    def _calibrate(self, link: float | None) -> dict[str, Any]:
        with self._opponent(TAR_STREAM) as opponent:
            return calibrate(self.bed, opponent, link)

    # -- one-offs ----------------------------------------------------------

    def _one_offs(self) -> dict[str, Any]:
        found = {INDEX: self._metered(self.keeper, self._index)}
        with self.bed.client.remote(CONVERT) as convert:
            ways = _conversions(self.context).values()
            ask(convert, "ready", libraries=["streaming"] * ("mds" in ways))
            for way in ways:
                found[way] = self._metered(
                    convert, partial(self._convert, convert, way)
                )
        for name, each in found.items():
            self._note(f"{name} takes {each['seconds']:.1f} s, once")
        return found

    def _index(self) -> None:
        ask(self.keeper, "index", container=self.place.container, anew=True)

    def _convert(self, convert: Remote, way: str) -> None:
        more = {}
        if way == "resized":
            more["resize_size"] = self.workload.task.resize_size
        ask(
            convert,
            way,
            place=asdict(self.place),
            container=f"{self.place.container}-{way}-again",
            **more,
        )

    def _metered(
        self, client: Remote, act: Callable[[], object]
    ) -> dict[str, Any]:
        before = read(self.bed, {client.pid})
        act()
        return asdict(read(self.bed, {client.pid}) - before)

    # -- runs --------------------------------------------------------------

    def _cold(self, name: str) -> dict[str, Any]:
        """A run from its start; nothing of an earlier one is left."""
        self.bed.restart_worker()
        ask(self.keeper, "purge")
        ask(self.keeper, "forget_packages")
        shutil.rmtree(self.place.cache_folder, ignore_errors=True)
        if name in WAYS_OF_OURS:
            found = self._ours(name)
        else:
            found = self._theirs(name)
        self._note(
            f"{name}: {found['before']['seconds']:.1f} + "
            + " ".join(f"{e['seconds']:.1f}" for e in found["epochs"])
            + " s"
        )
        for each in found["epochs"]:
            if each["samples"] != self.place.num_samples:
                raise ValueError(
                    f"{name}: {each['samples']} samples in an epoch of"
                    f" {self.place.num_samples}"
                )
        if name == CACHED and not found["epochs"][-1]["cached"]:
            raise ValueError(f"{name}: its last epoch found nothing kept")
        return found

    def _ours(self, name: str) -> dict[str, Any]:
        way = WAYS_OF_OURS[name]
        epochs = 1 if way.once else epochs_of(self.context)
        with self.bed.client.remote(CLIENT) as client:

            def begin() -> None:
                ask(
                    client,
                    "prepare",
                    model=self.workload.model,
                    freeze=self.workload.freeze_module,
                    container=self.place.container,
                    floor="lossless",
                    epochs=epochs,
                    channels_last=self._options(TAR_STREAM).get(
                        "channels_last", False
                    ),
                )
                ask(client, "open", name=name, cut=way.cut, cache=way.cache)

            ask(client, "ready")
            before = self._metered(client, begin)
            package = ask(client, "package_bytes", name=name)
            before["up_bytes"] -= package
            found = Ours(self.bed, client, name).epochs(0, epochs)
            plan = ask(client, "plan", name=name)["label"]
        return {
            "before": {**before, "package_bytes": package},
            "epochs": list(map(epoch_of, found)),
            "plan": plan,
        }

    def _theirs(self, name: str) -> dict[str, Any]:
        with start(self.bed, name) as remote:
            opponent = Opponent(self.bed, name, remote)
            before = self._metered(remote, lambda: self._prepare(opponent))
            found = opponent.epochs(0, epochs_of(self.context))
        return {
            "before": {**before, "package_bytes": 0},
            "epochs": list(map(epoch_of, found)),
        }

    @contextlib.contextmanager
    def _opponent(self, name: str) -> Iterator[Opponent]:
        with start(self.bed, name) as remote:
            opponent = Opponent(self.bed, name, remote)
            self._prepare(opponent)
            yield opponent

    def _prepare(self, opponent: Opponent) -> None:
        options = self._options(opponent.name) or opponent.grid[0]
        opponent.prepare(self.workload.task, self.place, options)

    def _options(self, name: str) -> Mapping[str, Any]:
        """Of an opponent; empty where it was not tuned."""
        found = self.context.section["opponents"]
        tuned = found.get(self.workload.model, {}).get(name, {})
        return options_at(tuned, self.link)


def rounds_of(context: Context) -> int:
    """Whole runs take long, so that there are fewer than of windows."""
    return QUICK_ROUNDS if context.quick else min(context.rounds, MAX_ROUNDS)


def epochs_of(context: Context) -> int:
    """Of a run."""
    return QUICK_EPOCHS if context.quick else EPOCHS


def lasting(rate: float, link: float | None, shard_samples: int) -> Volume:
    """A data set of which an epoch of streaming takes as long as it should.

    Args:
        rate: samples per second that saturate the client.
        link: as a multiple of what carries these; None: no limit.
        shard_samples: of one shard.
    """
    carried = rate if link is None else min(1.0, link) * rate
    shards = max(MIN_SHARDS, round(EPOCH_SECONDS * carried / shard_samples))
    return Volume(shards * shard_samples, shard_samples)


def cells_of(
    *, quick: bool, shaped: bool
) -> dict[str, tuple[Workload, float | None]]:
    """All cells by name, those of a workload together."""
    cells: list[tuple[Workload, float | None]] = list(
        CELLS[:1] if quick else CELLS
    )
    if not shaped:
        workloads = dict.fromkeys(workload for workload, _ in cells)
        cells = [(workload, None) for workload in workloads]
    return {cell_name(*each): each for each in cells}


def measure(context: Context) -> None:
    """Measures all cells that the section does not have."""
    section = context.section
    section["epochs"] = epochs_of(context)
    section.setdefault("opponents", {})
    section["absent"] = {
        name: reason for name in OPPONENTS if (reason := absent(name))
    }
    for name, reason in section["absent"].items():
        context.note(f"{name} is left out: {reason}")
    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(
            context.testbed(filter_options={"cache": "true"})
        )
        keeper = stack.enter_context(bed.client.remote(CLIENT))
        cells = cells_of(quick=context.quick, shaped=bed.shaped)
        ways = list(_conversions(context).values())
        tuned: set[str] = set()
        for number, name in enumerate(entries.missing(context, cells)):
            workload, link = cells[name]
            if workload.model not in tuned:
                _tune(bed, context, workload)
                tuned.add(workload.model)
            if context.quick:
                volume = QUICK_VOLUME.times(context.scale)
            else:
                volume = PROBES[workload.model].times(context.scale)
                place = _stored(
                    bed, context, workload, f"probe-{number}", volume
                )
                probe = CellRuns(bed, context, workload, link, place, keeper)
                volume = lasting(
                    probe.saturating_rate(), link, volume.shard_samples
                )
            place = _stored(
                bed, context, workload, f"runs-{number}", volume, ways
            )
            CellRuns(bed, context, workload, link, place, keeper).run()
            context.save()
            context.note(line_of(entries.complete(section)[-1]))


def _present(context: Context) -> list[str]:
    return [x for x in OPPONENTS if x not in context.section["absent"]]


def _conversions(context: Context) -> dict[str, str]:
    present = _present(context)
    return {n: way for n, way in CONVERSIONS.items() if n in present}


def _stored(
    bed: Testbed,
    context: Context,
    workload: Workload,
    name: str,
    volume: Volume,
    ways: Sequence[str] = (),
) -> Place:
    context.note(f"{workload.model}: storing {volume.samples} samples")
    return store(
        bed,
        context.tars,
        workload.container(name),
        volume.samples,
        volume.shard_samples,
        ways,
        workload.task.resize_size,
    )


def _tune(bed: Testbed, context: Context, workload: Workload) -> None:
    """Finds the best settings of every opponent; not for a smoke test."""
    if context.quick:
        return
    with contextlib.ExitStack() as stack:
        Lineup(
            bed,
            context,
            workload,
            {
                name: Opponent(
                    bed, name, stack.enter_context(start(bed, name))
                )
                for name in _present(context)
            },
        ).enter(workload)


def ask(client: Remote, do: str, **arguments: Any) -> Any:
    """A question that may take long."""
    return client.ask(do, seconds=SECONDS, **arguments)


def line_of(entry: Mapping[str, Any]) -> str:
    """A complete cell in one line."""
    first, later = entry["first_seconds"], entry["later_seconds"]
    kept = CACHED if CACHED in later else AUTO_CACHED
    once, whole = entry["auto_over_stream"].values()
    others = "".join(
        f" {later[name]['median']:9.2f}" if name in later else f" {'-':>9}"
        for name in BESIDE
    )
    return (
        f"{entry['name']:32} {first[STREAM]['median']:8.1f}"
        f" {first[AUTO]['median']:7.1f} {later[AUTO]['median']:7.1f}"
        f" {later[kept]['median']:7.2f}"
        f" {entry['speedup'][kept][STREAM]['median']:8.1f}{others}"
        f" {once['median']:8.3f} {whole['median']:8.3f}"
    )


def table(section: Mapping[str, Any]) -> str:
    """A line for each complete cell."""
    header = (
        "Seconds of an epoch; the last two columns: whole runs of one and of"
        f" {section['epochs']} epochs, auto over stream\n"
        f"{'cell':32} {'stream 1':>8} {'auto 1':>7} {'auto 2+':>7}"
        f" {'kept 2+':>7} {'speedup':>8} {'mosaic 2+':>9} {'local 2+':>9}"
        f" {'resized':>9} {'1 epoch':>8} {'all':>8}"
    )
    return "\n".join([header, *map(line_of, entries.complete(section))])


def met(section: Mapping[str, Any]) -> dict[str, bool | None]:
    """Both goals, of all complete cells."""
    cells = entries.complete(section)
    kept = [
        cell["speedup"][CACHED][STREAM]["median"]
        for cell in cells
        if cell["freeze"] == BACKBONE and cell["link"] == SLOW
    ]
    over = [
        each["median"]
        for cell in cells
        for each in cell["auto_over_stream"].values()
    ]
    return {
        f"later epochs with kept features {GOAL:g} times as fast as epoch 1"
        f" of streaming, backbones at link {SLOW:g}": all(
            each >= GOAL for each in kept
        )
        if kept
        else None,
        f"whole runs of auto in {MAX_OVER_STREAM} of streaming's time or"
        " less": all(each <= MAX_OVER_STREAM for each in over)
        if over
        else None,
    }


EXPERIMENT = Experiment(
    name="runs",
    title="Whole runs from cold, over several epochs",
    keys=KEYS,
    minutes=115,
    quick_minutes=4,
    measure=measure,
    table=table,
    met=met,
)
