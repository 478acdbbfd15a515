"""Writes the reports of a run as JSON or as one HTML page."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from hapi_client.atomic_file import write_atomically
from hapi_client.reports.epoch_report import EpochReport
from hapi_client.reports.html import (
    html_document,
    html_section,
    html_table,
    svg_element,
)
from hapi_client.reports.run_report import (
    DEFAULT_TITLE,
    Curves,
    RunReport,
    check_report_path,
    run_body,
)
from hapi_client.reports.run_tables import tables


def write_reports(
    path: str | os.PathLike[str],
    reports: Sequence[EpochReport],
    title: str = DEFAULT_TITLE,
    curves: Curves | None = None,
) -> None:
    """Writes reports as ``.json`` or as self-contained ``.html``.

    Raises:
        ClientError: ``bad_configuration`` for another suffix, or if the file
            cannot be written.
    """
    check_report_path(path)
    run = RunReport(title, tuple(reports), curves or {})
    if Path(path).suffix.lower() == ".json":
        text = json.dumps(run_body(run), indent=2) + "\n"
    else:
        text = html_page(run)
    with write_atomically(Path(path)) as file:
        file.write(text.encode())


def html_page(run: RunReport) -> str:
    """Returns an HTML page with figures and tables."""
    if not run.reports:
        return html_document(run.title, ["<p>No epoch was begun.</p>"])
    # Imported late: matplotlib takes a second, and JSON does not need it.
    from hapi_client.reports.run_figure import figure

    sections = [
        html_section(title, html_table(table))
        for title, table in tables(run.reports).items()
    ]
    return html_document(run.title, [svg_element(figure(run)), *sections])
