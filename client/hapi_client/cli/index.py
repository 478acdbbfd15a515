"""``hapi index`` and ``hapi ls``."""

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
from hapi_client.index import load_index, update_index
from hapi_client.location import parse_location
from hapi_client.progress import ConsoleReporter
from hapi_splitter.quantities import bytes_text


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


def ls_command(
    context: typer.Context, data: DataArgument, json_path: JsonPath = None
) -> None:
    """List the shards of a data set, from its index.

    Example:

        hapi ls swift://photos/train

    Keys of --json: shards (name, samples, bytes, etag), classes.
    """
    with connect(context) as connection:
        index = load_index(connection, parse_location(data))
    sizes = [sum(row.length for row in shard.rows) for shard in index.shards]
    print_table(
        ("shard", "samples", "bytes"),
        [
            (shard.name, str(len(shard.rows)), bytes_text(size))
            for shard, size in zip(index.shards, sizes, strict=True)
        ],
    )
    shards = [
        {
            "name": shard.name,
            "samples": len(shard.rows),
            "bytes": size,
            "etag": shard.etag,
        }
        for shard, size in zip(index.shards, sizes, strict=True)
    ]
    write_json(
        json_path, {"shards": shards, "classes": list(index.class_names)}
    )
