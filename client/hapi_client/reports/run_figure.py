"""The picture of a run, pass by pass. Import this only where it is wanted:
it needs Matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from hapi_client.reports.epoch_report import (
    DECODE,
    FETCH,
    LOOP_STAGES,
    EpochReport,
)
from hapi_splitter.units import bytes_text

_Key = TypeVar("_Key")

_REST = "rest"
_S = "seconds"
_S_SUMMED = "seconds, summed over requests"
_LOOP_LOOKS = {
    "waiting": ("waiting for data", "#c2185b"),
    "layers": ("layers behind the cut", "#3f7f3a"),
    "training": ("the loop's own step", "#1d4420"),
    "planning": ("planning", "#8c6bb1"),
    _REST: ("making batches, the rest", "#cccccc"),
}
_FETCH_LOOKS = {
    FETCH: ("requests: asking, waiting, receiving", "#4878b8"),
    DECODE: ("decoding images, unpacking features", "#a6cf8c"),
}
_STORAGE_LOOKS = {
    "queue": ("waiting for the device", "#bbbbbb"),
    "read": ("reading from Swift", "#f9dcc0"),
    "decode": ("decoding images", "#f2b36b"),
    "forward": ("first layers of the model", "#c8601d"),
    "encode": ("encoding features", "#7f3b08"),
    "send_blocked": ("blocked: the link takes no more", "#4878b8"),
}
_WIRE_LOOKS = {
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
_MEASURED, _PREDICTED = "#3f7f3a", "#c2185b"
_WIDTH_INCHES, _HEIGHT_INCHES = 12.5, 14.0
_MAX_LABELS = 12
_MIN_PART = 0.002
"""Of the highest bar: less cannot be seen."""
_MIN_PLACES = 6


def figure(reports: Sequence[EpochReport]) -> Figure:
    """Six pictures side by side.

    Args:
        reports: of one pass at least.
    """
    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12)
    made = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout=layout)
    axes = made.subplots(3, 2)
    _draw_pace(axes[0, 0], reports)
    _draw_cuts(axes[0, 1], reports)
    _draw_stacks(axes[1, 0], reports, _loop_seconds, _LOOP_LOOKS)
    _dress(axes[1, 0], reports, "Training loop: where its time went", _S)
    _draw_stacks(axes[1, 1], reports, _wire_bytes, _WIRE_LOOKS)
    _dress(axes[1, 1], reports, "Over the wire", "bytes")
    axes[1, 1].yaxis.set_major_formatter(
        FuncFormatter(lambda y, _: bytes_text(y))
    )
    _draw_stacks(axes[2, 0], reports, lambda r: r.fetch_seconds, _FETCH_LOOKS)
    _dress(
        axes[2, 0], reports, "Fetching threads here, all together", _S_SUMMED
    )
    _draw_stacks(
        axes[2, 1], reports, lambda r: r.storage_seconds, _STORAGE_LOOKS
    )
    _dress(
        axes[2, 1], reports, "Storage tier, all requests together", _S_SUMMED
    )
    return made


def _loop_seconds(report: EpochReport) -> Mapping[str, float]:
    known = {name: report.loop_seconds.get(name, 0.0) for name in LOOP_STAGES}
    return known | {_REST: max(0.0, report.seconds - sum(known.values()))}


def _wire_bytes(report: EpochReport) -> Mapping[str, float]:
    return {
        "received_bytes": report.received_bytes,
        "sent_bytes": report.sent_bytes,
    }


def _draw_pace(axes: Axes, reports: Sequence[EpochReport]) -> None:
    places = range(len(reports))
    axes.bar(
        places,
        [each.samples_per_second for each in reports],
        color=_MEASURED,
        label="measured",
    )
    predicted = [
        (place, each.predicted_samples_per_second)
        for place, each in zip(places, reports, strict=True)
        if each.predicted_samples_per_second
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
    _dress(axes, reports, "How fast", "samples per second")


def _draw_cuts(axes: Axes, reports: Sequence[EpochReport]) -> None:
    cuts = sorted({cut for each in reports for cut in each.samples_by_cut})
    pushed = [cut for cut in cuts if cut]
    looks = {0: ("images (streamed)", _STREAM_COLOUR)} | {
        cut: (f"cut {cut}", _CUT_COLOURS[number % len(_CUT_COLOURS)])
        for number, cut in enumerate(pushed)
    }
    _draw_stacks(axes, reports, lambda r: r.samples_by_cut, looks)
    kept = [each.cached_samples for each in reports]
    if any(kept):
        axes.bar(
            range(len(reports)),
            kept,
            bottom=[
                sum(each.samples_by_cut.values()) - each.cached_samples
                for each in reports
            ],
            color="none",
            edgecolor="#444444",
            linewidth=0,
            hatch="///",
            label="kept by the store",
        )
    _dress(axes, reports, "How the samples came", "samples")


def _draw_stacks(
    axes: Axes,
    reports: Sequence[EpochReport],
    amounts: Callable[[EpochReport], Mapping[_Key, float]],
    looks: Mapping[_Key, tuple[str, str]],
) -> None:
    """A bar for each pass, of what has words and a colour and can be seen."""
    places = range(len(reports))
    below = [0.0] * len(reports)
    largest = max(sum(amounts(each).values()) for each in reports)
    least = _MIN_PART * largest
    for key, (words, colour) in looks.items():
        heights = [amounts(each).get(key, 0.0) for each in reports]
        if max(heights) <= least:
            continue
        axes.bar(places, heights, bottom=below, color=colour, label=words)
        below = [a + b for a, b in zip(below, heights, strict=True)]


def _dress(
    axes: Axes, reports: Sequence[EpochReport], title: str, unit: str
) -> None:
    axes.set_title(title, loc="left")
    axes.set_ylabel(unit)
    step = -(-len(reports) // _MAX_LABELS)
    shown = range(0, len(reports), step)
    names = [_short(reports[place]) for place in shown]
    axes.set_xticks(shown, names, parse_math=False)
    axes.set_xlabel("epoch, or the split gone through in its order")
    # Few passes are not drawn as walls.
    axes.set_xlim(-0.6, max(len(reports), _MIN_PLACES) - 0.4)
    axes.grid(axis="y", color="#e4e4e4")
    axes.set_axisbelow(True)
    # Else the highest of some bars would touch the frame.
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
    """``3``, or ``val``; with * where it was not finished."""
    name = report.split if report.epoch is None else str(report.epoch)
    return name if report.is_finished else f"{name} *"
