"""Draws the epochs of a run. Importing it imports matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hapi_client.metrics.events import LOOP_STAGES
from hapi_client.reports.epoch_report import DECODE, FETCH, EpochReport
from hapi_client.reports.run_report import Curves, RunReport
from hapi_splitter.units import bytes_text

_Key = TypeVar("_Key")

_REST = "rest"
_S, _BYTES = "seconds", "bytes"
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
_WIDTH_INCHES, _ROW_INCHES = 12.5, 4.7
_MAX_LABELS = 12
_MIN_VISIBLE_RATIO = 0.002
"""Parts smaller than this ratio of the highest bar are not drawn."""
_MIN_BAR_PLACES = 6
_MAX_CURVES = 10
"""Runs of a sweep whose curves are drawn, as many as there are colours."""
_CURVE_NAMES = {"": "training", "val_": "validation"}
_Panel = Callable[[Axes], None]


def figure(run: RunReport) -> Figure:
    """Returns plots of what there is: results, throughput, traffic, times.

    Args:
        run: reports of one or more epochs.
    """
    panels = list(_panels(run))
    num_rows = -(-len(panels) // 2)
    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12)
    drawing = Figure(
        figsize=(_WIDTH_INCHES, _ROW_INCHES * num_rows), layout=layout
    )
    places = drawing.subplots(num_rows, 2, squeeze=False).ravel()
    for axes, panel in zip(places, panels, strict=False):
        panel(axes)
    for axes in places[len(panels) :]:
        axes.remove()
    return drawing


def _panels(run: RunReport) -> Iterator[_Panel]:
    """Yields a function that draws each plot that is not empty."""
    for quantity, unit in {"loss": "mean", "accuracy": "ratio"}.items():
        if any(
            quantity in e for epochs in run.curves.values() for e in epochs
        ):
            yield partial(
                _draw_curves, curves=run.curves, quantity=quantity, unit=unit
            )
    reports = run.reports
    yield partial(_draw_throughput, reports=reports)
    if any(report.samples for report in reports):
        yield partial(_draw_cuts, reports=reports)
    for amounts, styles, title, unit in (
        (_loop_seconds, _LOOP_STYLES, "Training loop: time by stage", _S),
        (_wire_bytes, _WIRE_STYLES, "Traffic", _BYTES),
        (
            lambda r: r.fetch_seconds,
            _FETCH_STYLES,
            "Fetching threads, summed",
            _S_SUMMED,
        ),
        (
            lambda r: r.storage_seconds,
            _STORAGE_STYLES,
            "Storage side, all requests summed",
            _S_SUMMED,
        ),
    ):
        if any(sum(amounts(report).values()) for report in reports):
            yield partial(
                _draw_amounts,
                reports=reports,
                amounts=amounts,
                styles=styles,
                title=title,
                unit=unit,
            )


def _draw_curves(axes: Axes, curves: Curves, quantity: str, unit: str) -> None:
    """Draws a result of each epoch: of a run, or of the runs of a sweep."""
    kinds = ["", "val_"]
    if len(curves) > 1 and any(
        f"val_{quantity}" in epoch
        for epochs in curves.values()
        for epoch in epochs
    ):
        kinds = ["val_"]
    for number, (name, epochs) in enumerate([*curves.items()][:_MAX_CURVES]):
        for kind in kinds:
            values = [epoch.get(f"{kind}{quantity}") for epoch in epochs]
            if all(value is None for value in values):
                continue
            axes.plot(
                range(len(values)),
                # Missing ones leave a gap.
                [math.nan if value is None else value for value in values],
                "--" if kind else "-",
                marker=".",
                color=f"C{number}",
                label=f"{name} {_CURVE_NAMES[kind]}".strip(),
            )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epoch")
    _finish_axes(axes, quantity.capitalize(), unit)


def _draw_amounts(
    axes: Axes,
    reports: Sequence[EpochReport],
    amounts: Callable[[EpochReport], Mapping[str, float]],
    styles: Mapping[str, tuple[str, str]],
    title: str,
    unit: str,
) -> None:
    _draw_stacks(axes, reports, amounts, styles)
    _format_axes(axes, reports, title, unit)
    if unit == _BYTES:
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda y, _: bytes_text(y))
        )


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
    step = -(-len(reports) // _MAX_LABELS)
    shown = range(0, len(reports), step)
    names = [_short(reports[place]) for place in shown]
    axes.set_xticks(shown, names, parse_math=False)
    axes.set_xlabel("epoch, or the split that was evaluated")
    # Bars of a few epochs stay narrow, in the middle.
    sides = max(0, _MIN_BAR_PLACES - len(reports)) / 2
    axes.set_xlim(-0.6 - sides, len(reports) - 0.4 + sides)
    _finish_axes(axes, title, unit)
    axes.set_ylim(bottom=0)


def _finish_axes(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_ylabel(unit)
    axes.grid(axis="y", color="#e4e4e4")
    axes.set_axisbelow(True)
    # Otherwise the highest bar may touch the frame.
    axes.use_sticky_edges = False
    axes.margins(y=0.08)
    handles, words = axes.get_legend_handles_labels()
    axes.legend(
        handles, words, loc="upper center", bbox_to_anchor=(0.5, -0.19),
        ncols=2, frameon=False, fontsize=9, handlelength=3,
    )  # fmt: skip


def _short(report: EpochReport) -> str:
    """Returns ``3`` or ``val``; with * if the epoch is unfinished."""
    name = report.split if report.epoch is None else str(report.epoch)
    return name if report.is_finished else f"{name} *"
