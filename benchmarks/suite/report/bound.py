"""Section ``stages``: what stages take, and the bound that they set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.bound import OF_BOUND
from benchmarks.suite.report.document import (
    Block,
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
from matplotlib.axes import Axes

Section = Mapping[str, Any]

_TEXT = f"""\
From what decoding, each part of the frozen layers and a training step take on
one core (eager torchvision modules, nothing of HAPI), a linear program gives
the most samples per second of two such cores and a link: the bound. Its
speed-up is over streaming, on the same link. Encoding and sending features
count as nothing there, and features travel as float32: folded layers and
compressed features may pass it. Measured is auto over the best opponent, of
the cell of the same network, freeze point and multiple of the link in epoch 1.
The goal is {OF_BOUND:g} of the bound's speed-up, where there is 1.2 to win."""
_STAGES = "Milliseconds of one core for a sample; medians, and their ranges."
_PANEL_INCHES = 2.9
_BOUND = "#444444"


def bound_part(section: Section, grid: Section | None) -> Part:
    """Pictures and tables.

    Args:
        section: what benchmarks.stages measured.
        grid: the section of epoch 1, for what was measured; None without.
    """
    rows = list(_links(section, _by_link(grid)))
    blocks: list[Block] = [Text(" ".join(_TEXT.split()))]
    if rows:
        blocks += [_picture(rows), _table(rows)]
    blocks += [Text(_STAGES), *_stages(section)]
    return Part("What two cores and a link allow", blocks)


def bound_goals(
    section: Section, grid: Section | None
) -> dict[str, bool | None]:
    """The goal, of all cells that were measured.

    Args:
        section: what benchmarks.stages measured.
        grid: the section of epoch 1; None without.
    """
    rows = [
        row
        for row in _links(section, _by_link(grid))
        if row["goal"] and row["measured"]
    ]
    missed = [
        f"``{row['workload']}/{row['factor']:g}``"
        for row in rows
        if row["measured"]["median"] < row["goal"]
    ]
    goal = (
        f"auto over the best opponent at {OF_BOUND:g} of the bound's speed-up"
        " or more, wherever that is 1.2 or more"
    )
    if missed:
        goal += (
            f" ({len(missed)} of {len(rows)} cells miss it:"
            f" {', '.join(missed)})"
        )
    return {goal: not missed if rows else None}


def _by_link(grid: Section | None) -> dict[Any, GridCell]:
    return {
        (cell["model"], cell["freeze"], cell["link"]): cell
        for cell in complete_cells(grid or {})
    }


def _links(
    found: Section, cells: Mapping[Any, GridCell]
) -> Iterator[Mapping[str, Any]]:
    for name, network in found.get("networks", {}).items():
        for kind, freeze in network["freezes"].items():
            for link in freeze["links"]:
                cell = cells.get((name, kind, link["factor"]))
                yield {
                    "workload": f"{name}/{kind}",
                    **link,
                    "measured": cell and cell["ratio"],
                }


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        (
            "Workload",
            "The bound's mix",
            "Link, multiple",
            "Bound, samples/s",
            "Streaming, samples/s",
            "Bound's speed-up",
            "Measured",
            "Measured over bound",
            "Goal",
            "Verdict",
        ),
        [_row(each) for each in rows],
        words=2,
    )


def _row(row: Mapping[str, Any]) -> Sequence[str]:
    bound, measured, goal = row["bound"], row["measured"], row["goal"]
    speedup = bound["speedup"]
    return (
        f"``{row['workload']}``",
        ", ".join(f"{percent(p, 0)} {n}" for n, p in bound["mix"].items()),
        f"{row['factor']:g}",
        rate_text(bound["samples_per_second"]),
        rate_text(bound["streaming"]),
        fixed(speedup),
        fixed(measured["median"]) if measured else NONE,
        fixed(measured["median"] / speedup) if measured else NONE,
        fixed(goal),
        verdict(measured["median"] >= goal) if measured and goal else NONE,
    )


def _picture(rows: Sequence[Mapping[str, Any]]) -> Picture:
    by_workload: dict[str, list[Mapping[str, Any]]] = {}
    for each in rows:
        by_workload.setdefault(each["workload"], []).append(each)
    lines = -(-len(by_workload) // 2)
    figure, panels = new_figure(_PANEL_INCHES * lines + 0.4, lines, 2)
    for axes, (name, each) in zip(panels, by_workload.items(), strict=False):
        _draw(axes, name, each)
    for axes in panels[len(by_workload) :]:
        axes.set_visible(False)
    legend_below(figure, panels, 3)
    return Picture(
        "bound",
        figure,
        "Measured speed-up and that of the linear program, by workload and"
        " link",
    )


def _draw(axes: Axes, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    links = [row["factor"] for row in rows]
    bounds = [row["bound"]["speedup"] for row in rows]
    axes.plot(links, bounds, "--", color=_BOUND, label="bound")
    axes.plot(
        links,
        [OF_BOUND * each for each in bounds],
        ":",
        color=_BOUND,
        label=f"{OF_BOUND:g} of it",
    )
    measured = {
        row["factor"]: row["measured"] for row in rows if row["measured"]
    }
    if measured:
        _draw_measured(axes, measured)
    log_links(axes, {link: f"{link:g} x" for link in links})
    dress(axes, name, "link, multiple of what saturates", "speed-up")
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)


def _draw_measured(
    axes: Axes, measured: Mapping[float, Mapping[str, Any]]
) -> None:
    look = LOOKS["auto"]
    axes.plot(
        list(measured),
        [each["median"] for each in measured.values()],
        marker=look.marker,
        color=look.colour,
        label="measured, auto over the best opponent",
    )
    axes.vlines(
        list(measured),
        [each["interval"][0] for each in measured.values()],
        [each["interval"][1] for each in measured.values()],
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


def _ms(spread: Mapping[str, float]) -> tuple[str, str]:
    low, high = (1e3 * spread[end] for end in ("low", "high"))
    return fixed(1e3 * spread["median"]), f"{low:.2f} … {high:.2f}"
