"""``python -m benchmarks report``."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from benchmarks.suite.results import load

PAGE = "index.html"


def add_report(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """Adds the command to the parser of ``python -m benchmarks``."""
    report = commands.add_parser(
        "report",
        help="write what a file of results says",
        description="Writes what a file of `python -m benchmarks run` says:"
        " tables and pictures, as one HTML page that loads nothing, as a page"
        " of the documentation, or its tables as JSON.",
    )
    add = report.add_argument
    add("results", type=Path, metavar="RESULTS.json", help="what run wrote")
    add(
        "--html",
        type=Path,
        metavar="DIR",
        help=f"folder for {PAGE} (default, if nothing else is asked for: that"
        " of the results)",
    )
    add("--rst", type=Path, metavar="PATH", help="page of the documentation")
    add(
        "--images",
        type=Path,
        metavar="DIR",
        help="folder for its pictures; those that are there go",
    )
    add(
        "--gpu",
        type=Path,
        metavar="DIR",
        help="results of benchmarks/gpu.sh, which become a part of it",
    )
    add("--json", type=Path, metavar="PATH", help="all tables, as text")
    report.set_defaults(action=lambda found: _report(report, found))


def _report(
    command: argparse.ArgumentParser, found: argparse.Namespace
) -> int:
    if (found.rst is None) != (found.images is None):
        command.error("give --rst and --images, or neither")
    if not any((found.html, found.rst, found.json)):
        found.html = found.results.parent
    try:
        _write(found)
    except OSError as error:
        raise ValueError(error) from error
    return 0


def _write(found: argparse.Namespace) -> None:
    # Matplotlib takes a second to import, and `run` does not need it.
    from benchmarks.suite.report.document import body_of
    from benchmarks.suite.report.html import html_of
    from benchmarks.suite.report.page import report_of
    from benchmarks.suite.report.rst import rst_of, write_images

    document = report_of(load(found.results), found.gpu)
    if found.html:
        found.html.mkdir(parents=True, exist_ok=True)
        page = found.html / PAGE
        page.write_text(html_of(document), encoding="utf-8")
        print(f"written to {page}")
    if found.rst:
        write_images(document, found.images)
        images = os.path.relpath(found.images, found.rst.parent)
        found.rst.write_text(rst_of(document, images), encoding="utf-8")
        print(f"written to {found.rst}")
    if found.json:
        text = json.dumps(body_of(document), indent=1, ensure_ascii=False)
        found.json.write_text(f"{text}\n", encoding="utf-8")
        print(f"written to {found.json}")
