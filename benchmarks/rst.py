"""Tables in reStructuredText."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def rst_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A list table; cells are reStructuredText of one line."""
    return "\n".join(
        [
            ".. list-table::\n   :header-rows: 1\n",
            _row(header),
            *map(_row, rows),
            "",
        ]
    )


def _row(cells: Sequence[str]) -> str:
    first, *others = cells
    return "\n".join([f"   * - {first}", *(f"     - {c}" for c in others)])
