"""Spans of fixed cuts that were streamed: such a pass is not of its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.suite.report.document import Part, Table, Text
from benchmarks.suite.report.figures import NONE

Section = Mapping[str, Any]

_NONE = """\
No span of a fixed cut fell back to streaming in any pass that the file has:
all of them are of what their names say."""
_SOME = """\
A span that cannot be pushed, because the worker's queue is full or a request
failed, is streamed. These passes of fixed cuts have such spans, and are not
wholly of what their names say:"""
AUTO = "auto"


def fallbacks_part(sections: Mapping[str, Section]) -> Part:
    """Where there were any.

    Args:
        sections: of the results, by experiment.
    """
    rows = [
        (f"``{entry}``", f"``{name}``", str(sum(counts)), _share(counts))
        for entry, name, counts in _counts(sections)
        if any(counts)
    ] + [
        (f"``{cell['name']}`` (regret)", f"``{name}``", str(count), NONE)
        for cell in sections.get("regret", {}).get("body", {}).get("cells", ())
        for name, count in cell.get("fallbacks", {}).items()
        if name != AUTO
    ]
    title = "Spans that were streamed instead"
    if not rows:
        return Part(title, [Text(_NONE)])
    table = Table(("Entry", "Contender", "Spans", "In passes"), rows, words=2)
    return Part(title, [Text(_SOME), table])


def _share(counts: Sequence[int]) -> str:
    return f"{sum(map(bool, counts))} of {len(counts)}"


def _counts(
    sections: Mapping[str, Section],
) -> Iterator[tuple[str, str, list[int]]]:
    """Entry, contender with a fixed cut, and fallbacks of each pass."""
    for section in sections.values():
        for entry in [*section.get("cells", ()), *section.get("entries", ())]:
            for name, passes in _passes(entry).items():
                plans = {name.split("-")[0], entry["name"].split("/")[-1]}
                if AUTO not in plans:
                    counts = [each.get("fallbacks", 0) for each in passes]
                    yield entry["name"], name, counts


def _passes(entry: Section) -> dict[str, list[Section]]:
    """By contender; each epoch of a whole run is one."""
    if "runs" in entry:
        return {
            name: [epoch for run in runs for epoch in run["epochs"]]
            for name, runs in entry["runs"].items()
        }
    return dict(entry.get("rounds", {}))
