"""Reports of passes as one HTML file that loads nothing."""

from __future__ import annotations

from hapi_client.report_files import RunReport
from hapi_client.report_plots import figure
from hapi_client.report_tables import tables
from hapi_splitter.page import html_document, html_section, html_table
from hapi_splitter.plots import svg_element


def html_page(run: RunReport) -> str:
    """Pictures and tables."""
    if not run.reports:
        return html_document(run.title, ["<p>No pass over the data.</p>"])
    sections = [
        html_section(title, html_table(table))
        for title, table in tables(run.reports).items()
    ]
    return html_document(
        run.title, [svg_element(figure(run.reports)), *sections]
    )
