"""Self-contained HTML documents: tables, lists, inline SVG."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hapi_client.reports.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def svg_element(figure: Figure) -> str:
    """Any figure, the same for the same figure."""
    import matplotlib as mpl

    buffer = io.StringIO()
    # Without these the same plan would give another file each time.
    with mpl.rc_context({"svg.hashsalt": "hapi"}):
        figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None}
        )
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def html_document(title: str, parts: Sequence[str]) -> str:
    """A whole file.

    Args:
        title: as text.
        parts: as HTML, one below the other.
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
    """
    Args:
        title: as text.
        content: as HTML.
    """
    return f"<h2>{html.escape(title)}</h2>\n{content}"


def html_list(lines: Sequence[str]) -> str:
    """Of lines of text."""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>"


def html_table(table: Table) -> str:
    """A table of text, with its note below."""

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
