"""Index of a data set: loading, updating and storing it."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from hapi_protocol.errors import (
    DataIndexError,
    HapiError,
    RightsError,
    TruncatedStreamError,
)
from hapi_protocol.headers import Annotation
from hapi_protocol.shards import Sample

if TYPE_CHECKING:
    from hapi_protocol.feature_stream import Row

logger = logging.getLogger(__name__)

SHARD_SUFFIX = ".tar"
CONTENT_TYPE_INDEX = "application/vnd.apache.arrow.stream"
MAX_ATTEMPTS = 3
MAX_LISTED = 10_000
"""Maximum number of objects listed to find out why there is no index."""
MAX_NAMED = 5
_MD5 = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class NamedRow:
    """An index row whose label may still be a class name."""

    row: IndexRow
    class_name: str | None = None


def load_index(connection: Connection, location: Location) -> DataIndex:
    """Loads the index of a data set.

    Raises:
        DataIndexError: if there is none, or it is empty or of another
            version.
        RightsError: if there is no such container.
    """
    try:
        index = _read_index(connection, location)
    except RightsError as error:
        if error.status != 404:
            raise
        raise DataIndexError(
            "bad_index",
            _missing_index_text(connection, location),
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


def _missing_index_text(connection: Connection, location: Location) -> str:
    """Explains, by a short listing, why there is no index.

    Raises:
        HapiError: if there is no such container.
    """
    remedy = (
        f"{location} has no index; repeat 'hapi upload' if it was "
        f"interrupted, or run 'hapi index {location}' for shards that were "
        "stored in another way"
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
        # Permission to read objects does not include listing them.
        logger.info("the container cannot be listed: %s", error)
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
    """Loads the index of a data set; returns None if there is none."""
    try:
        return _read_index(connection, location)
    except RightsError as error:
        if error.status == 404:
            return None
        raise


def _read_index(connection: Connection, location: Location) -> DataIndex:
    for attempts_left in reversed(range(MAX_ATTEMPTS)):
        try:
            with connection.open(
                location.container, location.index_name
            ) as body:
                data = body.read()
                _check_digest(location, data, body.headers)
                return DataIndex.from_bytes(
                    data, name=f"{location}: the index"
                )
        except HapiError as error:
            # The body broke off: until there is one, requests are repeated.
            if not attempts_left or not is_retryable(error):
                raise
    raise AssertionError("unreachable")


def _check_digest(
    location: Location, data: bytes, headers: Mapping[str, str]
) -> None:
    """Compares the index with its ETag, which is the MD5 of what was stored.

    Raises:
        TruncatedStreamError: it differs; another replica may be intact.
    """
    expected = headers.get("ETag", "").strip('"')
    is_manifest = "X-Static-Large-Object" in headers
    if is_manifest or not _MD5.fullmatch(expected):
        return
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != expected:
        raise TruncatedStreamError(
            "truncated",
            f"{location}: the index is damaged: its {len(data)} bytes have "
            f"the MD5 {found}, and {expected} was stored; if this stays so, "
            f"rewrite it with 'hapi index {location}'",
            object_name=location.index_name,
        )


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
        md5=hashlib.md5(data, usedforsecurity=False).hexdigest(),
    )


def list_shards(
    connection: Connection, location: Location
) -> list[ObjectInfo]:
    """Lists the data set's tar objects, by name."""
    return [
        each
        for each in connection.list(location.container, _folder(location))
        if each.name.endswith(SHARD_SUFFIX)
    ]


def _folder(location: Location) -> str:
    return f"{location.prefix}/" if location.prefix else ""


def _some_names(connection: Connection, location: Location) -> Iterator[str]:
    """Yields the first object names of the data set."""
    listed = connection.list(location.container, _folder(location))
    return (each.name for each in islice(listed, MAX_LISTED))


def sample_row(sample: Sample) -> NamedRow:
    """Makes the index row of a local sample."""
    label, meta = sample.label_and_meta()
    row = IndexRow(
        sample.index, sample.key, sample.offset, sample.length, label
    )
    return NamedRow(row, _class_name(label, meta))


def stream_row(row: Row) -> NamedRow:
    """Makes the index row of a row of the store's index stream."""
    index_row = IndexRow(row.index, row.key, row.offset, row.length, row.label)
    return NamedRow(index_row, _class_name(row.label, row.meta))


def _class_name(label: int | None, meta: str | None) -> str | None:
    if label is not None or meta is None:
        return None
    try:
        facts = json.loads(meta)
    except (ValueError, RecursionError):
        return None
    name = facts.get("cls") if isinstance(facts, dict) else None
    return name if isinstance(name, str) else None


def number_classes(
    shards: Iterable[tuple[ObjectInfo, Sequence[NamedRow]]],
    known: Sequence[str] = (),
) -> tuple[list[ShardIndex], tuple[str, ...]]:
    """Turns class names into integers.

    Args:
        shards: shards with their rows.
        known: class names that keep their numbers.

    Returns:
        The shards' index, and all class names: ``known``, then the new ones
        in sorted order.
    """
    all_rows = [(shard, list(rows)) for shard, rows in shards]
    names = {row.class_name for _, rows in all_rows for row in rows} - {None}
    added = sorted(str(name) for name in names - set(known))
    class_names = (*known, *added)
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
        for shard, rows in all_rows
    ], class_names


@dataclass(frozen=True)
class IndexReport:
    """Result of :func:`update_index`.

    Attributes:
        indexed: number of shards that were read.
        skipped: number of shards whose ETag was already in the index.
        removed: number of shards of the old index that no longer exist.
        samples: number of samples of the whole index.
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
    """Updates the index of a data set; the store reads the shards.

    Shards whose ETag is in the index are skipped.  The index is stored once,
    at the end.

    Args:
        connection: connection to the account.
        location: location of the data set.
        on_shard: called with the name of each shard before it is read.

    Raises:
        DataIndexError: if there is no shard.
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
    changed = [s for s in shards if old.etags.get(s.name) != s.etag]
    rows = []
    for shard in changed:
        on_shard(shard.name)
        rows.append((shard, _read_rows(connection, location, shard)))
    added, class_names = number_classes(rows, old.class_names)
    index = merge_shards(old, added, class_names, {s.name for s in shards})
    store_index(connection, location, index)
    return IndexReport(
        indexed=len(changed),
        skipped=len(shards) - len(changed),
        removed=len(old.etags.keys() - {s.name for s in shards}),
        samples=len(index),
    )


def merge_shards(
    old: DataIndex,
    added: Iterable[ShardIndex],
    class_names: Sequence[str],
    present: set[str],
) -> DataIndex:
    """Returns ``old`` with ``added``, limited to the ``present`` shards."""
    index = old.replace(added)
    return DataIndex(
        tuple(shard for shard in index.shards if shard.name in present),
        tuple(class_names),
    )


def _read_rows(
    connection: Connection, location: Location, shard: ObjectInfo
) -> list[NamedRow]:
    # Imported here to keep pyarrow out of the command line's start-up.
    from hapi_protocol.feature_reader import read_features

    annotation = Annotation(
        model=None, cut=0, index=True, if_source_etag=shard.etag
    )
    for attempts_left in reversed(range(MAX_ATTEMPTS)):
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
            if not attempts_left or not is_retryable(error):
                raise
            logger.info("retrying the index of %s: %s", shard.name, error)
    raise AssertionError("unreachable")
