"""Regret of ``auto``: how far it stays behind the best fixed cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.experiments.regret_cell import RegretCell
from benchmarks.record import begin, complete, missing
from benchmarks.suite.contenders import AUTO
from benchmarks.suite.experiment import Context, Experiment
from benchmarks.suite.workloads import cells_of

LINKS = (0.25, 2.0)
GOAL = 0.95
BODY, CELLS = "body", "cells"


def measure(context: Context) -> None:
    """Measures all cells that the section lacks."""
    body = context.section.setdefault(BODY, {})
    with context.testbed() as bed:
        cells = cells_of(
            context.only, quick=context.quick, shaped=bed.shaped, links=LINKS
        )
        for name in missing(body, cells, CELLS):
            workload, link = cells[name]
            entry = begin(
                body,
                name,
                key=CELLS,
                model=workload.model,
                freeze=workload.freeze,
                freeze_module=workload.freeze_module,
                link=link,
            )
            RegretCell(bed, context, workload, link, entry).run()
            context.save()


def goals(section: Mapping[str, Any]) -> dict[str, bool | None]:
    """Both goals, for all complete cells."""
    cells = complete(section[BODY], CELLS)
    if not cells:
        return {}
    near = [
        cell["samples_per_second"][AUTO]
        >= GOAL * cell["samples_per_second"]["best_static"]
        for cell in cells
    ]
    return {
        f"auto at {GOAL} of the best fixed cut's rate, in every cell": all(
            near
        ),
        "no cell missed by its interval": not any(c["missed"] for c in cells),
    }


EXPERIMENT = Experiment(
    name="regret",
    title="Regret: auto and every fixed cut",
    minutes=100,
    quick_minutes=3,
    measure=measure,
    goals=goals,
)
