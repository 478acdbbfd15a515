"""A document as one HTML file that loads nothing."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence

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

_CODE = re.compile(r"``(.+?)``")
_STYLE = """
body { font: 16px/1.45 sans-serif; color: #1b1f24; margin: 2em auto;
  max-width: 980px; padding: 0 1em; }
h1, h2, h3 { line-height: 1.2; margin-top: 1.8em; }
h2 { border-bottom: 1px solid #d0d7de; padding-bottom: .2em; }
img { display: block; width: 100%; max-width: 900px; height: auto; }
.wide { overflow-x: auto; margin: 1em 0; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .25em .6em; text-align: right; vertical-align: top; }
th { border-bottom: 1px solid #57606a; }
tr:nth-child(even) td { background: #f3f5f7; }
.words { text-align: left; }
td:not(.words), td code { white-space: nowrap; }
code { font-size: 90%; background: #f3f5f7; padding: 0 .2em; }
pre { background: #f3f5f7; padding: .8em; white-space: pre-wrap; }
nav a { margin-right: 1em; }
"""


def html_of(document: Part) -> str:
    """The whole file."""
    links = "".join(
        f'<a href="#{_anchor(part.title)}">{html.escape(part.title)}</a> '
        for part in document.parts
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(document.title)}</title>"
        f"<style>{_STYLE}</style></head><body>\n"
        f"<h1>{html.escape(document.title)}</h1>\n<nav>{links}</nav>\n"
        + "\n".join(map(_block, document.blocks))
        + "\n".join(_part(part, 2) for part in document.parts)
        + "\n</body></html>\n"
    )


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def _part(part: Part, level: int) -> str:
    return "\n".join(
        [
            f'<h{level} id="{_anchor(part.title)}">'
            f"{_inline(part.title)}</h{level}>",
            *map(_block, part.blocks),
            *(_part(each, level + 1) for each in part.parts),
        ]
    )


def _inline(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", html.escape(text))


def _block(block: Block) -> str:
    match block:
        case Text(text):
            return f"<p>{_inline(text)}</p>"
        case Listing(lines):
            items = "".join(f"<li>{_inline(line)}</li>" for line in lines)
            return f"<ul>{items}</ul>"
        case Commands(lines):
            return f"<pre>{html.escape(chr(10).join(lines))}</pre>"
        case Table():
            return _table(block)
        case Picture():
            data = base64.b64encode(png_of(block.figure)).decode()
            return (
                f'<img src="data:image/png;base64,{data}"'
                f' alt="{html.escape(block.text)}">'
            )


def _table(table: Table) -> str:
    rows = "\n".join(_row(table, cells, "td") for cells in table.rows)
    return (
        f'<div class="wide"><table><thead>{_row(table, table.header, "th")}'
        f"</thead>\n<tbody>{rows}</tbody></table></div>"
    )


def _row(table: Table, cells: Sequence[str], tag: str) -> str:
    content = "".join(
        f"<{tag}{' class=words' * (place < table.words)}>{_inline(cell)}"
        f"</{tag}>"
        for place, cell in enumerate(cells)
    )
    return f"<tr>{content}</tr>"
