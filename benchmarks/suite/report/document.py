"""What a report consists of, before it is HTML or reStructuredText.

Text is plain, with ````code```` as its only markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Listing:
    """Lines, one below the other."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Commands:
    """Lines of a shell.

    Attributes:
        lines: as they are typed.
    """

    lines: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Text in rows and columns.

    Attributes:
        header: names of the columns.
        rows: each as long as the header.
        words: columns from the left that hold words, not numbers.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


@dataclass(frozen=True)
class Picture:
    """A figure.

    Attributes:
        name: of its file, without suffix.
        figure: drawn.
        text: what is to be seen, for those who do not see it.
    """

    name: str
    figure: Figure
    text: str


Block = Text | Listing | Commands | Table | Picture


@dataclass(frozen=True)
class Part:
    """A heading and what stands below it.

    Attributes:
        title: as text.
        blocks: in order.
        parts: below the blocks, with headings of their own.
    """

    title: str
    blocks: Sequence[Block]
    parts: Sequence[Part] = ()

    def all_blocks(self) -> Iterator[Block]:
        """Those of the parts below too."""
        yield from self.blocks
        for part in self.parts:
            yield from part.all_blocks()


def body_of(part: Part) -> dict[str, Any]:
    """The JSON form, of pictures their names."""
    found: dict[str, Any] = {"title": part.title}
    for block in part.blocks:
        match block:
            case Text(text):
                found.setdefault("text", []).append(text)
            case Listing(lines):
                found.setdefault("lists", []).append(list(lines))
            case Commands(lines):
                found.setdefault("commands", []).extend(lines)
            case Table(header, rows):
                found.setdefault("tables", []).append(
                    {
                        "header": list(header),
                        "rows": [list(row) for row in rows],
                    }
                )
            case Picture(name):
                found.setdefault("pictures", []).append(name)
    if part.parts:
        found["parts"] = [body_of(each) for each in part.parts]
    return found
