"""Section ``tenants``: accounts that train at the same time."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.regret import AUTO
from benchmarks.suite.report.document import (
    Block,
    Part,
    Picture,
    Table,
    Text,
)
from benchmarks.suite.report.figures import (
    NONE,
    fixed,
    link_text,
    rate_text,
    ratio_text,
)
from benchmarks.suite.report.looks import (
    dress,
    in_order,
    legend_below,
    looks_of,
    new_figure,
)
from benchmarks.suite.report.settings import settings_parts
from benchmarks.suite.verdict import rates_of, ratio
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

Entry = Mapping[str, Any]

_TEXT = """\
Tenants with an account and processes of their own train at the same time; all
share one worker, one link and the client tier's core. Rates are of all tenants
together, medians of the rounds, in the same window. Jain's index is 1 where
all get the same; in a mix of workloads, where all get the same part of what
they get alone. Relative is the sum of these parts: more than 1 is more than
they would get in turn; it is not to be compared between contenders, of which
each has its own rates alone. ``auto`` over it is that of the rounds, median
and 95 % interval. What tenants would gain from client machines of their own is
not seen."""
_SAME = re.compile(r"same/(\d+)")
_HEIGHT_INCHES = 3.6


def tenants_part(section: Mapping[str, Any]) -> Part:
    """Picture by the number of tenants, and a table of all entries."""
    entries = [each for each in section.get("entries", ()) if each["complete"]]
    same = {
        int(found[1]): each
        for each in entries
        if (found := _SAME.fullmatch(each["name"]))
    }
    blocks: list[Block] = [Text(_TEXT)]
    if same:
        blocks.append(_picture(dict(sorted(same.items()))))
    if entries:
        blocks.append(_table(entries))
    title = "Settings beside one another"
    return Part(
        "Tenants beside one another",
        blocks,
        list(settings_parts(section, title)),
    )


def _picture(entries: Mapping[int, Entry]) -> Picture:
    figure, (left, right) = new_figure(_HEIGHT_INCHES, columns=2)
    names = {name for each in entries.values() for name in each["rounds"]}
    for name, look in looks_of(names).items():
        for axes, key in ((left, "samples_per_second"), (right, "jain")):
            points = {
                count: [phase[key] for phase in entry["rounds"][name]]
                for count, entry in entries.items()
                if name in entry["rounds"]
            }
            axes.plot(
                list(points),
                [statistics.median(each) for each in points.values()],
                look.dash,
                color=look.colour,
                marker=look.marker,
                linewidth=2.2 if name == "auto" else 1.2,
                label=name,
            )
            axes.vlines(
                list(points),
                [min(each) for each in points.values()],
                [max(each) for each in points.values()],
                color=look.colour,
                alpha=0.7,
            )
    dress(left, "All tenants together", "tenants", "samples/s")
    dress(right, "Jain's index", "tenants", "Jain's index of their rates")
    left.set_ylim(bottom=0)
    right.set_ylim(0, 1.05)
    for axes in (left, right):
        _counts(axes, list(entries))
    legend_below(figure, [left])
    return Picture(
        "tenants",
        figure,
        "Samples per second of all tenants and Jain's index, against the"
        " number of tenants",
    )


def _counts(axes: Axes, counts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, list(map(str, counts)))
    axes.xaxis.set_minor_locator(NullLocator())


def _table(entries: Sequence[Entry]) -> Table:
    return Table(
        (
            "Tenants",
            "Contender",
            "Link, MB/s",
            "Samples/s of all",
            "``auto`` over it",
            "Jain's index",
            "Relative",
            "Each, samples/s",
            "Client cores",
            "Storage cores",
        ),
        [row for each in entries for row in _rows(each)],
        words=2,
    )


def _auto_over(entry: Entry, name: str) -> str:
    rounds = entry["rounds"]
    if name == AUTO or AUTO not in rounds:
        return NONE
    return ratio_text(ratio(rates_of(rounds[AUTO]), rates_of(rounds[name])))


def _rows(entry: Entry) -> Iterator[Sequence[str]]:
    for name in in_order(entry["rounds"]):
        phases = entry["rounds"][name]
        each = zip(*(phase["each"] for phase in phases), strict=True)
        yield (
            f"``{entry['name']}``",
            f"``{name}``",
            link_text(entry["link_bytes_per_second"]),
            rate_text(entry["samples_per_second"][name]),
            _auto_over(entry, name),
            fixed(entry["jain"][name], 3),
            fixed(entry.get("relative", {}).get(name)),
            ", ".join(rate_text(statistics.median(rates)) for rates in each)
            or NONE,
            *(
                fixed(statistics.median(phase[key] for phase in phases))
                for key in ("client_cores", "storage_cores")
            ),
        )
