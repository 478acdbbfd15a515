"""Writes a plan as a PNG figure or one HTML page."""

from __future__ import annotations

import os
from pathlib import Path

from hapi_client.plan_report.plan_tables import (
    Report,
    cost_table,
    cut_table,
    plans_table,
    summary,
)
from hapi_client.reports.html import (
    html_document,
    html_list,
    html_section,
    html_table,
)


def write_plot(path: str | os.PathLike[str], report: Report) -> None:
    """Draws sizes at the cuts and times of the stages.

    Args:
        path: ``.png`` for the figure; ``.html`` for a self-contained page
            with figure, tables and reasons.
        report: report of one plan.

    Raises:
        ValueError: for another suffix.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".html":
        Path(path).write_text(html_page(report), encoding="utf-8")
        return
    if suffix != ".png":
        raise ValueError(f"plot is {path}; the name must end in .png or .html")
    # Imported late: matplotlib takes a second.
    from hapi_client.plan_report.plan_figure import png_image

    Path(path).write_bytes(png_image(report))


def html_page(report: Report) -> str:
    """Returns a page with figure, tables and reasons."""
    from hapi_client.plan_report.plan_figure import svg_image

    parts = [
        html_list(summary(report)),
        svg_image(report),
        html_section("Plans compared", html_table(plans_table(report))),
        html_section("What a cut costs", html_table(cost_table(report))),
        html_section(
            "Where the model can be cut",
            html_table(cut_table(report, every=True)),
        ),
    ]
    if report.notes:
        parts.append(
            html_section(
                "Measurements and assumptions", html_list(report.notes)
            )
        )
    return html_document(f"Where to cut {report.model}", parts)
