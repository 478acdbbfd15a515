"""``hapi index``."""

from __future__ import annotations

from dataclasses import asdict

import typer

from hapi_client.cli.context import (
    DataArgument,
    JsonPath,
    connect,
    print_table,
    write_json,
)
from hapi_client.data.index import update_index
from hapi_client.progress import ConsoleReporter
from hapi_client.swift.swift_url import parse_location


def index_command(
    context: typer.Context, data: DataArgument, json_path: JsonPath = None
) -> None:
    """Write the index of shards that are in the store already.

    The store reads each shard once, next to the data; only the index rows
    travel. Shards that the index knows by their ETag are passed over.

    Example:

        hapi index swift://photos/train

    Keys of --json: indexed, skipped, removed, samples.
    """
    with connect(context) as connection, ConsoleReporter() as reporter:
        report = update_index(
            connection,
            parse_location(data),
            lambda name: reporter.note(f"reading {name}"),
        )
    print_table(
        ("indexed shards", "known already", "gone", "samples in index"),
        [
            (
                str(report.indexed),
                str(report.skipped),
                str(report.removed),
                str(report.samples),
            )
        ],
    )
    write_json(json_path, asdict(report))
