"""The whole report, from the file of the suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.suite.report.ablations import ablations_part
from benchmarks.suite.report.accuracy import accuracy_part
from benchmarks.suite.report.bound import bound_part
from benchmarks.suite.report.costs import cores_of
from benchmarks.suite.report.document import Part, Text
from benchmarks.suite.report.fallbacks import fallbacks_part
from benchmarks.suite.report.goals import (
    NOT_MEASURED,
    goals_part,
    not_shown_part,
)
from benchmarks.suite.report.gpu import gpu_part
from benchmarks.suite.report.grid import grid_part
from benchmarks.suite.report.provenance import machine_part
from benchmarks.suite.report.regret import regret_part
from benchmarks.suite.report.runs import runs_part
from benchmarks.suite.report.scaling import scaling_part
from benchmarks.suite.report.tenants import tenants_part
from benchmarks.suite.report.wire import wire_part

Section = Mapping[str, Any]

TITLES: Mapping[str, str] = MappingProxyType(
    {
        "grid": "Epoch 1 beside what people use",
        "regret": "The plan beside every fixed cut",
        "runs": "Whole runs, over epochs",
        "tenants": "Tenants beside one another",
        "stages": "What two cores and a link allow",
        "bytes": "Bytes of a sample",
        "accuracy": "Accuracy with rounded features",
        "scaling": "Two proxies, two ranks",
        "ablations": "What each part is worth",
    }
)
"""Of the experiments, in the order of the page."""

_EMPTY = {"complete", "met", "absent"}
"""All that a section has in which nothing was measured."""
_INTRODUCTION = """\
HAPI measured against what people use today to train on photographs in an
object store: the same networks, the same photographs, the same machine. This
page is written by ``python -m benchmarks report`` from the file that
``python -m benchmarks run`` wrote, and shows no result that the file does not
hold. What is measured, how, and what each contender does is told by
``docs/benchmarks.rst``."""


def report_of(body: Section, gpu: Path | None = None) -> Part:
    """The document.

    Args:
        body: of the results, of :func:`benchmarks.suite.results.load`.
        gpu: folder of the results of ``benchmarks/gpu.sh``, if there are.

    Raises:
        ValueError: naming a section, and what it lacks.
    """
    sections = body["experiments"]
    cores = cores_of(body["settings"])
    parts: Mapping[str, Callable[[Section], Part]] = {
        "grid": lambda section: grid_part(section, cores),
        "regret": regret_part,
        "runs": runs_part,
        "tenants": tenants_part,
        "stages": lambda section: bound_part(
            section, sections.get("grid"), cores
        ),
        "bytes": lambda section: wire_part(section, sections.get("grid")),
        "accuracy": accuracy_part,
        "scaling": scaling_part,
        "ablations": ablations_part,
    }
    return Part(
        "HAPI beside what people use today",
        [Text(_INTRODUCTION)],
        [
            goals_part(sections, TITLES),
            machine_part(body),
            not_shown_part(),
            fallbacks_part(sections),
            *(
                _part(name, TITLES[name], make, sections)
                for name, make in parts.items()
            ),
            gpu_part(gpu),
        ],
    )


def _part(
    name: str,
    title: str,
    make: Callable[[Section], Part],
    sections: Mapping[str, Section],
) -> Part:
    section = sections.get(name, {})
    if not {*section} - _EMPTY:
        why = section.get("absent")
        told = f"{NOT_MEASURED}: {why}" if why else NOT_MEASURED
        return Part(title, [Text(f"{told.capitalize()}.")])
    try:
        found = make(section)
    except KeyError as error:
        raise ValueError(
            f"the section {name!r} has no {error}; the file is of another"
            " version of these benchmarks: measure it again"
        ) from error
    if section["complete"]:
        return found
    note = Text("This experiment had not ended when the file was written.")
    return Part(found.title, [note, *found.blocks], found.parts)
