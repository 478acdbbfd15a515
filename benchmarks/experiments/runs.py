"""Whole runs from cold: a new process, no package, empty caches.

``auto`` plans for the number of epochs, so it runs once for each.  Opponents
run a few epochs, from which :mod:`benchmarks.experiments.run_summary` derives
the seconds of longer runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from benchmarks.experiments.run_cell import (
    COUNTS,
    EPOCH_SECONDS,
    EPOCHS,
    Cell,
    RunsCell,
)
from benchmarks.experiments.run_summary import LOCAL_FEATURES
from benchmarks.networks import BACKBONE, INNER
from benchmarks.opponents.training import Place
from benchmarks.record import begin, complete, matching, missing
from benchmarks.suite.contenders import (
    CLIENT,
    STORED_AS,
    TAR_STREAM,
    unavailable,
)
from benchmarks.suite.data_sets import store
from benchmarks.suite.experiment import Context, Experiment
from benchmarks.suite.lineup import lineup
from benchmarks.suite.workloads import (
    MIN_SHARDS,
    QUICK_VOLUME,
    Link,
    Volume,
    Workload,
)
from benchmarks.testbed.two_tiers import Testbed

SLOW, FAST = 0.25, 2.0
GOAL = 20.0
MAX_OVER_BEST, MAX_OVER_BEST_SLOW, SLOW_COUNT = 1.0, 0.75, "5"
PROBES: Mapping[str, Volume] = MappingProxyType(
    {"mobilenet_v3_small": Volume(768, 32), "resnet18": Volume(128, 8)}
)
"""Data sets that measure the machine's speed."""
_MOBILENET = Workload("mobilenet_v3_small", BACKBONE)
_VARIANT = partial(
    Cell,
    _MOBILENET,
    counts=(1, 5),
    rounds=1,
    opponents=(TAR_STREAM, LOCAL_FEATURES),
)
_FEW = partial(Cell, opponents=(TAR_STREAM, "mosaic", LOCAL_FEATURES))
CELLS = (
    Cell(_MOBILENET, SLOW, has_tiers=True),
    Cell(_MOBILENET, FAST),
    Cell(Workload("resnet18", BACKBONE), SLOW, has_tiers=True),
    Cell(Workload("resnet18", INNER), SLOW),
    _FEW(Workload("mobilenet_v3_small", INNER), SLOW),
    # Short, as its later epochs take two thirds of the first.
    _FEW(Workload("resnet18", INNER), FAST, epoch_seconds=EPOCH_SECONDS / 2),
    _VARIANT(FAST, samples=8000),
    _VARIANT(SLOW, ranks=2),
)
"""Not ViT-B/16: the slow link takes a quarter of an hour for its package, in
each run that pushes down."""


def volume_of(rate: float, cell: Cell, link: Link, probe: Volume) -> Volume:
    """A data set of which an epoch of streaming takes long enough.

    ``rate`` saturates the client, in samples per second.
    """
    size = probe.shard_samples
    if cell.samples is not None:
        return Volume(cell.samples, size)
    carried = rate if link is None else min(1.0, link) * rate
    shards = max(MIN_SHARDS, round(cell.epoch_seconds * carried / size))
    return Volume(shards * size, size)


def measure(context: Context) -> None:
    """Measures all cells that the section lacks."""
    section = context.section
    section["epochs"] = list(COUNTS)
    section.setdefault("opponents", {})
    section["absent"] = unavailable(tuple(EPOCHS))
    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(
            context.testbed(filter_options={"cache": "true"})
        )
        cleaner = stack.enter_context(bed.client.remote(CLIENT))
        cells = {
            cell.name(link): (cell, link)
            for cell in CELLS[: 1 if context.quick else None]
            for link in [cell.link if bed.shaped else None]
        }
        names = missing(section, matching(cells, context.only))
        for number, name in enumerate(names):
            cell, link = cells[name]
            container = cell.workload.container(f"runs-{number}")
            probing = partial(RunsCell, bed, context, replace(cell, ranks=1))
            if context.quick:
                volume = QUICK_VOLUME.times(context.scale)
                place = _stored(bed, context, cell, container, volume)
                calibration = probing(place, cleaner).calibrate(link)
            else:
                _tune(bed, context, cell)
                probe = PROBES[cell.workload.model].times(context.scale)
                place = store(bed, context.tars, f"{container}-probe", probe)
                calibration = probing(place, cleaner).calibrate(link)
                rate = calibration["calibration"]["samples_per_second"]
                volume = volume_of(rate, cell, link, probe)
                place = _stored(bed, context, cell, container, volume)
                if bed.shaped:
                    bed.set_link(calibration["link_bytes_per_second"])
            entry = begin(
                section,
                name,
                model=cell.workload.model,
                freeze=cell.workload.freeze,
                link=link,
                samples=place.num_samples,
                ranks=cell.ranks,
                **calibration,
            )
            RunsCell(bed, context, cell, place, cleaner).run(entry)
            context.save()


def _tune(bed: Testbed, context: Context, cell: Cell) -> None:
    """Finds the settings of the opponents that have none."""
    section = context.section
    known = {*section["opponents"].get(cell.workload.model, ())}
    if {*cell.opponents} - {*section["absent"]} - known:
        with lineup(bed, context, cell.workload, cell.opponents) as lined:
            lined.enter(cell.workload)


def _stored(
    bed: Testbed, context: Context, cell: Cell, container: str, volume: Volume
) -> Place:
    """The data set in the formats that the cell's opponents need."""
    formats = [
        STORED_AS[opponent]
        for opponent in cell.opponents
        if opponent in STORED_AS and opponent not in context.section["absent"]
    ]
    return store(bed, context.tars, container, volume, formats)


def goals(section: Mapping[str, Any]) -> dict[str, bool | None]:
    """All goals, for all complete cells."""
    cells = complete(section)
    slow = [
        cell
        for cell in cells
        if cell["freeze"] == BACKBONE and cell["link"] == SLOW
    ]
    over = [
        epoch["auto_over_best"]
        for cell in cells
        for epoch in cell["epochs"].values()
    ]
    over_slow = [cell["epochs"][SLOW_COUNT]["auto_over_best"] for cell in slow]
    cached = [
        ratio["median"]
        for cell in slow
        for ratio in cell["later_over_stream_first"].values()
    ]
    return {
        "whole runs of auto take at most as long as the best opponent's, for"
        f" {', '.join(map(str, COUNTS))} epochs": max(over) <= MAX_OVER_BEST
        if over
        else None,
        f"at most {MAX_OVER_BEST_SLOW} of it for {SLOW_COUNT} epochs,"
        f" backbones at link {SLOW:g}": max(over_slow) <= MAX_OVER_BEST_SLOW
        if over_slow
        else None,
        f"later epochs with cached features {GOAL:g} times as fast as epoch 1"
        f" of streaming, backbones at link {SLOW:g}": min(cached) >= GOAL
        if cached
        else None,
    }


EXPERIMENT = Experiment(
    name="runs",
    title="Whole runs from cold",
    minutes=85,
    quick_minutes=5,
    measure=measure,
    goals=goals,
)
