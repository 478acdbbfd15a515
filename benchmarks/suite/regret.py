"""The plan beside every fixed cut, and the rules of published systems."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.cell_run import Settings
from benchmarks.cells import QUICK, chosen_cells
from benchmarks.regret import AUTO
from benchmarks.results import Results, cold_table
from benchmarks.results import table as cells_table
from benchmarks.splits import (
    COLD_UPLOAD_SECONDS,
    QUICK_SCALE,
    QUICK_SETTLING_SECONDS,
    SETTLING_SECONDS,
    measure_cells,
)
from benchmarks.suite.experiment import Context, Experiment
from benchmarks.suite.results import Section, stamp

from hapi_protocol.encodings import PRECISIONS

GOAL = 0.95
KEYS = """\
  body      as the JSON file of benchmarks.splits (see its --help)"""


class SectionResults(Results):
    """Results of ``benchmarks.splits``, in a section of the suite's.

    Args:
        section: keeps them under ``body``.
        settings: what all cells have in common.
        save: writes the file.
    """

    def __init__(
        self,
        section: Section,
        settings: Mapping[str, Any],
        save: Callable[[], None],
    ) -> None:
        super().__init__(None, settings)
        if "body" in section:
            self._take_over(section["body"])
        section["body"] = self.body
        self._save_file = save
        self._stamp = stamp()

    def put(self, entry: Mapping[str, Any]) -> None:
        """Keeps a cell's entry, with date and commit of this run."""
        super().put({**self._stamp, **entry})

    def save(self) -> None:
        """Writes the suite's file."""
        self._save_file()


def measure(context: Context) -> None:
    """Measures all cells that the section does not have."""
    quick = context.quick
    with context.testbed() as bed:
        patterns = context.only or (QUICK if quick else ())
        cells = chosen_cells(patterns, shaped=bed.shaped)
        settings = Settings(
            rounds=context.rounds,
            floor=PRECISIONS[0],
            scale=QUICK_SCALE if quick else 1.0,
            cold_epochs=0,  # the experiment "runs" has these
            cold_upload_seconds=COLD_UPLOAD_SECONDS,
            most_settling_seconds=QUICK_SETTLING_SECONDS
            if quick
            else SETTLING_SECONDS,
            thorough=not quick,
            tars=[tar.name for tar in context.tars],
        )
        results = SectionResults(
            context.section,
            {**dataclasses.asdict(settings), "shaped": bed.shaped},
            context.save,
        )
        measure_cells(
            bed, cells, settings, context.tars, results, context.note
        )


def table(section: Mapping[str, Any]) -> str:
    """Regret of each cell, and whole runs where there are any."""
    cells = section["body"]["cells"]
    return "\n".join(filter(None, [cells_table(cells), cold_table(cells)]))


def met(section: Mapping[str, Any]) -> dict[str, bool | None]:
    """Both goals, of all complete cells."""
    cells = [c for c in section["body"]["cells"] if c["complete"]]
    if not cells:
        return {}
    near = [
        cell["samples_per_second"][AUTO]
        >= GOAL * cell["samples_per_second"]["best_static"]
        for cell in cells
    ]
    return {
        f"auto at {GOAL} of the best static cut or more, in every cell": all(
            near
        ),
        "no cell missed, by its interval": not any(c["missed"] for c in cells),
    }


EXPERIMENT = Experiment(
    name="regret",
    title="The plan, beside every fixed cut and published rules",
    keys=KEYS,
    minutes=60,
    quick_minutes=6,
    measure=measure,
    table=table,
    met=met,
)
