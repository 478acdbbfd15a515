"""Section ``scaling``: two proxies with workers, and two ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.suite.report.document import Block, Part, Table, Text
from benchmarks.suite.report.figures import (
    NONE,
    fixed,
    range_text,
    rate_text,
)
from benchmarks.suite.report.ratios import ratios_picture

_TEXT = """\
``proxies``: two clients with accounts of their own at one proxy and worker, or
each at one of its own, in front of the same Swift servers. ``ranks``: one
training process, or two that share each batch. Cores: {cores}. Each proxy with
its worker, and each rank, has one half of its tier's cores, or shares the only
one: where there is one core for both, two cannot be faster. The link has no
limit."""
_COSTS = """\
Why two are not as fast as one on the same core: CPU milliseconds that a sample
takes of each tier, and how many samples a pass of a worker's model has, all
medians of the rounds. ``halved`` is one process that trains with batches of
half the size, as small as what a rank has of one: what it loses, two ranks
lose to smaller batches and not to one another."""
_SETUPS = ("one", "two", "halved")


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
            Text(" ".join(_COSTS.split())),
            _costs(entries),
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
            "Halved over one",
            "95 % interval",
        ),
        [_row(each) for each in entries],
    )


def _row(entry: Mapping[str, Any]) -> Sequence[str]:
    rates, ratio = entry["samples_per_second"], entry["ratio"]
    halved = entry.get("halved_ratio")
    return (
        f"``{entry['name']}``",
        rate_text(rates["one"]),
        rate_text(rates["two"]),
        fixed(ratio["median"], 3),
        range_text(ratio["interval"], 3),
        fixed(halved["median"], 3) if halved else NONE,
        range_text(halved["interval"], 3) if halved else NONE,
    )


def _costs(entries: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        (
            "What",
            "Setup",
            "Storage, ms",
            "Storage cores busy",
            "Client, ms",
            "Client cores busy",
            "Samples in a pass",
        ),
        [
            (f"``{entry['name']}``", setup, *_cost(entry["rounds"][setup]))
            for entry in entries
            for setup in _SETUPS
            if setup in entry["rounds"]
        ],
        words=2,
    )


def _cost(phases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for tier in ("storage", "client"):
        busy = [each[f"{tier}_cores"] for each in phases]
        rates = [each["samples_per_second"] for each in phases]
        seconds = [b / rate for b, rate in zip(busy, rates, strict=True)]
        yield fixed(1e3 * statistics.median(seconds))
        yield fixed(statistics.median(busy))
    batches = [each.get("worker_batch") for each in phases]
    there = [each for each in batches if each is not None]
    yield fixed(statistics.median(there), 1) if there else NONE
