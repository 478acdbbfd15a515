"""``hapi index``."""

from __future__ import annotations

from dataclasses import asdict

import typer

from hapi_client.cli.context import (
    DataArgument,
    JsonPath,
    connect,
    print_facts,
    write_json,
)
from hapi_client.cli.options import ImageOption, LabelsOption
from hapi_client.data.indexing import IndexOptions, update_index
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.swift_url import parse_location


def index_command(
    context: typer.Context,
    data: DataArgument,
    labels: LabelsOption = None,
    image: ImageOption = None,
    json_path: JsonPath = None,
) -> None:
    """Write the index of a data set whose shards are stored in Swift.

    Each shard is read once on the storage side; only index rows travel.
    Shards whose ETag is in the index already are skipped. An interrupted
    command continues where it was. Folders that have an index of their own
    are other data sets and are left out. Loose images or arrays are listed
    only; a group of them counts as a shard.

    Examples:

        hapi index swift://photos/train

        hapi index swift://photos/train --labels json:annotation.class

    Keys of --json: indexed, skipped, removed, samples, empty, inner, notes.
    """
    with connect(context) as connection, ConsoleReporter() as reporter:
        report = update_index(
            connection,
            parse_location(data),
            lambda name: reporter.note(f"reading {name}"),
            IndexOptions(labels, image),
        )
        for note in report.notes:
            reporter.note(note)
        for name in report.empty:
            reporter.note(f"{name} has no sample")
        if report.inner:
            reporter.note(
                "left out, because they have an index of their own: "
                + ", ".join(report.inner)
            )
    facts = asdict(report)
    columns = {
        "indexed shards": "indexed",
        "unchanged": "skipped",
        "removed": "removed",
        "samples in index": "samples",
    }
    print_facts([facts], columns)
    write_json(json_path, facts)
