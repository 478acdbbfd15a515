"""Section ``ablations``: what each part of HAPI is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.suite.report.document import (
    Block,
    Listing,
    Part,
    Table,
    Text,
)
from benchmarks.suite.report.figures import fixed, range_text, rate_text
from benchmarks.suite.report.ratios import ratios_picture

_TEXT = """\
Samples per second with a part over those without it. Encodings: ``auto``
beside ``auto`` in float32. Re-planning: beside its first plan. Kept features:
a later epoch of ``freeze`` that finds them beside one that computes them.
Batches: ``freeze`` with the worker's own batches beside one sample at a time,
and beside the batch that the linear program of the published system gives,
which is all samples of a request where memory allows (each with a proxy and
worker of its own).
Coalescing: processes that share a package, and so batches, beside a package
for each; it cannot be turned off, so that without it a worker has several
models in turn as well."""


def ablations_part(section: Mapping[str, Any]) -> Part:
    """Picture and tables."""
    entries = [each for each in section.get("entries", ()) if each["complete"]]
    blocks: list[Block] = [Text(_TEXT)]
    if section.get("lp_batch"):
        blocks.append(
            Listing(
                [
                    f"The linear program's batch for ``{name}``: {batch}"
                    for name, batch in section["lp_batch"].items()
                ]
            )
        )
    rows = [
        (f"{entry['name']}: {part}", ratio)
        for entry in entries
        for part, ratio in entry["parts"].items()
    ]
    if rows:
        blocks += [
            ratios_picture(
                "ablations",
                "What each part is worth",
                "samples per second with it over without it",
                rows,
            ),
            _parts_table(entries),
            _rates_table(entries),
        ]
    return Part("What each part is worth", blocks)


def _parts_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        ("Cell", "Part", "With it over without it", "95 % interval"),
        [
            (
                f"``{entry['name']}``",
                part,
                fixed(ratio["median"], 3),
                range_text(ratio["interval"], 3),
            )
            for entry in entries
            for part, ratio in entry["parts"].items()
        ],
        words=2,
    )


def _rates_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        ("Cell", "Contender", "Samples/s"),
        [
            (f"``{entry['name']}``", f"``{name}``", rate_text(rate))
            for entry in entries
            for name, rate in entry["samples_per_second"].items()
        ],
        words=2,
    )
