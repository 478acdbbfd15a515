"""Ratios with their intervals, one below the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.suite.report.document import Picture
from benchmarks.suite.report.looks import dress, new_figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

_ROW_INCHES = 0.3
_INK = "#0072b2"
_SOFT = "#57606a"

_WIDE = 4.0
"""From this span on, the axis is logarithmic."""

Ratio = Mapping[str, Any]
"""``median`` and ``interval``."""


def ratios_picture(
    name: str,
    title: str,
    axis: str,
    rows: Sequence[tuple[str, Ratio]],
    marks: Mapping[str, float] | None = None,
) -> Picture:
    """A dot and a line for each, beside 1.

    Args:
        name: of the file.
        title: above it.
        axis: what the ratio is.
        rows: words and ratio, from the top.
        marks: more vertical lines, by what they are.
    """
    figure, (axes,) = new_figure(1.2 + _ROW_INCHES * len(rows))
    places = range(len(rows))
    ratios = [ratio for _, ratio in rows]
    axes.hlines(
        places,
        [ratio["interval"][0] for ratio in ratios],
        [ratio["interval"][1] for ratio in ratios],
        color=_INK,
        linewidth=2,
    )
    axes.plot([ratio["median"] for ratio in ratios], places, "o", color=_INK)
    axes.axvline(1, color=_SOFT, linewidth=1)
    for words, place in (marks or {}).items():
        axes.axvline(place, color=_SOFT, linestyle=":")
        axes.annotate(
            f" {words}", (place, -0.8), fontsize=8, color=_SOFT, va="center"
        )
    axes.set_yticks(places, [words for words, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -1.2)
    ends = [1.0, *(end for ratio in ratios for end in ratio["interval"])]
    if max(ends) > _WIDE * min(ends):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axis += " (logarithmic)"
    dress(axes, title, axis, "")
    return Picture(name, figure, f"{title}: {axis}, with its interval")
