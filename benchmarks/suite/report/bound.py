"""Section ``stages``: what stages take, and the bound that they set."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from benchmarks.bound import OF_BOUND, WORTH, Bound
from benchmarks.regret import AUTO, STREAM
from benchmarks.stage_bounds import bound_at, crowding_of, ways_of
from benchmarks.suite.report.cells import busy_text
from benchmarks.suite.report.costs import Cores, costs_of
from benchmarks.suite.report.document import (
    Block,
    Listing,
    Part,
    Picture,
    Table,
    Text,
)
from benchmarks.suite.report.figures import (
    NONE,
    GridCell,
    complete_cells,
    fixed,
    percent,
    range_text,
    rate_text,
    verdict,
)
from benchmarks.suite.report.looks import (
    LOOKS,
    dress,
    legend_below,
    log_links,
    new_figure,
)
from benchmarks.suite.verdict import FREEZE_ALL, rates_of, ratio
from matplotlib.axes import Axes

Section = Mapping[str, Any]

_TEXT = """\
From what decoding, each part of the frozen layers and a training step take on
one core (eager torchvision modules, nothing of HAPI), a linear program gives
the most samples per second of two such cores and a link: the bound. Its
speed-up is over streaming, on the same link. Encoding and sending features
count as nothing there, and features travel as float32: folded layers and
compressed features may pass it."""
_MEASURED = f"""\
Measured is auto over the best opponent, of the cells of epoch 1. A machine
that others share is faster at one time than at another: then a core does more
or less for the same link, and on slow links it is only auto that notices. So
the tar stream has an epoch without a limit in the middle of each round, and
the bound is that at the multiple that the link was in that round, of which the
median is told. The goal is {OF_BOUND:g} of the bound's speed-up, in the median
of the rounds, where there is {WORTH:g} to win at the cell's own link."""
_CROWDED = """\
That bound takes both cores for machines of their own. Here they are of one,
and each is slower while the other one works, by what the table of stages
tells; *crowded* is the bound where every second of work on one core takes such
a part of a second from the other, too."""
_STAGES = "Milliseconds of one core for a sample; medians, and their ranges."
_MISSED = """\
What the figures of the missed ones say. The bound's seconds are those of the
machine when the stages were measured; those of auto were counted in its
rounds, and hold all that the tier's processes do: Swift's, the worker's,
HTTP, encoding and decoding of features."""
_TITLE = "What two cores and a link allow"
_NO_STAGES = """\
Not here, as the stages were not measured on their processors"""
_PANEL_INCHES = 2.9
_BOUND = "#444444"
_PLACES = 49
"""Where the bound is drawn; odd, and a link of 1 in the middle."""


@dataclass(frozen=True)
class _Measured:
    """A cell beside its bound.

    Attributes:
        name: of the cell.
        factor: the link in its rounds, as a multiple of what saturated the
            client beside them; the median.
        bound: there.
        cell: of the grid.
        ratio: auto over the best opponent, of the rounds: median, interval.
        share: that over the bound's speed-up, likewise.
        crowded: the bound there, of cores that disturb each other, and the
            median of the rounds over it; None where that was not measured.
        verdict: whether it is as much as it should be; None for no goal.
    """

    name: str
    factor: float
    bound: Bound
    cell: GridCell
    ratio: Mapping[str, Any]
    share: Mapping[str, Any]
    crowded: tuple[Bound, float] | None
    verdict: bool | None


@dataclass(frozen=True)
class _Row:
    """A workload and a link."""

    workload: str
    link: Mapping[str, Any]
    measured: _Measured | None


def bound_part(section: Section, grid: Section | None, cores: Cores) -> Part:
    """Pictures and tables, of each processor.

    Args:
        section: what benchmarks.stages measured, by processor.
        grid: the section of epoch 1, for what was measured; None without.
        cores: of both tiers, in the grid.
    """
    texts = [_TEXT, *([_MEASURED, _CROWDED] if complete_cells(grid) else [])]
    blocks: list[Block] = [Text(" ".join(text.split())) for text in texts]
    if others := _without_stages(section, grid):
        blocks.append(Text(f"{_NO_STAGES}: {', '.join(others)}."))
    parts = [
        Part(
            stages["processor"],
            _blocks(stages, grid, cores, f"bound-{number}"),
        )
        for number, stages in enumerate(section["measured"], 1)
    ]
    if len(parts) == 1:
        return Part(_TITLE, [*blocks, *parts[0].blocks])
    return Part(_TITLE, blocks, parts)


def _without_stages(section: Section, grid: Section | None) -> list[str]:
    there = {stages["processor"] for stages in section["measured"]}
    return [
        f"``{cell['name']}``"
        for cell in complete_cells(grid)
        if cell["processor"] not in there
    ]


def _blocks(
    stages: Section, grid: Section | None, cores: Cores, picture: str
) -> list[Block]:
    """Of one processor."""
    rows = list(_rows(stages, grid))
    blocks: list[Block] = [
        _picture(stages, rows, picture),
        _bounds_table(rows),
    ]
    measured = [row.measured for row in rows if row.measured]
    if measured:
        blocks.append(_measured_table(measured))
    if missed := [each for each in measured if each.verdict is False]:
        blocks += [
            Text(" ".join(_MISSED.split())),
            Listing([_profile(stages, each, cores) for each in missed]),
        ]
    return [*blocks, Text(_STAGES), *_stages(stages)]


def bound_goals(
    section: Section, grid: Section | None
) -> dict[str, bool | None]:
    """The goal, of all cells that were measured.

    Args:
        section: what benchmarks.stages measured, by processor.
        grid: the section of epoch 1; None without.
    """
    found = [
        row.measured
        for stages in section.get("measured", ())
        for row in _rows(stages, grid)
        if row.measured
    ]
    judged = [each for each in found if each.verdict is not None]
    missed = [f"``{each.name}``" for each in judged if not each.verdict]
    goal = (
        f"auto over the best opponent at {OF_BOUND:g} of the bound's speed-up"
        f" or more, wherever that is {WORTH:g} or more"
    )
    if missed:
        goal += (
            f" ({len(missed)} of {len(judged)} cells miss it:"
            f" {', '.join(missed)})"
        )
    return {goal: not missed if judged else None}


def _rows(section: Section, grid: Section | None) -> Iterator[_Row]:
    cells = {
        (cell["model"], cell["freeze"], cell["link"]): cell
        for cell in complete_cells(grid)
        if cell["processor"] == section["processor"]
    }
    for name, network in section["networks"].items():
        for kind, freeze in network["freezes"].items():
            for link in freeze["links"]:
                cell = cells.get((name, kind, link["factor"]))
                yield _Row(
                    f"{name}/{kind}",
                    link,
                    _measured(section, cell, link["goal"]) if cell else None,
                )


def _measured(
    section: Section, cell: GridCell, goal: float | None
) -> _Measured:
    network = section["networks"][cell["model"]]

    def there(factor: float, crowding: float = 0.0) -> Bound:
        return bound_at(section, network, cell["freeze"], factor, crowding)

    calibration = cell["calibration"]
    factors = [
        cell["link"] * calibration["samples_per_second"] / rate
        for rate in calibration["beside"]
    ]
    rounds = cell["rounds"]
    pairs = zip(
        rates_of(rounds[AUTO]),
        rates_of(rounds[cell["best_external"]]),
        strict=True,
    )
    measured = [ours / best for ours, best in pairs]

    def share_of(crowding: float = 0.0) -> dict[str, Any]:
        return ratio(
            measured, [there(factor, crowding).speedup for factor in factors]
        )

    share = share_of()
    middle = statistics.median(factors)
    crowding = crowding_of(network)
    crowded = None
    if crowding is not None:
        crowded = there(middle, crowding), share_of(crowding)["median"]
    return _Measured(
        cell["name"],
        middle,
        there(middle),
        cell,
        cell["ratio"],
        share,
        crowded,
        None if goal is None else share["median"] >= OF_BOUND,
    )


def _bounds_table(rows: Sequence[_Row]) -> Table:
    return Table(
        (
            "Workload",
            "The bound's mix",
            "Link, multiple",
            "Bound, samples/s",
            "Streaming, samples/s",
            "Bound's speed-up",
        ),
        [
            (
                f"``{row.workload}``",
                _mix_text(row.link["bound"]["mix"]),
                f"{row.link['factor']:g}",
                rate_text(row.link["bound"]["samples_per_second"]),
                rate_text(row.link["bound"]["streaming"]),
                fixed(row.link["bound"]["speedup"]),
            )
            for row in rows
        ],
        words=2,
    )


def _measured_table(found: Sequence[_Measured]) -> Table:
    return Table(
        (
            "Cell",
            "Link in the rounds",
            "Bound's speed-up there",
            "Measured",
            "Measured over bound",
            "95 % interval",
            "Bound's speed-up, crowded",
            "Measured over that",
            "Verdict",
        ),
        [
            (
                f"``{each.name}``",
                fixed(each.factor, 3),
                fixed(each.bound.speedup),
                fixed(each.ratio["median"]),
                fixed(each.share["median"], 3),
                range_text(each.share["interval"], 3),
                *_crowded(each),
                NONE if each.verdict is None else verdict(each.verdict),
            )
            for each in found
        ],
    )


def _crowded(each: _Measured) -> tuple[str, str]:
    if each.crowded is None:
        return NONE, NONE
    bound, share = each.crowded
    return fixed(bound.speedup), fixed(share, 3)


def _profile(section: Section, missed: _Measured, cores: Cores) -> str:
    """Where its time goes, beside the bound's."""
    low, high = missed.share["interval"]
    inside = "; the interval reaches the goal" if high >= OF_BOUND else ""
    ours = costs_of(missed.cell, AUTO)
    network = section["networks"][missed.cell["model"]]
    ways = {
        way.name: way
        for way in ways_of(section, network, missed.cell["freeze"])
    }
    mix = missed.bound.mix.items()
    client = sum(part * ways[name].client_seconds for name, part in mix)
    storage = sum(part * ways[name].storage_seconds for name, part in mix)
    return (
        f"``{missed.name}``: {fixed(missed.share['median'], 3)} of the bound"
        f" ({range_text([low, high], 3)}{inside})."
        f" {busy_text(missed.cell, AUTO, cores)}"
        f" A sample of ``{AUTO}`` takes {1e3 * ours.client:.1f} ms of the"
        f" client's CPU and {1e3 * ours.storage:.1f} of the storage side's,"
        f" one of the bound's mix ({_mix_text(missed.bound.mix)})"
        f" {1e3 * client:.1f} and {1e3 * storage:.1f}."
        f"{_left_out(network, missed.cell)}"
        f" Plan: {missed.cell.get('plan') or NONE}."
    )


def _left_out(network: Section, cell: GridCell) -> str:
    """Of what the bound counts as nothing, what the fixed ways show."""
    text = ""
    if STREAM in cell["rounds"]:
        swift = 1e3 * costs_of(cell, STREAM).storage
        text += (
            f" Swift's reading takes {swift:.1f} ms of the storage side's"
            f" (``{STREAM}``)."
        )
    if FREEZE_ALL in cell["rounds"]:
        client = 1e3 * costs_of(cell, FREEZE_ALL).client
        freeze = network["freezes"][cell["freeze"]]
        train = 1e3 * freeze["train_seconds"]["median"]
        text += (
            f" Receiving features and training takes {client:.1f} ms of the"
            f" client's (``{FREEZE_ALL}``), and training {train:.1f} in the"
            " bound."
        )
    return text


def _mix_text(mix: Mapping[str, float]) -> str:
    parts = (f"{percent(part, 0)} {name}" for name, part in mix.items())
    return ", ".join(parts)


def _picture(section: Section, rows: Sequence[_Row], name: str) -> Picture:
    by_workload: dict[str, list[_Row]] = {}
    for each in rows:
        by_workload.setdefault(each.workload, []).append(each)
    lines = -(-len(by_workload) // 2)
    figure, panels = new_figure(_PANEL_INCHES * lines + 0.4, lines, 2)
    for axes, each in zip(panels, by_workload.values(), strict=False):
        _draw(axes, section, each)
    for axes in panels[len(by_workload) :]:
        axes.set_visible(False)
    legend_below(figure, panels, 3)
    return Picture(
        name,
        figure,
        "Measured speed-up and that of the linear program, by workload and"
        " link",
    )


def _draw(axes: Axes, section: Section, rows: Sequence[_Row]) -> None:
    name, kind = rows[0].workload.split("/")
    network = section["networks"][name]
    links = [row.link["factor"] for row in rows]
    places = np.geomspace(min(links), max(links), _PLACES).tolist()
    bounds = [bound_at(section, network, kind, at).speedup for at in places]
    axes.plot(places, bounds, "--", color=_BOUND, label="bound")
    axes.plot(
        places,
        [OF_BOUND * each for each in bounds],
        ":",
        color=_BOUND,
        label=f"{OF_BOUND:g} of it",
    )
    if measured := [row.measured for row in rows if row.measured]:
        _draw_measured(axes, measured)
    log_links(axes, {link: f"{link:g} x" for link in links})
    dress(
        axes, rows[0].workload, "link, multiple of what saturates", "speed-up"
    )
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)


def _draw_measured(axes: Axes, measured: Sequence[_Measured]) -> None:
    look = LOOKS[AUTO]
    places = [each.factor for each in measured]
    axes.plot(
        places,
        [each.ratio["median"] for each in measured],
        marker=look.marker,
        color=look.colour,
        label="measured, auto over the best opponent",
    )
    axes.vlines(
        places,
        [each.ratio["interval"][0] for each in measured],
        [each.ratio["interval"][1] for each in measured],
        color=look.colour,
    )


def _stages(found: Section) -> Iterator[Table]:
    for name, network in found["networks"].items():
        yield Table(
            (f"``{name}``, batch {network['batch']}", "ms", "Range", "kB"),
            [
                (
                    "decode and transform",
                    *_ms(network["decode_seconds"]),
                    NONE,
                ),
                *(
                    (
                        f"up to ``{boundary['name']}``",
                        *_ms(boundary["prefix_seconds"]),
                        fixed(boundary["float32_bytes"] / 1e3, 1),
                    )
                    for boundary in network["boundaries"]
                ),
                *_crowding(network),
                *(
                    (
                        f"training behind ``{freeze['boundary']}`` ({kind})",
                        *_ms(freeze["train_seconds"]),
                        NONE,
                    )
                    for kind, freeze in network["freezes"].items()
                ),
            ],
        )


def _crowding(network: Section) -> Iterator[tuple[str, str, str, str]]:
    """Of a network, where it was measured."""
    found = network.get("crowding")
    if found is not None:
        median, low, high = (
            percent(found[key], 0) for key in ("median", "low", "high")
        )
        yield (
            "longer while the other core does the same",
            median,
            f"{low} … {high}",
            NONE,
        )


def _ms(spread: Mapping[str, float]) -> tuple[str, str]:
    low, high = (1e3 * spread[end] for end in ("low", "high"))
    return fixed(1e3 * spread["median"]), f"{low:.2f} … {high:.2f}"
