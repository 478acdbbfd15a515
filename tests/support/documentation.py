"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("*.rst"),
        *ROOT.glob("docs/**/*.rst"),
    )
    if "_build" not in path.parts
)

_DIRECTIVE = re.compile(r"^( *)\.\. (?:code-block|code|sourcecode)::(.*)$")
_LITERAL = re.compile(r"^( *)(?!\.\. )(?:.*[^:])?::$")
_OPTION = re.compile(r"^ +:[\w-]+:")
_FENCE = re.compile(r"^```(\w*)$")
_NOT_RUN = re.compile(r"^ *(?:\.\. |<!-- )not run: (.+?)(?: -->)?$")


@dataclass(frozen=True)
class Block:
    """One code block.

    Attributes:
        page: path of its page in the checkout.
        line: where it begins.
        language: empty where the page does not say.
        text: without its indentation.
        not_run: the reason that a comment in front of it gives
            (``.. not run: REASON``, ``<!-- not run: REASON -->``).
    """

    page: str
    line: int
    language: str
    text: str
    not_run: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    """All code blocks of a page, in order."""
    lines = (ROOT / page).read_text().splitlines()
    found = _markdown if page.endswith(".md") else _restructured
    return list(found(page, lines))


def all_blocks(*languages: str) -> list[Block]:
    """Those of all pages in these languages."""
    return [
        block
        for page in PAGES
        for block in blocks_of(page)
        if block.language in languages
    ]


def _markdown(page: str, lines: list[str]) -> Iterator[Block]:
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence:
            end = lines.index("```", number + 1)
            text = "\n".join(lines[number + 1 : end]) + "\n"
            yield Block(
                page, number + 1, fence[1], text, _reason(lines, number)
            )
            number = end
        number += 1


def _restructured(page: str, lines: list[str]) -> Iterator[Block]:
    number = 0
    while number < len(lines):
        begun = _DIRECTIVE.match(lines[number])
        language = begun[2].strip() if begun else ""
        begun = begun or _LITERAL.match(lines[number])
        if begun:
            first, end = _body(lines, number + 1, len(begun[1]))
            yield Block(
                page,
                number + 1,
                language,
                _dedented(lines[first:end]),
                _reason(lines, number),
            )
            number = end - 1
        number += 1


def _body(lines: list[str], number: int, indent: int) -> tuple[int, int]:
    """Start and end of the lines that are indented more."""
    while number < len(lines) and _OPTION.match(lines[number]):
        number += 1
    first = number
    deeper = " " * (indent + 1)
    while number < len(lines) and (
        not lines[number].strip() or lines[number].startswith(deeper)
    ):
        number += 1
    return first, number


def _dedented(lines: list[str]) -> str:
    margin = min(
        (len(line) - len(line.lstrip()) for line in lines if line.strip()),
        default=0,
    )
    return "\n".join(line[margin:] for line in lines).strip("\n") + "\n"


def _reason(lines: list[str], number: int) -> str | None:
    """Text of the comment in front of a block, of one or more lines."""
    before = number - 1
    while before >= 0 and not lines[before].strip():
        before -= 1
    while before > 0 and lines[before].startswith("   "):
        before -= 1
    found = _NOT_RUN.match(lines[before]) if before >= 0 else None
    return found[1] if found else None


def commands_of(block: Block) -> list[str]:
    """The lines of a shell block that are typed, comments left out.

    In a ``console`` block they begin with ``$ ``, and the others are what
    comes back.  A line that ends in a backslash goes on.
    """
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [
        " ".join(line.split())
        for line in lines
        if line.strip() and not line.lstrip().startswith("#")
    ]
