"""Renders a record: completely as HTML, or as the results page.

    python -m benchmarks.report record.json --html report
    python -m benchmarks.report benchmarks/results/two-cores.json \\
        --rst docs/results.rst --images docs/images/results
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.ratios import percents
from benchmarks.record import load
from benchmarks.rendering.figures import write_figures
from benchmarks.rendering.tables import (
    TABLES,
    TIERS,
    Record,
    Table,
    goals,
    later_speeds,
)

FOLDER = Path(__file__).parent
TEMPLATES = FOLDER / "rendering"
MODELS = FOLDER / "results" / "models.csv"
CLUSTER = FOLDER / "results" / "cluster.json"
ITERATIONS = FOLDER / "results" / "iterations.json"
NODES = FOLDER / "results" / "nodes.json"
CHECKPOINTS = FOLDER / "results" / "checkpoints.json"
PARTIAL = FOLDER / "results" / "partial.json"
ACCURACY = FOLDER / "results" / "partial-accuracy.json"
DEVICE_QUEUE = FOLDER / "results" / "device_queue.json"


def environment() -> Environment:
    """The templates; HTML is escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.tests["table"] = is_table
    environment.filters["csv_row"] = csv_row
    return environment


def csv_row(cells: Sequence[str]) -> str:
    """Formats a row of a ``csv-table`` directive."""
    return ", ".join(f'"{cell}"' for cell in cells)


def is_table(value: Any) -> bool:
    """True for a list of mappings of plain values with equal keys."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) for item in value)
        and len({tuple(item) for item in value}) == 1
        and not any(
            isinstance(inner, dict | list)
            for item in value
            for inner in item.values()
        )
    )


def tables_of(record: Record) -> dict[str, Table]:
    """All tables with rows, by name."""
    tables = {name: table(record) for name, table in TABLES.items()}
    tables["goals"] = goals(record)
    return {name: table for name, table in tables.items() if table.rows}


def write_html(record: Record, folder: Path) -> Path:
    """Writes ``index.html`` and its figures to a folder."""
    figures = write_figures(record, folder)
    page = folder / "index.html"
    page.write_text(
        environment()
        .get_template("record.html.j2")
        .render(
            record=record,
            tables=tables_of(record).values(),
            figures=[path.name for path in figures.values()],
        )
    )
    return page


def write_rst(record: Record, source: Path, page: Path, images: Path) -> None:
    """Writes the results page and its figures.

    Args:
        record: a whole record: the page needs all experiments.
        source: file of the record, which the page names.
        page: to write.
        images: folder of the figures.
    """
    write_figures(record, images)
    page.write_text(
        environment()
        .get_template("results.rst.j2")
        .render(
            record=record,
            source=source,
            images=os.path.relpath(images, page.parent),
            tables=tables_of(record),
            later_speeds=later_speeds,
            tiers=TIERS,
            models=models(),
            cluster=json.loads(CLUSTER.read_text()),
            iterations=json.loads(ITERATIONS.read_text()),
            nodes=json.loads(NODES.read_text()),
            checkpoints=json.loads(CHECKPOINTS.read_text()),
            partial=json.loads(PARTIAL.read_text()),
            accuracy=json.loads(ACCURACY.read_text())["accuracy"],
            device_queue=json.loads(DEVICE_QUEUE.read_text()),
            percents=percents,
            processors=sorted({x["processor"] for x in record["begun"]}),
        )
    )


def models() -> dict[str, Any]:
    """Totals of the census, and the models that cannot be split."""
    with MODELS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    sources = [row["model"].partition("/")[0] for row in rows]
    failed = [row for row in rows if row["result"] != "equal"]
    return {
        "total": len(rows),
        "equal": len(rows) - len(failed),
        "by_source": Counter(sources),
        "others": len({row["model"] for row in rows})
        - sources.count("torchvision"),
        "failed": failed,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("record", type=Path, metavar="RECORD.json")
    add("--html", type=Path, metavar="DIR", help="write index.html there")
    add("--rst", type=Path, metavar="PATH", help="write the results page")
    add("--images", type=Path, metavar="DIR", help="figures of that page")
    options = parser.parse_args(argv)
    if (options.rst is None) != (options.images is None):
        parser.error("give both --rst and --images")
    try:
        record = load(options.record)
    except (OSError, ValueError) as error:
        print(f"benchmarks.report: {error}", file=sys.stderr)
        return 1
    if options.html is not None:
        print(f"written to {write_html(record, options.html)}")
    if options.rst is not None:
        write_rst(record, options.record, options.rst, options.images)
        print(f"written to {options.rst}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
