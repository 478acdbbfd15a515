"""``hapi ls``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hapi_client.cli.context import (
    JsonPath,
    connect,
    print_table,
    write_json,
)
from hapi_client.data.catalog import CatalogEntry, list_data_sets
from hapi_client.data.index import find_index, load_index
from hapi_client.data.listing import list_data
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location, parse_location
from hapi_protocol.data_index import DataIndex
from hapi_splitter.units import bytes_text


def ls_command(
    context: typer.Context,
    data: Annotated[
        str,
        typer.Argument(
            metavar="[CONTAINER[/PREFIX]]",
            help="Container or data set. The swift:// prefix is optional. "
            "Default: all containers of the account.",
        ),
    ] = "",
    json_path: JsonPath = None,
) -> None:
    """List containers, the data sets of one, or the shards of a data set.

    A data set is a folder of shards (.tar). Its index is there, missing,
    damaged, or stale (shards were added, removed or changed); 'hapi index'
    repairs it. Without an index the number of samples is unknown. Swift
    updates the counts of containers some time after a change.

    Examples:

        hapi ls

        hapi ls swift://photos

        hapi ls swift://photos/train

    Keys of --json: containers (name, objects, bytes); or data_sets (name,
    index, shards, samples, bytes); or shards (name, samples, bytes, etag)
    and classes; bytes are those of the samples, or of the whole object if
    there is no index.
    """
    with connect(context) as connection:
        if data:
            facts = _list_location(connection, parse_location(data))
        else:
            facts = _list_containers(connection)
    write_json(json_path, facts)


def _list_containers(connection: Connection) -> dict[str, Any]:
    containers = list(connection.containers())
    print_table(
        ("container", "objects", "bytes"),
        [
            (each.name, str(each.num_objects), bytes_text(each.length_bytes))
            for each in containers
        ],
    )
    return {
        "containers": [
            {
                "name": each.name,
                "objects": each.num_objects,
                "bytes": each.length_bytes,
            }
            for each in containers
        ]
    }


def _list_location(
    connection: Connection, location: Location
) -> dict[str, Any]:
    index = find_index(connection, location)
    if index:
        return _list_indexed(index)
    data_sets = list_data_sets(connection, location)
    if index is not None or not data_sets:
        load_index(connection, location)  # raises what is missing
    if [each.location for each in data_sets] == [location]:
        return _list_unindexed(connection, location)
    return _list_data_sets(data_sets)


def _list_data_sets(data_sets: list[CatalogEntry]) -> dict[str, Any]:
    print_table(
        ("data set", "index", "shards", "samples", "bytes"),
        [
            (
                str(each.location),
                each.index,
                str(each.num_shards),
                "?" if each.num_samples is None else str(each.num_samples),
                bytes_text(each.length_bytes),
            )
            for each in data_sets
        ],
    )
    return {
        "data_sets": [
            {
                "name": str(each.location),
                "index": each.index,
                "shards": each.num_shards,
                "samples": each.num_samples,
                "bytes": each.length_bytes,
            }
            for each in data_sets
        ]
    }


def _list_indexed(index: DataIndex) -> dict[str, Any]:
    shards: list[dict[str, Any]] = [
        {
            "name": shard.name,
            "samples": len(shard.rows),
            "bytes": sum(row.length for row in shard.rows),
            "etag": shard.etag,
        }
        for shard in index.shards
    ]
    _print_shards(shards)
    return {"shards": shards, "classes": list(index.class_names)}


def _list_unindexed(
    connection: Connection, location: Location
) -> dict[str, Any]:
    shards: list[dict[str, Any]] = [
        {
            "name": shard.name,
            "samples": None,
            "bytes": shard.length_bytes,
            "etag": shard.etag,
        }
        for shard in list_data(connection, location).shards
    ]
    _print_shards(shards)
    with ConsoleReporter() as reporter:
        reporter.note(
            f"{location} has no index; create it by 'hapi index {location}'"
        )
    return {"shards": shards, "classes": []}


def _print_shards(shards: list[dict[str, Any]]) -> None:
    print_table(
        ("shard", "samples", "bytes"),
        [
            (
                each["name"],
                "?" if each["samples"] is None else str(each["samples"]),
                bytes_text(each["bytes"]),
            )
            for each in shards
        ],
    )
