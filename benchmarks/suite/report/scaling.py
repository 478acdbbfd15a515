"""Section ``scaling``: two proxies with workers, and two ranks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.suite.report.document import Block, Part, Table, Text
from benchmarks.suite.report.figures import fixed, range_text, rate_text
from benchmarks.suite.report.ratios import ratios_picture

_TEXT = """\
``proxies``: two clients with accounts of their own at one proxy and worker, or
each at one of its own, in front of the same Swift servers. ``ranks``: one
training process, or two that share each batch. Cores: {cores}. Each proxy with
its worker, and each rank, has one half of its tier's cores, or shares the only
one: where there is one core for both, two cannot be faster. The link has no
limit."""


def scaling_part(section: Mapping[str, Any]) -> Part:
    """Picture and table."""
    entries = [each for each in section.get("entries", ()) if each["complete"]]
    cores = ", ".join(
        f"{tier} {count}" for tier, count in section.get("cores", {}).items()
    )
    text = " ".join(_TEXT.format(cores=cores).split())
    blocks: list[Block] = [Text(text)]
    if entries:
        blocks += [
            ratios_picture(
                "scaling",
                "Two instead of one",
                "samples per second of two over one",
                [(each["name"], each["ratio"]) for each in entries],
            ),
            _table(entries),
        ]
    return Part("Two proxies, two ranks", blocks)


def _table(entries: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        (
            "What",
            "One, samples/s",
            "Two, samples/s",
            "Two over one",
            "95 % interval",
            "Storage cores busy, one",
            "two",
            "Client cores busy, one",
            "two",
        ),
        [_row(each) for each in entries],
    )


def _row(entry: Mapping[str, Any]) -> Sequence[str]:
    rates, ratio = entry["samples_per_second"], entry["ratio"]
    busy = [
        fixed(
            statistics.median(x[f"{tier}_cores"] for x in entry["rounds"][n])
        )
        for tier in ("storage", "client")
        for n in ("one", "two")
    ]
    return (
        f"``{entry['name']}``",
        rate_text(rates["one"]),
        rate_text(rates["two"]),
        fixed(ratio["median"], 3),
        range_text(ratio["interval"], 3),
        *busy,
    )
