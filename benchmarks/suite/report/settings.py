"""Opponents' settings: those that were chosen, and all that were tried."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.opponents.tuning import label
from benchmarks.suite.report.document import (
    Block,
    Listing,
    Part,
    Table,
    Text,
)
from benchmarks.suite.report.figures import options_text, rate_text

_TEXT = """\
Each opponent runs with the fastest of these settings for a network, which
short windows found out: without a limit on the link; for links of 1 to 4, on
one that carries just what it reads (even); and where the link carries less
than a stream could use, with the first ones found to fill that (slow)."""
_LINKS = ("even", "slow")


def absent_blocks(section: Mapping[str, Any]) -> Iterator[Block]:
    """Who was not measured in an experiment, and why."""
    if reasons := section.get("absent"):
        yield Text("Opponents that were not measured:")
        yield Listing([f"``{name}``: {why}" for name, why in reasons.items()])


def settings_parts(section: Mapping[str, Any], title: str) -> Iterator[Part]:
    """Of all opponents of an experiment, network by network."""
    if opponents := section.get("opponents"):
        parts = [
            Part(f"``{name}``", [settings_table(found)])
            for name, found in opponents.items()
        ]
        yield Part(title, [Text(_TEXT)], parts)


def settings_table(opponents: Mapping[str, Mapping[str, Any]]) -> Table:
    """Of one network; every setting of the grid, the chosen one marked.

    Args:
        opponents: by name.
    """
    return Table(
        ("Opponent", "Link", "Settings", "Chosen", "Samples/s"),
        [
            row
            for name, found in opponents.items()
            for row in _rows(name, found)
        ],
        words=4,
    )


def _rows(name: str, found: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    tuned = {"no limit": found, **{x: found[x] for x in _LINKS if x in found}}
    for link, each in tuned.items():
        chosen = label(each["options"])
        # What has one setting only is not measured for it.
        tried = each["grid"] or {chosen: None}
        for number, (options, rate) in enumerate(tried.items()):
            yield (
                f"``{name}``" if not number else "",
                link if not number else "",
                options_text(json.loads(options)),
                "yes" if options == chosen else "",
                rate_text(rate),
            )
