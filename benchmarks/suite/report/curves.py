"""Samples per second and bytes of a sample, against the link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.suite.report.document import Picture
from benchmarks.suite.report.figures import GridCell, link_text, median_of
from benchmarks.suite.report.looks import (
    Look,
    dress,
    in_order,
    legend_below,
    log_links,
    log_numbers,
    looks_of,
    new_figure,
)
from benchmarks.suite.verdict import AGAIN
from matplotlib.axes import Axes

_HEIGHT_INCHES = 4.2
_SPREAD = 0.016
"""Contenders stand beside one another by this part of the link's rate."""
_LINK = "link: times what saturates the client; below it MB/s"


def curves(workload: str, cells: Sequence[GridCell]) -> Picture:
    """Both pictures of a workload, side by side.

    Args:
        workload: network and freeze point.
        cells: complete ones of it.
    """
    figure, (left, right) = new_figure(_HEIGHT_INCHES, columns=2)
    looks = looks_of(names_of(cells))
    for number, (name, look) in enumerate(looks.items()):
        shift = 1 + _SPREAD * (number - len(looks) / 2)
        _draw(left, cells, name, look, shift, "samples_per_second")
        _draw(right, cells, name, look, shift, "down_bytes", 1e-3)
    ticks = {place_of(cell): _tick(cell) for cell in cells}
    for axes in (left, right):
        log_links(axes, ticks)
    dress(left, "Samples per second", _LINK, "samples/s")
    dress(right, "Received for a sample", _LINK, "kB (logarithmic)")
    left.set_ylim(bottom=0)
    log_numbers(right)
    legend_below(figure, [left])
    return Picture(
        f"curves-{slug(workload)}",
        figure,
        f"{workload}: samples per second and bytes of a sample of each"
        " contender, against the link's rate",
    )


def names_of(cells: Sequence[GridCell]) -> list[str]:
    """All contenders that any of the cells has, in the order of legends."""
    found = {name for cell in cells for name in cell["rounds"]}
    return in_order(found - {AGAIN})


def place_of(cell: GridCell) -> float:
    """On the axis of links."""
    return 1.0 if cell["link"] is None else float(cell["link"])


def slug(workload: str) -> str:
    """For names of files."""
    return workload.replace("/", "-").replace("_", "-")


def _tick(cell: GridCell) -> str:
    if cell["link"] is None:
        return "no limit"
    return f"{cell['link']:g} x\n{link_text(cell['link_bytes_per_second'])}"


def _draw(
    axes: Axes,
    cells: Sequence[GridCell],
    name: str,
    look: Look,
    shift: float,
    key: str,
    scale: float = 1.0,
) -> None:
    points = {
        shift * place_of(cell): [
            scale * window[key] for window in cell["rounds"][name]
        ]
        for cell in cells
        if cell["rounds"].get(name)
    }
    middles = {
        shift * place_of(cell): scale * median_of(cell["rounds"][name], key)
        for cell in cells
        if cell["rounds"].get(name)
    }
    axes.plot(
        list(middles),
        list(middles.values()),
        look.dash,
        color=look.colour,
        marker=look.marker,
        markersize=6 if name == "auto" else 5,
        linewidth=2.2 if name == "auto" else 1.1,
        zorder=4 if name == "auto" else 3,
        label=name,
    )
    _draw_ranges(axes, points, look)


def _draw_ranges(
    axes: Axes, points: Mapping[float, Sequence[float]], look: Look
) -> None:
    """From the slowest round to the fastest."""
    axes.vlines(
        list(points),
        [min(each) for each in points.values()],
        [max(each) for each in points.values()],
        color=look.colour,
        linewidth=1.4,
        alpha=0.7,
    )
