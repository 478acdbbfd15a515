"""Epoch 1 of HAPI and of other loaders, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.experiments.grid_cell import GridCell
from benchmarks.experiments.verdict import GOAL, judge
from benchmarks.record import begin, complete, missing
from benchmarks.suite.contenders import EXTERNALS
from benchmarks.suite.experiment import Context, Experiment
from benchmarks.suite.lineup import lineup
from benchmarks.suite.workloads import cells_of

CELLS = "cells"
QUICK_OPPONENTS = 2


def measure(context: Context) -> None:
    """Measures all cells that the section lacks."""
    section = context.section
    section.setdefault("opponents", {})
    with context.testbed() as bed:
        cells = cells_of(context.only, quick=context.quick, shaped=bed.shaped)
        todo = [cells[name] for name in missing(section, cells, CELLS)]
        if not todo:
            return
        opponents = EXTERNALS[: QUICK_OPPONENTS if context.quick else None]
        with lineup(bed, context, todo[0][0], opponents) as lined:
            for name, (workload, link) in cells.items():
                if (workload, link) not in todo:
                    continue
                lined.enter(workload)
                entry = begin(
                    section,
                    name,
                    key=CELLS,
                    model=workload.model,
                    freeze=workload.freeze,
                    link=link,
                )
                GridCell(lined, link, entry).run()
                judge(entry)
                entry["complete"] = True
                context.save()


def goals(section: Mapping[str, Any]) -> dict[str, bool | None]:
    """The goal for the ratio to the best opponent."""
    cells = complete(section, CELLS)
    goal = f"auto at {GOAL} of the best opponent's rate, in every cell"
    return {
        goal: all(cell["ratio"]["median"] >= GOAL for cell in cells)
        if cells
        else None
    }


EXPERIMENT = Experiment(
    name="grid",
    title="Epoch 1: auto over the best opponent",
    minutes=90,
    quick_minutes=4,
    measure=measure,
    goals=goals,
)
