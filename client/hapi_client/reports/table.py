"""Text tables, printed on a terminal or rendered as HTML."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Text in rows and columns.

    Attributes:
        header: names of the columns.
        rows: each as long as the header.
        num_text: columns from the left that hold words, not numbers.
        note: explains the columns.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_text: int
    note: str

    def lines(self) -> tuple[str, ...]:
        """With columns aligned: words to the left, numbers to the right."""
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
