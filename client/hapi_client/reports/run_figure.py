"""Draws the epochs of a run. Importing it imports matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from hapi_client.metrics.events import LOOP_STAGES
from hapi_client.reports.epoch_report import DECODE, FETCH, EpochReport
from hapi_splitter.units import bytes_text

_Key = TypeVar("_Key")

_REST = "rest"
_S = "seconds"
_S_SUMMED = "seconds, summed over requests"
_LOOP_STYLES = {
    "waiting": ("waiting for data", "#c2185b"),
    "layers": ("layers after the cut", "#3f7f3a"),
    "training": ("the loop's own step", "#1d4420"),
    "planning": ("planning", "#8c6bb1"),
    _REST: ("assembling batches, rest", "#cccccc"),
}
_FETCH_STYLES = {
    FETCH: ("requests: sending, waiting, receiving", "#4878b8"),
    DECODE: ("decoding images, unpacking features", "#a6cf8c"),
}
_STORAGE_STYLES = {
    "queue": ("waiting for the device", "#bbbbbb"),
    "read": ("reading from Swift", "#f9dcc0"),
    "decode": ("decoding images", "#f2b36b"),
    "forward": ("first layers of the model", "#c8601d"),
    "encode": ("encoding features", "#7f3b08"),
    "send_blocked": ("blocked: the link accepts no more", "#4878b8"),
}
_WIRE_STYLES = {
    "received_bytes": ("received", "#4878b8"),
    "sent_bytes": ("sent", "#b8cde8"),
}
_CUT_COLOURS = (
    "#c8601d",
    "#f2b36b",
    "#7f3b08",
    "#e08214",
    "#fdd9a0",
    "#a0522d",
)
_STREAM_COLOUR = "#4878b8"
_ON_HOST, _HOST_COLOUR = -1, "#bbbbbb"
_MEASURED, _PREDICTED = "#3f7f3a", "#c2185b"
_WIDTH_INCHES, _HEIGHT_INCHES = 12.5, 14.0
_MAX_LABELS = 12
_MIN_VISIBLE_RATIO = 0.002
"""Parts smaller than this ratio of the highest bar are not drawn."""
_MIN_BAR_PLACES = 6


def figure(reports: Sequence[EpochReport]) -> Figure:
    """Returns six plots: throughput, cuts, traffic and times.

    Args:
        reports: reports of one or more epochs.
    """
    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12)
    drawing = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout=layout)
    axes = drawing.subplots(3, 2)
    _draw_throughput(axes[0, 0], reports)
    _draw_cuts(axes[0, 1], reports)
    _draw_stacks(axes[1, 0], reports, _loop_seconds, _LOOP_STYLES)
    _format_axes(axes[1, 0], reports, "Training loop: time by stage", _S)
    _draw_stacks(axes[1, 1], reports, _wire_bytes, _WIRE_STYLES)
    _format_axes(axes[1, 1], reports, "Traffic", "bytes")
    axes[1, 1].yaxis.set_major_formatter(
        FuncFormatter(lambda y, _: bytes_text(y))
    )
    _draw_stacks(axes[2, 0], reports, lambda r: r.fetch_seconds, _FETCH_STYLES)
    _format_axes(
        axes[2, 0],
        reports,
        "Fetching threads, summed",
        _S_SUMMED,
    )
    _draw_stacks(
        axes[2, 1], reports, lambda r: r.storage_seconds, _STORAGE_STYLES
    )
    _format_axes(
        axes[2, 1], reports, "Storage side, all requests summed", _S_SUMMED
    )
    return drawing


def _loop_seconds(report: EpochReport) -> Mapping[str, float]:
    known = {name: report.loop_seconds.get(name, 0.0) for name in LOOP_STAGES}
    return known | {_REST: max(0.0, report.seconds - sum(known.values()))}


def _wire_bytes(report: EpochReport) -> Mapping[str, float]:
    return {
        "received_bytes": report.received_bytes,
        "sent_bytes": report.sent_bytes,
    }


def _draw_throughput(axes: Axes, reports: Sequence[EpochReport]) -> None:
    places = range(len(reports))
    axes.bar(
        places,
        [report.samples_per_second for report in reports],
        color=_MEASURED,
        label="measured",
    )
    predicted = [
        (place, report.predicted_samples_per_second)
        for place, report in zip(places, reports, strict=True)
        if report.predicted_samples_per_second
    ]
    if predicted:
        axes.plot(
            [place for place, _ in predicted],
            [rate for _, rate in predicted],
            "D",
            color=_PREDICTED,
            markersize=7,
            label="predicted by the plan",
        )
    _format_axes(axes, reports, "Throughput", "samples per second")


def _draw_cuts(axes: Axes, reports: Sequence[EpochReport]) -> None:
    cuts = sorted({cut for report in reports for cut in report.samples_by_cut})
    pushed = [cut for cut in cuts if cut]
    styles = {0: ("raw reads", _STREAM_COLOUR)} | {
        cut: (f"cut {cut}", _CUT_COLOURS[number % len(_CUT_COLOURS)])
        for number, cut in enumerate(pushed)
    }
    if any(report.local_hits for report in reports):
        styles[_ON_HOST] = "cached on this host", _HOST_COLOUR
    _draw_stacks(
        axes,
        reports,
        lambda r: {**r.samples_by_cut, _ON_HOST: r.local_hits},
        styles,
    )
    cached = [report.cached_samples for report in reports]
    if any(cached):
        axes.bar(
            range(len(reports)),
            cached,
            bottom=[
                sum(report.samples_by_cut.values()) - report.cached_samples
                for report in reports
            ],
            color="none",
            edgecolor="#444444",
            linewidth=0,
            hatch="///",
            label="cached in Swift",
        )
    _format_axes(axes, reports, "Samples by cut", "samples")


def _draw_stacks(
    axes: Axes,
    reports: Sequence[EpochReport],
    amounts: Callable[[EpochReport], Mapping[_Key, float]],
    styles: Mapping[_Key, tuple[str, str]],
) -> None:
    """Draws a stacked bar for each epoch, without parts too small to see."""
    places = range(len(reports))
    below = [0.0] * len(reports)
    largest = max(sum(amounts(report).values()) for report in reports)
    smallest = _MIN_VISIBLE_RATIO * largest
    for key, (label, colour) in styles.items():
        heights = [amounts(report).get(key, 0.0) for report in reports]
        if max(heights) <= smallest:
            continue
        axes.bar(places, heights, bottom=below, color=colour, label=label)
        below = [a + b for a, b in zip(below, heights, strict=True)]


def _format_axes(
    axes: Axes, reports: Sequence[EpochReport], title: str, unit: str
) -> None:
    axes.set_title(title, loc="left")
    axes.set_ylabel(unit)
    step = -(-len(reports) // _MAX_LABELS)
    shown = range(0, len(reports), step)
    names = [_short(reports[place]) for place in shown]
    axes.set_xticks(shown, names, parse_math=False)
    axes.set_xlabel("epoch, or the split that was evaluated")
    # Bars of a few epochs stay narrow.
    axes.set_xlim(-0.6, max(len(reports), _MIN_BAR_PLACES) - 0.4)
    axes.grid(axis="y", color="#e4e4e4")
    axes.set_axisbelow(True)
    # Otherwise the highest bar may touch the frame.
    axes.use_sticky_edges = False
    axes.margins(y=0.08)
    axes.set_ylim(bottom=0)
    handles, words = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles, words, loc="upper center", bbox_to_anchor=(0.5, -0.19),
            ncols=2, frameon=False, fontsize=9,
        )  # fmt: skip
    else:
        axes.set_ylim(0, 1)
        axes.text(
            0.5, 0.5, "nothing", transform=axes.transAxes, ha="center",
            color="#777777",
        )  # fmt: skip


def _short(report: EpochReport) -> str:
    """Returns ``3`` or ``val``; with * if the epoch is unfinished."""
    name = report.split if report.epoch is None else str(report.epoch)
    return name if report.is_finished else f"{name} *"
