"""Experiments that need no testbed, and are commands of their own as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import accuracy, stages, wire_bytes
from benchmarks.accuracy import CIFAR_TARS
from benchmarks.suite.experiment import Context, Experiment, no_goals
from benchmarks.suite.results import processor, stamp
from benchmarks.tars import find_tars

MEASURED = "measured"


def measure_stages(context: Context) -> None:
    """See :mod:`benchmarks.stages`; in the place of this processor's."""
    section, this = context.section, stamp()
    others = [
        each
        for each in section.get(MEASURED, ())
        if each["processor"] != this["processor"]
    ]
    found = stages.measure(
        context.tars, quick=context.quick, note=context.note
    )
    section[MEASURED] = [*others, {**this, **found}]


def stages_table(section: Mapping[str, Any]) -> str:
    """Of each processor."""
    return "\n\n".join(
        f"{each['processor']}\n{stages.table(each)}"
        for each in section.get(MEASURED, ())
    )


def lacks_stages(section: Mapping[str, Any]) -> bool:
    """Whether there are none of this processor."""
    return processor() not in {
        each["processor"] for each in section.get(MEASURED, ())
    }


def measure_bytes(context: Context) -> None:
    """See :mod:`benchmarks.wire_bytes`."""
    context.section.update(
        wire_bytes.measure(
            context.tars, quick=context.quick, note=context.note
        )
    )


def bytes_met(section: Mapping[str, Any]) -> dict[str, bool | None]:
    """Its goals, one by one."""
    return {
        f"{each['network']} at {each['boundary']} in {each['encoding']}:"
        f" {each['least_ratio']:g} times fewer bytes": each["met"]
        for each in section["goals"]
    }


def measure_accuracy(context: Context) -> None:
    """See :mod:`benchmarks.accuracy`; without CIFAR-10 it says so."""
    tars = [
        tar
        for tar in find_tars(context.sources, CIFAR_TARS)
        if tar.match(CIFAR_TARS)
    ]
    if not tars:
        context.section["absent"] = f"--data has no {CIFAR_TARS}"
        context.note(context.section["absent"])
        return
    context.section.update(
        accuracy.measure(tars, quick=context.quick, note=context.note)
    )


def accuracy_table(section: Mapping[str, Any]) -> str:
    """Its table, or why there is none."""
    if "absent" in section:
        return f"not measured: {section['absent']}"
    return accuracy.table(section)


STAGES = Experiment(
    name="stages",
    title="What each stage takes, and the bound that it sets",
    keys="""\
  measured  of each processor that the file's figures are of: date, commit,
            processor, and ``stages`` of benchmarks.stages (see its --help);
            the bound of a cell is that of its own processor""",
    minutes=5,
    quick_minutes=1,
    measure=measure_stages,
    table=stages_table,
    met=no_goals,
    lacks_here=lacks_stages,
)
BYTES = Experiment(
    name="bytes",
    title="Bytes of a sample on the wire, by boundary and encoding",
    keys="  as ``wire_bytes`` of benchmarks.wire_bytes (see its --help)",
    minutes=3,
    quick_minutes=1,
    measure=measure_bytes,
    table=wire_bytes.table,
    met=bytes_met,
)
ACCURACY = Experiment(
    name="accuracy",
    title="Accuracy of a trained tail, by encoding",
    keys="""\
  as ``accuracy`` of benchmarks.accuracy (see its --help), or ``absent``: why
  it was not measured""",
    minutes=5,
    quick_minutes=1,
    measure=measure_accuracy,
    table=accuracy_table,
    met=no_goals,
)
