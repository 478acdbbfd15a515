"""The index of a data set: loading it, and writing it for others' shards."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.connection import Connection
from hapi_client.swift.retry import is_retryable
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import (
    INDEX_NAME,
    DataIndex,
    IndexRow,
    ShardIndex,
)
from hapi_protocol.errors import DataIndexError, HapiError, RightsError
from hapi_protocol.headers import Annotation
from hapi_protocol.shards import Sample

if TYPE_CHECKING:
    from hapi_protocol.feature_stream import Row

logger = logging.getLogger(__name__)

SHARD_SUFFIX = ".tar"
CONTENT_TYPE_INDEX = "application/vnd.apache.arrow.stream"
SHARD_TRIES = 3
MAX_LISTED = 10_000
"""Objects that are looked at for data sets of another name."""
MAX_NAMED = 5


@dataclass(frozen=True)
class NamedRow:
    """An index row whose label may still be a class name."""

    row: IndexRow
    class_name: str | None = None


def load_index(connection: Connection, location: Location) -> DataIndex:
    """The index of a data set.

    Raises:
        DataIndexError: when there is none, none of this version, or an
            empty one.
        RightsError: when there is no such container.
    """
    try:
        index = _read_index(connection, location)
    except RightsError as error:
        if error.status != 404:
            raise
        raise DataIndexError(
            "bad_index",
            _what_is_missing(connection, location),
            object_name=location.index_name,
            trans_id=error.trans_id,
        ) from error
    if not len(index):
        raise DataIndexError(
            "bad_index",
            f"the index of {location} has no samples",
            object_name=location.index_name,
        )
    return index


def _what_is_missing(connection: Connection, location: Location) -> str:
    """Why there is no index, as far as a short listing tells.

    Raises:
        HapiError: there is no container.
    """
    remedy = (
        f"{location} has no index: 'hapi upload' was broken off, and goes on "
        "when it is repeated; or others have stored it, and 'hapi index "
        f"{location}' writes one of the shards that are there"
    )
    try:
        if any(
            name.endswith(SHARD_SUFFIX)
            for name in _some_names(connection, location)
        ):
            return remedy
        folders = {
            name.rpartition("/")[0]
            for name in _some_names(connection, Location(location.container))
            if name.endswith((SHARD_SUFFIX, INDEX_NAME))
        }
    except HapiError as error:
        if error.status == 404:
            raise
        # Who may read objects may not list them for that.
        logger.info("why there is no index is not known: %s", error)
        return remedy
    found = sorted(str(Location(location.container, each)) for each in folders)
    if not found:
        return f"{location} has no object ending in {SHARD_SUFFIX}"
    more = ", ..." if len(found) > MAX_NAMED else ""
    return (
        f"{location} has no object ending in {SHARD_SUFFIX}; among the data "
        f"sets in this container are {', '.join(found[:MAX_NAMED])}{more}"
    )


def find_index(connection: Connection, location: Location) -> DataIndex | None:
    """The index of a data set, None where there is none."""
    try:
        return _read_index(connection, location)
    except RightsError as error:
        if error.status == 404:
            return None
        raise


def _read_index(connection: Connection, location: Location) -> DataIndex:
    with connection.open(location.container, location.index_name) as body:
        return DataIndex.from_bytes(body.read(), name=f"{location}: the index")


def store_index(
    connection: Connection, location: Location, index: DataIndex
) -> None:
    data = index.to_bytes()
    connection.put(
        location.container,
        location.index_name,
        io.BytesIO(data),
        len(data),
        content_type=CONTENT_TYPE_INDEX,
    )


def list_shards(
    connection: Connection, location: Location
) -> list[ObjectInfo]:
    """The data set's tar objects, in name order."""
    return [
        found
        for found in connection.list(location.container, _folder(location))
        if found.name.endswith(SHARD_SUFFIX)
    ]


def _folder(location: Location) -> str:
    return f"{location.prefix}/" if location.prefix else ""


def _some_names(connection: Connection, location: Location) -> Iterator[str]:
    """The first ones."""
    listed = connection.list(location.container, _folder(location))
    return (each.name for each in islice(listed, MAX_LISTED))


def sample_row(sample: Sample) -> NamedRow:
    """The index row of a sample that was read here."""
    label, meta = sample.label_and_meta()
    row = IndexRow(
        sample.index, sample.key, sample.offset, sample.length, label
    )
    return NamedRow(row, _class_name(label, meta))


def stream_row(row: Row) -> NamedRow:
    """The index row of a row of the store's index stream."""
    found = IndexRow(row.index, row.key, row.offset, row.length, row.label)
    return NamedRow(found, _class_name(row.label, row.meta))


def _class_name(label: int | None, meta: str | None) -> str | None:
    if label is not None or meta is None:
        return None
    try:
        facts = json.loads(meta)
    except ValueError:
        return None
    name = facts.get("cls") if isinstance(facts, dict) else None
    return name if isinstance(name, str) else None


def number_classes(
    shards: Iterable[tuple[ObjectInfo, Sequence[NamedRow]]],
    known: Sequence[str] = (),
) -> tuple[list[ShardIndex], tuple[str, ...]]:
    """Turns class names into integers.

    Args:
        shards: with their rows.
        known: names that have their integers already, kept as they are.

    Returns:
        The shards' index, and the names of all integers: ``known``, then
        the new ones in sorted order.
    """
    found = [(shard, list(rows)) for shard, rows in shards]
    names = {row.class_name for _, rows in found for row in rows} - {None}
    fresh = sorted(str(name) for name in names - set(known))
    class_names = (*known, *fresh)
    number = {name: label for label, name in enumerate(class_names)}
    return [
        ShardIndex(
            shard.name,
            shard.etag,
            tuple(
                replace(each.row, label=number[each.class_name])
                if each.class_name is not None
                else each.row
                for each in rows
            ),
        )
        for shard, rows in found
    ], class_names


@dataclass(frozen=True)
class IndexReport:
    """What :func:`update_index` did.

    Attributes:
        indexed: shards that were read.
        skipped: shards whose ETag was in the index already.
        removed: shards of the old index that are gone.
        samples: of the whole index.
    """

    indexed: int
    skipped: int
    removed: int
    samples: int


def update_index(
    connection: Connection,
    location: Location,
    on_shard: Callable[[str], None] = lambda name: None,
) -> IndexReport:
    """Writes the index of a data set; the store reads the shards.

    Shards whose ETag stands in the index are passed over; the index is
    stored after each shard's rows are known, once, at the end.

    Args:
        connection: to the account.
        location: of the data set.
        on_shard: told the name of each shard before it is read.

    Raises:
        DataIndexError: when there is no shard.
        HapiError: naming the shard that cannot be read.
    """
    connection.require_hapi()
    shards = list_shards(connection, location)
    if not shards:
        raise DataIndexError(
            "bad_index",
            f"{location} has no object ending in {SHARD_SUFFIX}",
        )
    old = find_index(connection, location) or DataIndex(())
    fresh = [s for s in shards if old.etags.get(s.name) != s.etag]
    rows = []
    for shard in fresh:
        on_shard(shard.name)
        rows.append((shard, _read_rows(connection, location, shard)))
    added, class_names = number_classes(rows, old.class_names)
    index = merged(old, added, class_names, {s.name for s in shards})
    store_index(connection, location, index)
    return IndexReport(
        indexed=len(fresh),
        skipped=len(shards) - len(fresh),
        removed=len(old.etags.keys() - {s.name for s in shards}),
        samples=len(index),
    )


def merged(
    old: DataIndex,
    added: Iterable[ShardIndex],
    class_names: Sequence[str],
    present: set[str],
) -> DataIndex:
    """``old`` with ``added``, without shards that are not ``present``."""
    index = old.replace(added)
    return DataIndex(
        tuple(shard for shard in index.shards if shard.name in present),
        tuple(class_names),
    )


def _read_rows(
    connection: Connection, location: Location, shard: ObjectInfo
) -> list[NamedRow]:
    # The command line is there sooner without pyarrow.
    from hapi_protocol.feature_reader import read_features

    annotation = Annotation(
        model=None, cut=0, index=True, if_source_etag=shard.etag
    )
    for tries_left in reversed(range(SHARD_TRIES)):
        try:
            with connection.get_features(
                location.container, shard.name, annotation
            ) as body:
                return [
                    stream_row(row)
                    for batch in read_features(body)
                    for row in batch.rows
                ]
        except HapiError as error:
            if not tries_left or not is_retryable(error):
                raise
            logger.info("index of %s again after: %s", shard.name, error)
    raise AssertionError("unreachable")
