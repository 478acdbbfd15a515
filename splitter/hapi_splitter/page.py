"""A plan as one HTML file; see :func:`hapi_splitter.report.write_plot`."""

from __future__ import annotations

import html
from collections.abc import Sequence

from hapi_splitter.plots import svg_image
from hapi_splitter.report import (
    Report,
    Table,
    cost_table,
    cut_table,
    plans_table,
    summary,
)


def html_page(report: Report) -> str:
    """The plot, reasons and tables in one file that loads nothing."""
    title = html.escape(f"Where to cut {report.model}")
    notes = ""
    if report.notes:
        notes = f"<h2>What it rests on</h2>\n{_html_list(report.notes)}"
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
{_html_list(summary(report))}
{svg_image(report)}
<h2>Plans compared</h2>
{_html_table(plans_table(report))}
<h2>What a cut costs</h2>
{_html_table(cost_table(report))}
<h2>Where the model can be cut</h2>
{_html_table(cut_table(report, every=True))}
{notes}
</body></html>
"""


def _html_list(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>"


def _html_table(table: Table) -> str:
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
