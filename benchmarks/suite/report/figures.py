"""Figures of a file as people read them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "-"
GridCell = Mapping[str, Any]


def fixed(number: float | None, digits: int = 2) -> str:
    """``0.97``; a dash for what there is none of."""
    return NONE if number is None else f"{number:.{digits}f}"


def rate_text(rate: float | None) -> str:
    """Samples per second: ``2.35``, ``24.7``, ``158``."""
    if rate is None:
        return NONE
    digits = 2 if rate < 10 else 1 if rate < 100 else 0
    return f"{rate:,.{digits}f}"


def range_text(ends: Sequence[float] | None, digits: int = 2) -> str:
    """``0.95 … 1.02``."""
    if ends is None:
        return NONE
    return " … ".join(f"{end:.{digits}f}" for end in ends)


def ratio_text(found: Mapping[str, Any] | None, digits: int = 2) -> str:
    """``1.36 (1.25 … 1.40)``: median and interval."""
    if not found:
        return NONE
    interval = range_text(found["interval"], digits)
    return f"{fixed(found['median'], digits)} ({interval})"


def percent(part: float | None, digits: int = 1) -> str:
    """``-3.8 %``."""
    if part is None:
        return NONE
    text = f"{100 * part:.{digits}f}"
    return f"{text.lstrip('-') if float(text) == 0 else text} %"


def percent_range(ends: Sequence[float] | None) -> str:
    """``-20.2 % … 9.1 %``."""
    return NONE if ends is None else " … ".join(map(percent, ends))


def verdict(met: bool | None) -> str:
    """What became of a goal."""
    return {True: "met", False: "missed", None: "not told"}[met]


def link_text(bytes_per_second: float | None) -> str:
    """Of a link, in MB/s."""
    if bytes_per_second is None:
        return "no limit"
    return f"{bytes_per_second / 1e6:.2f}"


def link_name(cell: GridCell) -> str:
    """``0.25 x, 0.67 MB/s``."""
    if cell["link"] is None:
        return "no limit"
    limit = link_text(cell["link_bytes_per_second"])
    return f"{cell['link']:g} x, {limit} MB/s"


def complete_cells(section: Mapping[str, Any] | None) -> list[GridCell]:
    """Those that were measured to their end; none of no section."""
    cells = (section or {}).get("cells", ())
    return [cell for cell in cells if cell.get("complete")]


def median_of(windows: Sequence[Mapping[str, Any]], key: str) -> float:
    """Of all rounds."""
    return statistics.median(window[key] for window in windows)


def options_text(options: Mapping[str, Any]) -> str:
    """``decode=reader channels_last=False``."""
    found = " ".join(f"{key}={value}" for key, value in options.items())
    return f"``{found}``" if found else "no settings"
