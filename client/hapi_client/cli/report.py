"""``hapi report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hapi_client.cli.context import (
    JsonPath,
    checked_path,
    say,
    write_json,
)
from hapi_protocol.errors import ClientError


def report_command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH.json",
            help="File written by 'hapi train --report' or '--json'.",
        ),
    ],
    html_path: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="PATH.html",
            help="Also write a page with figures and these tables.",
            callback=checked_path,
        ),
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Show throughput, traffic and time by stage of each epoch of a run.

    Examples:

        hapi train --data photos/train --classes 10 --report run.json

        hapi report run.json --html run.html

    Keys of --json: version, title, reports (one for each epoch; the
    documentation's page "Follow a run" has their keys), curves (results of
    each epoch, by run).
    """
    # Imported late: they take a second, and --help need not wait.
    from hapi_client.reports.run_page import write_reports
    from hapi_client.reports.run_report import read_reports, run_body
    from hapi_client.reports.run_tables import tables

    if html_path is not None and html_path.suffix.lower() != ".html":
        raise ClientError(
            "bad_configuration",
            f"--html is {html_path}; the name must end in .html",
        )
    run = read_reports(path)
    say(run.title)
    for title, table in tables(run.reports).items():
        for line in ("", f"{title}:", *table.lines(), table.note):
            say(line)
    write_json(json_path, run_body(run))
    if html_path is not None:
        write_reports(html_path, run.reports, run.title, run.curves)
        say(f"page: {html_path}")
