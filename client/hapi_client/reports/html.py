"""Self-contained HTML documents: tables, lists, inline SVG."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hapi_client.reports.table import Table
from hapi_protocol.errors import ClientError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plots() -> None:
    """Checks that figures can be drawn, before the work that they show.

    Raises:
        ClientError: ``bad_configuration`` without matplotlib.
    """
    if find_spec("matplotlib") is None:
        raise ClientError(
            "bad_configuration",
            "figures need matplotlib, which is not installed: "
            "pip install 'swift-hapi[plots]'",
        )


def svg_element(figure: Figure) -> str:
    """Renders a figure as ``<svg>``; equal figures give equal text."""
    import matplotlib as mpl

    buffer = io.StringIO()
    # Random ids and the date would make each file different.
    with mpl.rc_context({"svg.hashsalt": "hapi"}):
        figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None}
        )
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def html_document(title: str, parts: Sequence[str]) -> str:
    """Returns an HTML document that loads no other file.

    Args:
        title: plain text.
        parts: HTML elements, one below the other.
    """
    title = html.escape(title)
    content = "\n".join(parts)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 2em; max-width: 75em; }}
svg {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-size: 85%; }}
th, td {{ padding: 0.2em 0.6em; text-align: right; }}
th {{ border-bottom: 1px solid; }}
tr:nth-child(even) {{ background: #f3f3f3; }}
.words {{ text-align: left; }}
</style></head><body>
<h1>{title}</h1>
{content}
</body></html>
"""


def html_section(title: str, content: str) -> str:
    """Returns HTML ``content`` below a heading of plain text."""
    return f"<h2>{html.escape(title)}</h2>\n{content}"


def html_list(lines: Sequence[str]) -> str:
    """Returns lines of plain text as a list."""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>"


def html_table(table: Table) -> str:
    """Returns a table of plain text with its note below."""

    def row(cells: Sequence[str], tag: str) -> str:
        content = "".join(
            f"<{tag}{' class=words' * (place < table.num_text)}>"
            f"{html.escape(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr>{content}</tr>"

    rows = "\n".join(row(cells, "td") for cells in table.rows)
    return (
        f"<table><thead>{row(table.header, 'th')}</thead>\n"
        f"<tbody>{rows}</tbody></table>\n<p>{html.escape(table.note)}</p>"
    )
