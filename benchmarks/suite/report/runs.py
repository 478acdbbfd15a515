"""Section ``runs``: whole runs from cold, one-off costs included."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.suite.report.curves import slug
from benchmarks.suite.report.document import (
    Listing,
    Part,
    Picture,
    Table,
    Text,
)
from benchmarks.suite.report.figures import NONE, fixed, link_text
from benchmarks.suite.report.looks import (
    dress,
    in_order,
    legend_below,
    log_numbers,
    looks_of,
    new_figure,
)
from benchmarks.suite.report.settings import absent_blocks, settings_parts
from benchmarks.suite.run_sums import AUTO, KEPT_LOCALLY, quotients, total
from matplotlib.axes import Axes

Entry = Mapping[str, Any]

_TEXT = """\
Each contender trains {epochs} epochs from cold: a new process, a new worker,
nothing cached, its package not in the store. Before is what comes before
the first epoch (the model, tracing, the index). ``auto-1`` is told of one
epoch, and runs one; ``auto-cache`` and ``freeze-cache`` keep features in the
store; ``local-features`` keeps them in the client's memory. One-offs are what
somebody has to make once of tars that lie in Swift, over the same link."""
_HEIGHT_INCHES = 4.3


def runs_part(section: Mapping[str, Any]) -> Part:
    """A part for each cell."""
    entries = [each for each in section.get("entries", ()) if each["complete"]]
    return Part(
        "Whole runs, over epochs",
        [
            Text(" ".join(_TEXT.format(epochs=section["epochs"]).split())),
            *absent_blocks(section),
        ],
        [
            *map(_entry_part, entries),
            *settings_parts(section, "Settings in whole runs"),
        ],
    )


def _entry_part(entry: Entry) -> Part:
    return Part(
        f"Runs of ``{entry['name']}``",
        [
            _picture(entry),
            _table(entry),
            Listing(
                [
                    f"{len(entry['runs'][AUTO])} rounds, of which median and"
                    " range are told",
                    *_one_offs(entry),
                    *_speedups(entry),
                    *_totals(entry),
                ]
            ),
        ],
    )


def _picture(entry: Entry) -> Picture:
    figure, (left, right) = new_figure(_HEIGHT_INCHES, columns=2)
    for name, look in looks_of(entry["runs"]).items():
        style = {
            "color": look.colour,
            "marker": look.marker,
            "markersize": 5,
            "linestyle": look.dash,
            "linewidth": 2.2 if name == "auto" else 1.2,
            "label": name,
        }
        seconds = epochs_of(entry["runs"][name])
        sums = entry["cumulative"][name]["with_one_off"]
        left.plot(range(1, len(seconds) + 1), seconds, **style)
        right.plot(range(1, len(sums) + 1), sums, **style)
    dress(left, "Each epoch", "epoch", "seconds (logarithmic)")
    dress(
        right, "Since the start, one-offs included", "after epoch", "seconds"
    )
    log_numbers(left)
    for axes in (left, right):
        _whole_epochs(axes, entry)
    right.set_ylim(bottom=0)
    legend_below(figure, [left])
    return Picture(
        f"runs-{slug(entry['name'])}".replace(".", "-"),
        figure,
        f"{entry['name']}: seconds of each epoch, and since the start with"
        " one-off costs, by contender",
    )


def _whole_epochs(axes: Axes, entry: Entry) -> None:
    longest = max(len(epochs_of(runs)) for runs in entry["runs"].values())
    axes.set_xticks(range(1, longest + 1))


def epochs_of(runs: Sequence[Entry]) -> list[float]:
    """Seconds of each epoch, medians over the rounds."""
    return [
        statistics.median(each)
        for each in zip(
            *([e["seconds"] for e in run["epochs"]] for run in runs),
            strict=True,
        )
    ]


def _table(entry: Entry) -> Table:
    return Table(
        (
            "Contender",
            "Before, s",
            "Epoch 1, s",
            "Later epochs, s",
            "All, s",
            "All with one-off, s",
            "Received in epoch 1, MB",
            "in the last, MB",
        ),
        [_row(entry, name) for name in in_order(entry["runs"])],
    )


def _row(entry: Entry, name: str) -> Sequence[str]:
    runs, sums = entry["runs"][name], entry["cumulative"][name]
    first, last = (
        statistics.median(run["epochs"][number]["down_bytes"] for run in runs)
        for number in (0, -1)
    )
    return (
        f"``{name}``",
        fixed(statistics.median(run["before"]["seconds"] for run in runs)),
        spread_text(entry["first_seconds"][name]),
        spread_text(entry["later_seconds"].get(name)),
        fixed(sums["seconds"][-1], 1),
        fixed(sums["with_one_off"][-1], 1),
        fixed(first / 1e6),
        fixed(last / 1e6) if name in entry["later_seconds"] else NONE,
    )


def spread_text(found: Mapping[str, float] | None, digits: int = 2) -> str:
    """``12.1 (11.9 … 12.6)``: median and range."""
    if found is None:
        return NONE
    return (
        f"{found['median']:.{digits}f} ({found['least']:.{digits}f} …"
        f" {found['most']:.{digits}f})"
    )


def _one_offs(entry: Entry) -> Iterator[str]:
    link = link_text(entry["rounds"][0]["link_bytes_per_second"])
    for name, found in entry["one_offs"].items():
        yield (
            f"One-off ``{name}`` over this link ({link} MB/s):"
            f" {found['seconds']:.1f} s, {found['down_bytes'] / 1e6:.1f} MB"
            f" received, {found['up_bytes'] / 1e6:.1f} MB sent"
        )


def _speedups(entry: Entry) -> Iterator[str]:
    for ours, found in entry["speedup"].items():
        for other, spread in found.items():
            yield (
                f"Epoch 1 of ``{other}`` over later epochs of ``{ours}``:"
                f" {spread_text(spread)}"
            )
    for ours, found in entry["beside"].items():
        for other, spread in found.items():
            yield (
                f"Later epochs of ``{other}`` over those of ``{ours}``:"
                f" {spread_text(spread)}"
            )


def _over_kept(entry: Entry, epochs: str) -> str:
    if KEPT_LOCALLY not in entry["runs"]:
        return ""
    ours, theirs = (
        total(entry["runs"], name, int(epochs))
        for name in (AUTO, KEPT_LOCALLY)
    )
    found = spread_text(quotients(ours, theirs), 3)
    return f"; over ``{KEPT_LOCALLY}``: {found}"


def _totals(entry: Entry) -> Iterator[str]:
    for epochs, spread in entry["auto_over_stream"].items():
        best = entry["auto_over_best"][epochs]
        yield (
            f"Seconds of a whole run of {epochs}"
            f" epoch{'s' * (epochs != '1')}, ``auto`` over our own ``stream``:"
            f" {spread_text(spread, 3)}; over ``{best['best']}``, the fastest"
            " opponent that keeps no features and reads the photographs as"
            f" they are: {spread_text(best, 3)}{_over_kept(entry, epochs)}"
        )
    for name in ("auto-1", "auto"):
        plans = [run["plan"] or "streamed" for run in entry["runs"][name]]
        yield f"Plans of ``{name}`` in the end, by round: {'; '.join(plans)}"
