"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
import textwrap
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

_RESTRUCTURED = re.compile(
    r"^( *)(?:\.\. (?:code-block|code|sourcecode)::(.*)|(?!\.\. ).*::)\n"
    r"(?:\1 +:[\w-]+:.*\n)*"
    r"((?:\1 +.*\n|[ ]*\n)+)",
    re.MULTILINE,
)
_MARKDOWN = re.compile(r"^()```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(
    r"^ *(?:\.\.|<!--) not run: .+\n(?: +\S.*\n)*\s*\Z", re.M
)


@dataclass(frozen=True)
class Block:
    """One code block.

    Attributes:
        page: path of its page in the checkout.
        line: where it begins.
        language: empty where the page does not say.
        text: without its indentation.
        not_run: a comment in front of it says why it is not run
            (``.. not run: REASON``, ``<!-- not run: REASON -->``).
    """

    page: str
    line: int
    language: str
    text: str
    not_run: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    """All code blocks of a page, in order."""
    text = (ROOT / page).read_text()
    pattern = _MARKDOWN if page.endswith(".md") else _RESTRUCTURED
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            (found[2] or "").strip(),
            textwrap.dedent(found[3]).strip("\n") + "\n",
            bool(_NOT_RUN.search(text[: found.start()])),
        )
        for found in pattern.finditer(text)
    ]


def all_blocks(*languages: str) -> list[Block]:
    """Those of all pages in these languages."""
    return [
        block
        for page in PAGES
        for block in blocks_of(page)
        if block.language in languages
    ]


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
