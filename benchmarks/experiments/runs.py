"""Whole runs from cold: a new process, no package, empty caches."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from benchmarks.experiments.run_summary import (
    AUTO_CACHED,
    AUTO_ONCE,
    CACHED,
    LOCAL_FEATURES,
    summarise,
)
from benchmarks.networks import BACKBONE, INNER
from benchmarks.opponents.training import Place
from benchmarks.ratios import rotated
from benchmarks.record import begin, complete, matching, missing
from benchmarks.suite.calibration import calibrate
from benchmarks.suite.contenders import (
    AUTO,
    CLIENT,
    FREEZE,
    RESIZED,
    STORED_AS,
    STREAM,
    TAR_STREAM,
    Opponent,
    Ours,
    ask,
    start,
    unavailable,
)
from benchmarks.suite.data_sets import store
from benchmarks.suite.experiment import Context, Experiment
from benchmarks.suite.lineup import lineup, options_at
from benchmarks.suite.workloads import (
    QUICK_VOLUME,
    Link,
    Volume,
    Workload,
    cell_name,
)
from benchmarks.testbed.remote import Remote
from benchmarks.testbed.two_tiers import Testbed
from hapi_protocol.headers import CACHE_OFF, CACHE_READWRITE

SLOW, FAST = 0.25, 2.0
CELLS = (
    (Workload("mobilenet_v3_small", BACKBONE), SLOW),
    (Workload("mobilenet_v3_small", BACKBONE), FAST),
    (Workload("resnet18", BACKBONE), SLOW),
    (Workload("resnet18", INNER), SLOW),
)
"""Not ViT-B/16: the slow link takes a quarter of an hour for its package, in
each run that pushes down."""
PROBES: Mapping[str, Volume] = MappingProxyType(
    {"mobilenet_v3_small": Volume(768, 32), "resnet18": Volume(128, 8)}
)
"""Data sets that measure the machine's speed."""
EPOCHS, QUICK_EPOCHS = 5, 2
EPOCH_SECONDS = 15.0
"""Length of an epoch of streaming over the cell's link; a shorter run would
stream without a plan."""
MIN_SHARDS = 8
"""A shard takes one route: with fewer there is no mix of routes."""
MAX_ROUNDS, QUICK_ROUNDS = 3, 1
GOAL = 20.0
MAX_OVER_STREAM = 1.05
OPPONENTS = (TAR_STREAM, "webdataset", "mosaic", LOCAL_FEATURES, RESIZED)


@dataclass(frozen=True)
class OurRun:
    """Options of a job; with ``once`` it plans for one epoch, and runs one.

    With ``is_local`` it caches features in memory, as jobs do by default.
    """

    cut: str
    cache: str = CACHE_OFF
    once: bool = False
    is_local: bool = False


OURS: Mapping[str, OurRun] = MappingProxyType(
    {
        AUTO: OurRun(AUTO, is_local=True),
        AUTO_ONCE: OurRun(AUTO, once=True, is_local=True),
        AUTO_CACHED: OurRun(AUTO, CACHE_READWRITE),
        CACHED: OurRun(FREEZE, CACHE_READWRITE),
        STREAM: OurRun(STREAM),
    }
)


@dataclass
class RunsCell:
    """Measures one cell.

    ``cleaner`` is a client process that does not train.
    """

    bed: Testbed
    context: Context
    workload: Workload
    link: Link
    place: Place
    cleaner: Remote

    def run(self, entry: dict[str, Any]) -> None:
        """Fills the cell's entry."""
        absent = self.context.section["absent"]
        names = [*OURS, *(name for name in OPPONENTS if name not in absent)]
        if self.workload.freeze != BACKBONE:
            # Features of inner layers are too large to cache all of them.
            names.remove(CACHED)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        entry |= {
            "model": self.workload.model,
            "freeze": self.workload.freeze,
            "link": self.link,
            "samples": self.place.num_samples,
            "rounds": [],
            "runs": runs,
        }
        rounds = min(self.context.rounds, MAX_ROUNDS)
        for number in range(QUICK_ROUNDS if self.context.quick else rounds):
            entry["rounds"].append(self.calibrate(self.link))
            for name in rotated(names, number):
                runs[name].append(self._cold_run(name))
                self.context.save()
        entry |= summarise(runs)
        entry["complete"] = True

    def calibrate(self, link: Link) -> dict[str, Any]:
        """Sets the link; see :mod:`benchmarks.suite.calibration`."""
        with start(self.bed, TAR_STREAM) as remote:
            opponent = Opponent(self.bed, TAR_STREAM, remote)
            self._prepare(opponent)
            return calibrate(self.bed, opponent, link)

    def _cold_run(self, name: str) -> dict[str, Any]:
        """A run from its start, without anything of an earlier one."""
        self.bed.restart_worker()
        ask(self.cleaner, "clear_store")
        shutil.rmtree(self.place.cache_folder, ignore_errors=True)
        run = self._ours(name) if name in OURS else self._theirs(name)
        seconds = [each["seconds"] for each in run["epochs"]]
        self.context.note(
            f"{self.workload.name}: {name}: {run['before']['seconds']:.1f} + "
            + " ".join(f"{each:.1f}" for each in seconds)
            + " s"
        )
        for each in run["epochs"]:
            if each["samples"] != self.place.num_samples:
                raise ValueError(
                    f"{name}: {each['samples']} samples in an epoch of"
                    f" {self.place.num_samples}"
                )
        if name == CACHED and not run["epochs"][-1]["cached"]:
            raise ValueError(f"{name}: its last epoch found no cached sample")
        return run

    def _ours(self, name: str) -> dict[str, Any]:
        options = OURS[name]
        epochs = 1 if options.once else epochs_of(self.context)
        with self.bed.client.remote(CLIENT) as client:

            def open_job() -> None:
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
                ask(
                    client,
                    "open",
                    name=name,
                    cut=options.cut,
                    cache=options.cache,
                    cache_memory_bytes=None if options.is_local else 0,
                )

            ask(client, "ready")
            before = _timed(open_job)
            before["package_bytes"] = ask(client, "package_bytes", name=name)
            found = Ours(self.bed, client, name).epochs(0, epochs)
            plan = ask(client, "plan", name=name)["label"]
        return {"before": before, "epochs": found, "plan": plan}

    def _theirs(self, name: str) -> dict[str, Any]:
        with start(self.bed, name) as remote:
            opponent = Opponent(self.bed, name, remote)
            before = _timed(lambda: self._prepare(opponent))
            found = opponent.epochs(0, epochs_of(self.context))
        return {"before": before, "epochs": found}

    def _prepare(self, opponent: Opponent) -> None:
        options = self._options(opponent.name) or opponent.grid[0]
        opponent.prepare(self.workload.task, self.place, options)

    def _options(self, name: str) -> Mapping[str, Any]:
        """Settings of an opponent; empty if it was not tuned."""
        found = self.context.section["opponents"]
        tuned = found.get(self.workload.model, {}).get(name, {})
        return options_at(tuned, self.link)


def _timed(act: Callable[[], object]) -> dict[str, float]:
    started = time.monotonic()
    act()
    return {"seconds": time.monotonic() - started}


def epochs_of(context: Context) -> int:
    """Number of epochs of a run."""
    return QUICK_EPOCHS if context.quick else EPOCHS


def volume_of(rate: float, link: Link, shard_samples: int) -> Volume:
    """A data set of which an epoch of streaming takes long enough.

    ``rate`` saturates the client, in samples per second.
    """
    carried = rate if link is None else min(1.0, link) * rate
    shards = max(MIN_SHARDS, round(EPOCH_SECONDS * carried / shard_samples))
    return Volume(shards * shard_samples, shard_samples)


def measure(context: Context) -> None:
    """Measures all cells that the section lacks."""
    section = context.section
    section["epochs"] = epochs_of(context)
    section.setdefault("opponents", {})
    section["absent"] = unavailable(OPPONENTS)
    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(
            context.testbed(filter_options={"cache": "true"})
        )
        cleaner = stack.enter_context(bed.client.remote(CLIENT))
        cells = {
            cell_name(workload, link): (workload, link)
            for workload, shaped_link in CELLS[: 1 if context.quick else None]
            for link in [shaped_link if bed.shaped else None]
        }
        names = missing(section, matching(cells, context.only))
        for number, name in enumerate(names):
            workload, link = cells[name]
            run = partial(RunsCell, bed, context, workload, link)
            volume = QUICK_VOLUME.times(context.scale)
            if not context.quick:
                with lineup(bed, context, workload, OPPONENTS) as lined:
                    lined.enter(workload)
                volume = PROBES[workload.model].times(context.scale)
                container = workload.container(f"probe-{number}")
                place = store(bed, context.tars, container, volume)
                found = run(place, cleaner).calibrate(None)["calibration"]
                rate = found["samples_per_second"]
                volume = volume_of(rate, link, volume.shard_samples)
            place = store(
                bed,
                context.tars,
                workload.container(f"runs-{number}"),
                volume,
                [
                    STORED_AS[each]
                    for each in OPPONENTS
                    if each in STORED_AS and each not in section["absent"]
                ],
            )
            run(place, cleaner).run(begin(section, name))
            context.save()


def goals(section: Mapping[str, Any]) -> dict[str, bool | None]:
    """Both goals, for all complete cells."""
    cells = complete(section)
    cached = [
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
        f"later epochs with cached features {GOAL:g} times as fast as epoch 1"
        f" of streaming, backbones at link {SLOW:g}": min(cached) >= GOAL
        if cached
        else None,
        f"whole runs of auto in {MAX_OVER_STREAM} of streaming's time": max(
            over
        )
        <= MAX_OVER_STREAM
        if over
        else None,
    }


EXPERIMENT = Experiment(
    name="runs",
    title="Whole runs from cold",
    minutes=100,
    quick_minutes=3,
    measure=measure,
    goals=goals,
)
