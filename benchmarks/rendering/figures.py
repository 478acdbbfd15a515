"""Figures of the results page, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.rendering.tables import NAMES, Record, entries

COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "resnet18": "#0072b2",
        "mobilenet_v3_small": "#d55e00",
        "vit_b_16": "#009e73",
        "auto": "#d55e00",
        "auto-cache": "#cc79a7",
        "freeze-cache": "#882255",
        "tar-stream": "#555555",
        "mosaic": "#0072b2",
        "local-features": "#009e73",
    }
)
"""Distinguishable with the common forms of colour blindness (Okabe, Ito)."""
SHOWN_FREEZES = ("backbone", "inner")


def speedup(record: Record) -> Figure:
    """Ratio of ``auto`` to the best opponent, by link, with intervals."""
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.subplots(1, len(SHOWN_FREEZES), sharey=True)
    for ax, freeze in zip(axes, SHOWN_FREEZES, strict=True):
        for model in ("resnet18", "mobilenet_v3_small", "vit_b_16"):
            cells = [
                cell
                for cell in entries(record, "grid")
                if (cell["model"], cell["freeze"]) == (model, freeze)
                and cell["link"] is not None
            ]
            cells.sort(key=lambda cell: float(cell["link"]))
            medians = [cell["ratio"]["median"] for cell in cells]
            bounds = [cell["ratio"]["interval"] for cell in cells]
            pairs = list(zip(medians, bounds, strict=True))
            ax.errorbar(
                [cell["link"] for cell in cells],
                medians,
                [[m - b[0] for m, b in pairs], [b[1] - m for m, b in pairs]],
                color=COLOURS[model],
                label=model,
                marker="o",
                capsize=3,
            )
        ax.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        ax.set(xscale="log", yscale="log", title=f"frozen: {freeze}")
        ax.set_xlabel("link, as a multiple of what streaming can use")
        _plain_ticks(ax, (0.1, 0.25, 1, 10), (1, 2, 4, 8, 16))
    axes[0].set_ylabel("samples/s: auto over best loader")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def _plain_ticks(
    ax: Axes, horizontal: Sequence[float], vertical: Sequence[float]
) -> None:
    ax.set_xticks(horizontal, [f"{axis:g}" for axis in horizontal])
    ax.set_yticks(vertical, [f"{axis:g}" for axis in vertical])
    ax.minorticks_off()


def runs(record: Record) -> Figure:
    """Seconds from the start to the end of each epoch, by cell."""
    cells = sorted(entries(record, "runs"), key=lambda run: str(run["name"]))
    num_rows = -(-max(4, len(cells)) // 2)
    figure = Figure(figsize=(7.5, 2.6 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, 2, squeeze=False).flat
    for ax, cell in zip(axes, cells, strict=False):
        for name, colour in COLOURS.items():
            points = cell["cumulative"].get(name)
            if points is None:
                continue
            seconds = points["seconds"]
            ours = name.startswith(("auto", "freeze"))
            ax.plot(
                range(1, len(seconds) + 1),
                seconds,
                color=colour,
                label=NAMES[name],
                marker="o" if ours else "s",
                markersize=3,
                linestyle="-" if ours else "--",
            )
        ax.set_title(cell["name"], fontsize="medium")
        ax.set_ylim(0, None)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set(xlabel="epochs", ylabel="seconds")
    if cells:
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=2,
            frameon=False,
            fontsize=8,
        )
    return figure


FIGURES: Mapping[str, Callable[[Record], Figure]] = MappingProxyType(
    {"speedup": speedup, "runs": runs}
)


def write_figures(
    record: Record, folder: Path, **options: Any
) -> dict[str, Path]:
    """Writes all figures as SVG; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    # Fixed ids keep the files equal from run to run.
    style: Any = {
        "svg.hashsalt": "hapi",
        "svg.fonttype": "none",
        "font.size": 9,
    }
    with mpl.rc_context(style):
        for name, draw in FIGURES.items():
            paths[name] = folder / f"{name}.svg"
            draw(record).savefig(
                paths[name], metadata={"Date": None}, **options
            )
    return paths
