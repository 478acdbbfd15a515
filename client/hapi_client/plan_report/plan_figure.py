"""Draws a plan. Importing it imports matplotlib.

The upper plot shows the size of a sample at each cut, the lower one the time
of each stage for one sample if all samples go through one cut.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
)

from hapi_client.plan_report.plan_tables import ASSUMED, Report, shortened
from hapi_client.reports.html import svg_element
from hapi_splitter.planner.plan import BINDING
from hapi_splitter.planner.problem import (
    CLIENT_CPU,
    CLIENT_DEVICE,
    LINK,
    SERVER_CPU,
    SERVER_DEVICE,
    Option,
    Problem,
)
from hapi_splitter.planner.resource_use import (
    CLIENT_DECODING,
    CLIENT_HANDLING,
    CLIENT_LAYERS,
    SERVER_DECODING,
    SERVER_LAYERS,
    SERVING,
    TRAINING,
    stages,
)
from hapi_splitter.units import bytes_text, number_text, percent_text

_ORDER = (SERVER_CPU, SERVER_DEVICE, LINK, CLIENT_CPU, CLIENT_DEVICE)
"""Resources in the order in which a sample passes them."""
_STYLES = {
    SERVING: ("storage side: Swift reads and sends", "#f9dcc0"),
    SERVER_DECODING: ("storage side: decode, encode", "#f2b36b"),
    SERVER_LAYERS: ("storage side: first layers of the model", "#c8601d"),
    LINK: ("network", "#4878b8"),
    CLIENT_DECODING: ("training side: decode or unpack", "#a6cf8c"),
    CLIENT_HANDLING: ("training side: requests, copies", "#d9e8cf"),
    CLIENT_LAYERS: ("training side: remaining layers", "#3f7f3a"),
    TRAINING: ("training side: the training step", "#1d4420"),
    # If no more is known than the resource.
    SERVER_CPU: ("storage side: cores", "#f2b36b"),
    SERVER_DEVICE: ("storage side: device", "#c8601d"),
    CLIENT_CPU: ("training side: cores", "#a6cf8c"),
    CLIENT_DEVICE: ("training side: device", "#3f7f3a"),
}
"""Label and colour of each cost component or resource."""
_FLOAT32 = "#8fa9c9"
_SMALLEST = "#1f4e8c"
_CHOSEN = "#c2185b"
_IMAGE = "#555555"
_GRID = "#e4e4e4"
_WIDTH_INCHES = 11.0
_UPPER_INCHES = 4.0
_BAR_INCHES = 0.36
_FRAME_INCHES = 3.2
_LABEL_WIDTH = 46
_MAX_BARS = 24
_MAX_BAR_RATIO = 3.0
"""Bars are truncated at this multiple of the median bar."""


def png_image(report: Report) -> bytes:
    """Returns the figure as PNG with 120 dots per inch."""
    buffer = io.BytesIO()
    _figure(report).savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def svg_image(report: Report) -> str:
    """Returns the figure as ``<svg>``; equal plans give equal text."""
    return svg_element(_figure(report))


@dataclass(frozen=True)
class _Bar:
    """One row of the lower plot.

    Attributes:
        stages: seconds by resource and cost component.
    """

    label: str
    stages: dict[str, dict[str, float]]
    share: float = 0.0

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by resource."""
        return {name: sum(s.values()) for name, s in self.stages.items()}

    @property
    def length(self) -> float:
        return sum(self.totals.values())


def _figure(report: Report) -> Figure:
    bars = _bars(report)
    lower = _BAR_INCHES * len(bars) + 0.4
    height = _UPPER_INCHES + lower + _FRAME_INCHES
    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12)
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout=layout)
    upper_axes, lower_axes = figure.subplots(
        2, 1, gridspec_kw={"height_ratios": [_UPPER_INCHES, lower]}
    )
    figure.suptitle(_title(report), fontsize=13, fontweight="bold")
    _draw_sizes(upper_axes, report)
    _draw_stages(lower_axes, report, bars)
    drawn = {
        component
        for bar in bars
        for components in bar.stages.values()
        for component, seconds in components.items()
        if seconds
    }
    figure.legend(
        handles=[
            Patch(color=colour, label=words)
            for component, (words, colour) in _STYLES.items()
            if component in drawn
        ],
        title=_assumed(report),
        title_fontsize=8,
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    return figure


def _assumed(report: Report) -> str | None:
    """Returns the assumptions as lines; None if there are none."""
    notes = [note for note in report.notes if note.startswith(ASSUMED)]
    lines = [line for note in notes for line in textwrap.wrap(note, 140)]
    return "\n".join(lines) or None


def _title(report: Report) -> str:
    plan = report.plan
    first = f"Where to cut {shortened(report.model, 60)}: {plan.label}"
    second = f"expected: {number_text(plan.samples_per_second)} samples/s"
    streaming = report.plans.get("stream")
    if plan.pushes and streaming and streaming.samples_per_second:
        ratio = plan.samples_per_second / streaming.samples_per_second
        second += f", {ratio:.3g} times sending the samples"
    return f"{first}\n{second}"


def _draw_sizes(axes: Axes, report: Report) -> None:
    axes.plot(
        [cut.index for cut in report.cuts],
        [cut.float32_bytes for cut in report.cuts],
        drawstyle="steps-mid",
        color=_FLOAT32,
        label="as computed (float32)",
    )
    smallest = {
        cut.index: min(option.use.get(LINK, 0.0) for option in options)
        for cut in report.cuts
        if (options := report.options(cut.index))
    }
    label = "smallest allowed encoding, measured"
    cuts, sizes = list(smallest), list(smallest.values())
    axes.plot(cuts, sizes, "o", color=_SMALLEST, label=label)
    axes.axhline(
        report.raw_bytes,
        color=_IMAGE,
        linestyle="--",
        linewidth=1.2,
        label=f"the stored sample ({bytes_text(report.raw_bytes)})",
    )
    mix = report.plan.mix
    cuts = [option.cut for option, _ in mix]
    sizes = [option.use.get(LINK, 0.0) for option, _ in mix]
    label = "chosen, with share of the samples"
    axes.plot(cuts, sizes, "o", color=_CHOSEN, markersize=11, label=label)
    for cut, size, (_, share) in zip(cuts, sizes, mix, strict=True):
        right = cut <= 0.8 * len(report.cuts)
        axes.annotate(
            f"{percent_text(share)} {f'cut {cut}' if cut else 'samples'}",
            (cut, size),
            xytext=(12 if right else -12, -4 if cut else -16),
            textcoords="offset points",
            ha="left" if right else "right",
            color=_CHOSEN,
            fontweight="bold",
            bbox={"color": "white", "alpha": 0.8, "pad": 1},
        )
    _format_sizes(axes, len(report.cuts))


def _format_sizes(axes: Axes, num_cuts: int) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: bytes_text(y)))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=24, integer=True))
    axes.set_xlim(-0.7, num_cuts + 0.7)
    axes.margins(y=0.15)
    axes.grid(axis="y", color=_GRID)
    axes.set_title("Size of one sample at each cut", loc="left")
    axes.set_xlabel(
        "cut: layers before it run on the storage side, layers after it where "
        "you train (0: the stored sample)"
    )
    axes.set_ylabel("bytes per sample (log scale)")
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.4, -0.15),
        ncols=2,
        frameon=False,
        fontsize=9,
    )


def _bars(report: Report) -> list[_Bar]:
    bars = []
    if len(report.plan.mix) > 1:
        mixed = _mixed_stages(report.problem, report.plan.mix)
        bars.append(_Bar("the chosen mix, on average", mixed))
    names = {cut.index: cut.name for cut in report.cuts}
    for cut in _cuts_to_show(report):
        option = report.shown(cut)
        if option is None:
            continue
        label = "stream: samples"
        if cut:
            encoding = f" · {option.encoding}"
            width = _LABEL_WIDTH - len(encoding) - len(f"cut {cut}: ")
            label = f"cut {cut}: {shortened(names[cut], width)}{encoding}"
        alone = _mixed_stages(report.problem, [(option, 1.0)])
        bars.append(_Bar(label, alone, report.share(cut)))
    return bars


def _cuts_to_show(report: Report) -> list[int]:
    """Returns streaming, the plan's cuts, and the fastest of the others."""
    used = {0, *(option.cut for option, _ in report.plan.mix)}
    problem = report.problem
    others = sorted(
        {option.cut for option in problem.options} - used,
        key=lambda cut: -problem.samples_per_second(report.options(cut)[0]),
    )
    return sorted([*used, *others[: _MAX_BARS - len(used)]])


def _mixed_stages(
    problem: Problem, mix: Sequence[tuple[Option, float]]
) -> dict[str, dict[str, float]]:
    """Returns mean seconds of a sample by resource and cost component."""
    names = {resource.name for resource in problem.resources}
    mixed: dict[str, dict[str, float]] = {
        name: {} for name in _ORDER if name in names
    }
    for option, share in mix:
        for name, components in stages(problem, option).items():
            sums = mixed.setdefault(name, {})
            for component, seconds in components.items():
                sums[component] = sums.get(component, 0.0) + share * seconds
    return mixed


def _draw_stages(axes: Axes, report: Report, bars: Sequence[_Bar]) -> None:
    lengths = [bar.length for bar in bars]
    limit = _limit(lengths)
    for row, bar in enumerate(bars):
        _draw_bar(axes, row, bar, limit)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    for tick, bar in zip(axes.get_yticklabels(), bars, strict=True):
        if bar.share:
            tick.set_color(_CHOSEN)
            tick.set_fontweight("bold")
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1000 * limit * (1.2 if max(lengths) > limit else 1.1))
    axes.grid(axis="x", color=_GRID)
    axes.set_axisbelow(True)
    title = "Time of each stage for one sample, if all use this cut"
    hidden = len({o.cut for o in report.problem.options}) - _MAX_BARS
    if hidden > 0:
        title += f"\n(without the {hidden} slowest cuts)"
    axes.set_title(title, loc="left")
    axes.set_xlabel(
        "milliseconds per sample\nProcessors and network work concurrently: "
        "the slowest one (outlined) limits the throughput."
    )


def _draw_bar(axes: Axes, row: int, bar: _Bar, limit: float) -> None:
    """Draws a bar up to ``limit`` seconds, with the slowest outlined."""
    left = 0.0
    totals = bar.totals
    longest = max(totals.values())
    for name, components in bar.stages.items():
        began = left
        for component, seconds in components.items():
            width = min(seconds, max(0.0, limit - left))
            colour = _STYLES[component][1]
            _draw_part(axes, row, left, width, color=colour)
            left += width
        if totals[name] >= BINDING * longest:
            outline: dict[str, Any] = {"fill": False, "edgecolor": "black"}
            outline |= {"linewidth": 1.6, "zorder": 3}
            _draw_part(axes, row, began, left - began, **outline)
    note = percent_text(bar.share) if bar.share else ""
    if bar.length > limit:
        note = f"→ {number_text(1000 * bar.length)} ms  {note}"
    axes.annotate(
        note,
        (1000 * left, row),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        color=_CHOSEN if bar.share else _IMAGE,
        fontweight="bold" if bar.share else "normal",
        fontsize=9,
    )


def _draw_part(
    axes: Axes, row: int, left: float, width: float, **style: Any
) -> None:
    """Draws a part of a bar; ``left`` and ``width`` are in seconds."""
    if width > 0:
        style = {"edgecolor": "white", "linewidth": 0.4, **style}
        axes.barh(row, 1000 * width, left=1000 * left, height=0.62, **style)


def _limit(lengths: Sequence[float]) -> float:
    """Returns where bars end, so that a slow cut does not hide the others."""
    finite = sorted(filter(math.isfinite, lengths)) or [1.0]
    middle = finite[len(finite) // 2]
    return min(finite[-1], _MAX_BAR_RATIO * max(middle, finite[0]))
