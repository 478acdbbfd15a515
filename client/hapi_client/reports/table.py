"""Tables of text, for terminals and HTML."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows and columns of text.

    Attributes:
        header: names of the columns.
        rows: each as long as the header.
        num_text: number of leading columns that are left-aligned text; the
            others are right-aligned numbers.
        note: explains the columns.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_text: int
    note: str

    def lines(self) -> tuple[str, ...]:
        """Formats header and rows with aligned columns."""
        table = (self.header, *self.rows)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return tuple(
            "  ".join(
                cell.ljust(width)
                if place < self.num_text
                else cell.rjust(width)
                for place, (cell, width) in enumerate(
                    zip(row, widths, strict=True)
                )
            ).rstrip()
            for row in table
        )
