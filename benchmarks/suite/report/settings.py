"""Opponents' settings: those that were chosen, and all that were tried."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.opponents.tuning import label
from benchmarks.suite.report.document import Table
from benchmarks.suite.report.figures import options_text, rate_text


def settings_table(opponents: Mapping[str, Mapping[str, Any]]) -> Table:
    """Of one network; every setting of the grid, the chosen one marked.

    Args:
        opponents: by name.
    """
    return Table(
        ("Opponent", "Versions", "Settings", "Chosen", "Samples/s"),
        [
            row
            for name, found in opponents.items()
            for row in _rows(name, found)
        ],
        words=4,
    )


def _rows(name: str, found: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    versions = " ".join(
        f"{package} {version}"
        for package, version in found["versions"].items()
    )
    chosen = label(found["options"])
    # What has one setting only is not measured for it.
    tried = found["grid"] or {chosen: None}
    for number, (each, rate) in enumerate(tried.items()):
        yield (
            f"``{name}``" if not number else "",
            versions if not number else "",
            options_text(json.loads(each)),
            "yes" if each == chosen else "",
            rate_text(rate),
        )
