"""Where the time of a sample goes, by contender and link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.suite.report.curves import names_of, slug
from benchmarks.suite.report.document import Picture
from benchmarks.suite.report.figures import GridCell, link_name, median_of
from benchmarks.suite.report.looks import (
    CLIENT,
    LINK,
    STORAGE,
    dress,
    legend_below,
    new_figure,
)
from matplotlib.axes import Axes

_PANEL_INCHES = 0.27
_FRAME_INCHES = 0.9
_COLUMNS = 2


@dataclass(frozen=True)
class Cores:
    """Of each tier, how many."""

    storage: int
    client: int


@dataclass(frozen=True)
class Costs:
    """Of one sample of a contender, seconds; medians of the rounds.

    Attributes:
        client, storage: CPU seconds of the tiers' processes.
        link: bytes over the link's rate; 0 where there is no limit.
        elapsed: between two samples.
    """

    client: float
    storage: float
    link: float
    elapsed: float

    def busy(self, cores: Cores) -> dict[str, float]:
        """Part of the time in which each was busy, the busiest first."""
        found = {
            "the client's CPU": self.client / cores.client / self.elapsed,
            "the storage side's CPU": self.storage
            / cores.storage
            / self.elapsed,
        }
        if self.link:
            found["the link"] = self.link / self.elapsed
        return dict(sorted(found.items(), key=lambda each: -each[1]))


def cores_of(settings: Mapping[str, Any]) -> Cores:
    """By the settings of a run; one each unless they say more."""
    if not settings.get("cores"):
        return Cores(1, 1)
    storage, client = settings["cores"]
    return Cores(len(storage), len(client))


def costs_of(cell: GridCell, name: str) -> Costs:
    """Of a contender that was measured."""
    windows = cell["rounds"][name]
    limit = cell["link_bytes_per_second"]
    return Costs(
        client=median_of(windows, "client_seconds"),
        storage=median_of(windows, "storage_seconds"),
        link=median_of(windows, "down_bytes") / limit if limit else 0.0,
        elapsed=1 / median_of(windows, "samples_per_second"),
    )


def where(workload: str, cells: Sequence[GridCell], cores: Cores) -> Picture:
    """A panel for each link of a workload.

    Args:
        workload: network and freeze point.
        cells: complete ones of it.
        cores: of both tiers; CPU seconds are shown over their number.
    """
    names = names_of(cells)
    rows = -(-len(cells) // _COLUMNS)
    height = rows * (_PANEL_INCHES * len(names) + _FRAME_INCHES) + 0.4
    figure, panels = new_figure(height, rows, _COLUMNS)
    for axes, cell in zip(panels, cells, strict=False):
        _draw(axes, cell, [n for n in names if n in cell["rounds"]], cores)
    for axes in panels[len(cells) :]:
        axes.set_visible(False)
    legend_below(figure, panels, 4)
    return Picture(
        f"time-{slug(workload)}",
        figure,
        f"{workload}: CPU seconds of both tiers and seconds of the link for"
        " a sample, by contender and link",
    )


def _draw(
    axes: Axes, cell: GridCell, names: Sequence[str], cores: Cores
) -> None:
    costs = [costs_of(cell, name) for name in names]
    left = [0.0] * len(names)
    for words, colour, parts in (
        ("client: CPU", CLIENT, [x.client / cores.client for x in costs]),
        (
            "storage side: CPU",
            STORAGE,
            [x.storage / cores.storage for x in costs],
        ),
        ("link", LINK, [each.link for each in costs]),
    ):
        widths = [1e3 * part for part in parts]
        if any(widths):
            axes.barh(
                names, widths, left=left, color=colour, height=0.7, label=words
            )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.plot(
        [1e3 * each.elapsed for each in costs],
        names,
        "|",
        color="black",
        markersize=10,
        markeredgewidth=2,
        label="time between two samples",
    )
    axes.invert_yaxis()
    words = f"link: {link_name(cell)}"
    dress(axes, words, "ms per sample", "")
    axes.grid(visible=False, axis="y")
