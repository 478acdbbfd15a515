"""Epoch 1, cell by cell: ours beside what people use today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.regret import AUTO
from benchmarks.suite.cell import CellRun
from benchmarks.suite.contenders import TAR_STREAM, Opponent, start
from benchmarks.suite.experiment import Context, Experiment
from benchmarks.suite.lineup import gathered
from benchmarks.suite.results import Section
from benchmarks.suite.verdict import GOAL, judge
from benchmarks.suite.workloads import Workload, cell_name, chosen

KEYS = """\
  opponents {network: {name: {options, versions, grid: {settings: samples
            per second}, even: {options, grid}, slow: {options, grid}}}}:
            settings, and how they were chosen, without a limit; even: for
            links of 1 to 4, at the first of these; slow: for links below 1,
            until some were as fast as the link
  absent    {name: why an opponent was not measured}
  cells     list of
    name, model, freeze, link  e.g. resnet18/backbone/0.25
    date, commit, processor    when it was begun, of what, and where
    calibration         {samples_per_second, epochs, bytes_per_sample,
                        beside}: the tar stream's without a limit, before the
                        rounds: the median of whole epochs; beside: that of
                        an epoch in the middle of each round
    settling            {auto: {plans, settled}}: after each window before the
                        rounds, and whether the last one had stayed
    link_bytes_per_second
    rounds              {contender: [pass, by round]}; a pass, a whole epoch,
                        has samples, seconds, samples_per_second, and of one
                        sample down_bytes, up_bytes (interface counters; the
                        package was stored before), client_seconds and
                        storage_seconds (CPU); ours also fallbacks
    samples_per_second  {contender: median over the rounds}
    best_external       the fastest that reads the same photographs
    ratio               auto over it: {median, interval}, of the rounds'
                        ratios, 95 % by bootstrap
    ratio_resized       auto-resized over tar-stream-resized, likewise
    again               the opponent that is measured twice in a round: the
                        best one of the first
    noise               its second passes over its first ones, likewise
    plan                auto's, at the end
    complete
  Contenders: the opponents, and of ours stream, freeze and auto, which round
  nothing, and for its bytes freeze-float16 (backbones at 0.25);
  auto-resized and tar-stream-resized read photographs that somebody has
  resized."""


def measure(context: Context) -> None:
    """Measures all cells that the section does not have."""
    section = context.section
    section.setdefault("cells", [])
    section.setdefault("opponents", {})
    with context.testbed() as bed:
        todo = _todo(context, shaped=bed.shaped)
        if not todo:
            return
        with (
            gathered(bed, context, todo[0][0]) as lineup,
            start(bed, TAR_STREAM) as remote,
        ):
            calibrator = Opponent(bed, TAR_STREAM, remote)
            for workload, link in todo:
                lineup.enter(workload)
                run = CellRun(lineup, link, calibrator)
                _put(section, run.entry)
                run.run()
                judge(run.entry)
                run.entry["complete"] = True
                context.save()
                context.note(line_of(run.entry))


def _todo(
    context: Context, *, shaped: bool
) -> list[tuple[Workload, float | None]]:
    return [
        (workload, link)
        for workload, link in chosen(
            context.only, quick=context.quick, shaped=shaped
        )
        if not _has(context.section, cell_name(workload, link))
    ]


def _has(section: Section, name: str) -> bool:
    return any(c["name"] == name and c["complete"] for c in section["cells"])


def _put(section: Section, entry: dict[str, Any]) -> None:
    others = [c for c in section["cells"] if c["name"] != entry["name"]]
    section["cells"] = [*others, entry]


def line_of(entry: Mapping[str, Any]) -> str:
    """A complete cell in one line."""
    rates, found = entry["samples_per_second"], entry["ratio"]
    low, high = found["interval"]
    best, resized = entry["best_external"], entry["ratio_resized"]
    shown = "-" if resized is None else f"{resized['median']:.3f}"
    return (
        f"{entry['name']:34} {rates[AUTO]:7.1f} {best:>10} {rates[best]:7.1f}"
        f" {found['median']:7.3f} ({low:.3f} … {high:.3f})"
        f" {entry['noise']['median']:7.3f} {shown:>7}"
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
