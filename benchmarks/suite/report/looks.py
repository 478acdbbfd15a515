"""One colour, line and marker for each contender, in all pictures.

The colours are those of Okabe and Ito, which colour-blind people can tell
apart; markers do it in black and white.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from hapi_splitter.units import number_text

WIDTH_INCHES = 9.0


@dataclass(frozen=True)
class Look:
    """Of a contender.

    Attributes:
        colour: of line, marker and bar.
        marker: of Matplotlib.
        dash: line style of Matplotlib.
    """

    colour: str
    marker: str
    dash: str = "-"


LOOKS: Mapping[str, Look] = {
    "auto": Look("#d55e00", "o"),
    "auto-1": Look("#ff9d5c", "."),
    "auto-cache": Look("#7a2a00", "P"),
    "stream": Look("#e69f00", "v"),
    "freeze": Look("#8c6d1f", "^"),
    "freeze-float16": Look("#a58a3c", "2", ":"),
    "freeze-cache": Look("#b8a200", "P"),
    "tar-stream": Look("#0072b2", "s"),
    "webdataset": Look("#56b4e9", "D"),
    "s3-tars": Look("#009e73", "X"),
    "s3-images": Look("#00523c", "p"),
    "mosaic": Look("#cc79a7", "h"),
    "local-features": Look("#444444", "*"),
    "auto-resized": Look("#f2a679", "o", "--"),
    "tar-stream-resized": Look("#7fb2d6", "s", "--"),
}
_MORE = (
    Look("#6a3d9a", "<"),
    Look("#b2a41a", ">"),
    Look("#7f7f7f", "d"),
    Look("#000000", "8"),
)
"""Of those that have none of their own, in the order of their names."""
GRID = "#e4e4e4"
CLIENT, STORAGE, LINK = "#009e73", "#e69f00", "#56b4e9"
"""Of the two tiers and what is between them."""


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """In the order of legends."""
    found = set(names)
    others = sorted(found - set(LOOKS))
    return {
        **{name: look for name, look in LOOKS.items() if name in found},
        **{
            name: _MORE[number % len(_MORE)]
            for number, name in enumerate(others)
        },
    }


def in_order(names: Iterable[str]) -> list[str]:
    """Ours, opponents, and what nobody knows."""
    return list(looks_of(names))


def new_figure(
    height_inches: float,
    rows: int = 1,
    columns: int = 1,
    *,
    share_x: bool = False,
) -> tuple[Figure, Sequence[Axes]]:
    """A figure as wide as all, and its axes row by row."""
    figure = Figure(
        figsize=(WIDTH_INCHES, height_inches),
        layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08),
    )
    axes = figure.subplots(rows, columns, squeeze=False, sharex=share_x)
    return figure, list(axes.flat)


def dress(axes: Axes, title: str, x: str, y: str) -> None:
    """Titles, a light grid, no frame at the top and the right."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(
    figure: Figure, axes: Sequence[Axes], columns: int = 5
) -> None:
    """One for all axes, each name once."""
    found = {}
    for each in axes:
        for handle, name in zip(
            *each.get_legend_handles_labels(), strict=True
        ):
            found.setdefault(name, handle)
    if found:
        figure.legend(
            list(found.values()),
            list(found),
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=9,
        )


def log_links(axes: Axes, links: Mapping[float, str]) -> None:
    """A logarithmic x axis with a tick for each link and its words."""
    axes.set_xscale("log")
    places = sorted(links)
    axes.set_xticks(places, [links[place] for place in places])
    axes.xaxis.set_minor_locator(NullLocator())


def log_numbers(axes: Axes) -> None:
    """A logarithmic y axis without powers of ten."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: number_text(y)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.margins(y=0.12)
