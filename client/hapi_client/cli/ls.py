"""``hapi ls``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from hapi_client.cli.context import (
    JsonPath,
    connect,
    print_facts,
    write_json,
)
from hapi_client.data.catalog import CatalogEntry, list_data_sets
from hapi_client.data.index import find_index, load_index
from hapi_client.data.listing import list_data
from hapi_client.reports.terminal import ConsoleReporter
from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location, parse_location
from hapi_protocol.data_index import ShardIndex


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
    containers = [
        {
            "name": container.name,
            "objects": container.num_objects,
            "bytes": container.length_bytes,
        }
        for container in connection.containers()
    ]
    columns = {"container": "name", "objects": "objects", "bytes": "bytes"}
    print_facts(containers, columns)
    return {"containers": containers}


def _list_location(
    connection: Connection, location: Location
) -> dict[str, Any]:
    index = find_index(connection, location)
    if index:
        shards = [
            _shard_facts(
                shard, len(shard.rows), sum(row.length for row in shard.rows)
            )
            for shard in index.shards
        ]
        return _list_shards(shards, index.class_names)
    data_sets = list_data_sets(connection, location)
    if index is not None or not data_sets:
        load_index(connection, location)  # raises what is missing
    if [data_set.location for data_set in data_sets] != [location]:
        return _list_data_sets(data_sets)
    stored = list_data(connection, location).shards
    facts = _list_shards(
        [_shard_facts(shard, None, shard.length_bytes) for shard in stored]
    )
    with ConsoleReporter() as reporter:
        reporter.note(
            f"{location} has no index; create it by 'hapi index {location}'"
        )
    return facts


def _list_data_sets(data_sets: list[CatalogEntry]) -> dict[str, Any]:
    facts = [
        {
            "name": str(data_set.location),
            "index": data_set.index,
            "shards": data_set.num_shards,
            "samples": data_set.num_samples,
            "bytes": data_set.length_bytes,
        }
        for data_set in data_sets
    ]
    same = {key: key for key in ("index", "shards", "samples", "bytes")}
    print_facts(facts, {"data set": "name", **same})
    return {"data_sets": facts}


def _shard_facts(
    shard: ShardIndex | ObjectInfo, num_samples: int | None, num_bytes: int
) -> dict[str, Any]:
    return {
        "name": shard.name,
        "samples": num_samples,
        "bytes": num_bytes,
        "etag": shard.etag,
    }


def _list_shards(
    shards: Sequence[dict[str, Any]], class_names: Sequence[str] = ()
) -> dict[str, Any]:
    columns = {"shard": "name", "samples": "samples", "bytes": "bytes"}
    print_facts(shards, columns)
    return {"shards": shards, "classes": list(class_names)}
