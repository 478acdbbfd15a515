"""A document as a page of the documentation."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rst import rst_table
from benchmarks.suite.report.document import (
    Block,
    Commands,
    Listing,
    Part,
    Picture,
    Table,
    Text,
)
from benchmarks.suite.report.png import png_of

_LINES = "=-~^"
_CODE = re.compile(r"(``.+?``)")
_SPECIAL = re.compile(r"([\\*`|]|_(?=\W|$))")
_WIDTH = 79


def rst_of(document: Part, images: str) -> str:
    """The page.

    Args:
        document: all of it.
        images: where :func:`write_images` has written, as the page sees it.
    """
    return "\n".join(_part(document, images, 0))


def write_images(document: Part, folder: Path) -> None:
    """The document's pictures, as PNG; those of earlier ones go."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    for block in document.all_blocks():
        if isinstance(block, Picture):
            data = png_of(block.figure)
            (folder / f"{block.name}.png").write_bytes(data)


def _part(part: Part, images: str, level: int) -> Iterator[str]:
    title = _inline(part.title)
    yield f"{title}\n{_LINES[level] * len(title)}\n"
    for block in part.blocks:
        yield _block(block, images)
    for each in part.parts:
        yield from _part(each, images, level + 1)


def _inline(text: str) -> str:
    """With a backslash before what would be markup, code apart."""
    return "".join(
        piece if piece.startswith("``") else _SPECIAL.sub(r"\\\1", piece)
        for piece in _CODE.split(text)
    )


def _cell(text: str) -> str:
    """A dash alone would be a list; a range stays on one line."""
    return "\\-" if text == "-" else _inline(text.replace(" … ", "…"))


def _filled(text: str, **options: str) -> str:
    return textwrap.fill(
        _inline(text),
        _WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
        **options,  # type: ignore[arg-type]
    )


def _block(block: Block, images: str) -> str:
    match block:
        case Text(text):
            return f"{_filled(text)}\n"
        case Listing(lines):
            marks = {"initial_indent": "* ", "subsequent_indent": "  "}
            return "\n".join(_filled(each, **marks) for each in lines) + "\n"
        case Commands(lines):
            typed = "".join(f"    {line}\n" for line in lines)
            return f".. code-block:: sh\n\n{typed}"
        case Table(header, rows):
            return rst_table(
                [*map(_inline, header)],
                ([_cell(cell) for cell in row] for row in rows),
            )
        case Picture(name, _, text):
            alt = " ".join(text.split())
            return (
                f".. image:: {images}/{name}.png\n   :alt: {alt}\n"
                "   :width: 100%\n"
            )
