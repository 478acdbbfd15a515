"""Index of a data set: loading, updating and storing it."""

from __future__ import annotations

import hashlib
import io
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from hapi_client.data.listing import SHARD_SUFFIX, folder_of, list_data
from hapi_client.swift.connection import Connection
from hapi_client.swift.retry import read_again
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import INDEX_NAME, DataIndex
from hapi_protocol.errors import (
    ConflictError,
    DataIndexError,
    HapiError,
    NotFoundError,
)
from hapi_protocol.samples import IMAGE

logger = logging.getLogger(__name__)

CONTENT_TYPE_INDEX = "application/vnd.apache.arrow.stream"
MAX_LISTED = 10_000
"""Maximum number of objects listed to find out why there is no index."""
MAX_NAMED = 5
_MD5 = re.compile("[0-9a-f]{32}")


def load_index(connection: Connection, location: Location) -> DataIndex:
    """Loads the index of a data set.

    Raises:
        DataIndexError: if there is none, or it is empty or of another
            version.
        RightsError: if there is no such container.
    """
    try:
        index = _read_index(connection, location)
    except NotFoundError as error:
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
    if index.unchecked_shards:
        logger.warning("%s", unchecked_text(location, index))
    return index


def unchecked_text(location: Location, index: DataIndex) -> str:
    """Says what an index of version 1 lacks."""
    return (
        f"the index of {location} has no checksums for "
        f"{index.unchecked_shards} of {len(index.shards)} shards, so that "
        "damage on the store's disks is not noticed; add them with "
        f"'hapi index {location}'"
    )


def _missing_index_text(connection: Connection, location: Location) -> str:
    """Explains, by a short listing, why there is no index.

    Raises:
        HapiError: if there is no such container.
    """
    remedy = (
        f"{location} has no index; repeat 'hapi upload' if it was "
        f"interrupted, or run 'hapi index {location}' for shards, or images, "
        "that were stored in another way"
    )
    container = Location(location.container)
    try:
        names = _some_names(connection, location)
        inner = _data_sets_text(
            container, [name for name in names if name.endswith(INDEX_NAME)]
        )
        if inner:
            return f"{location} is no data set; choose one below it: {inner}"
        if any(
            name.endswith(SHARD_SUFFIX) or IMAGE.has(name) for name in names
        ):
            return remedy
        others = _data_sets_text(
            container,
            [
                name
                for name in _some_names(connection, container)
                if name.endswith((SHARD_SUFFIX, INDEX_NAME))
            ],
        )
    except HapiError as error:
        if error.status == 404:
            raise
        # Permission to read objects does not include listing them.
        logger.info("the container cannot be listed: %s", error)
        return remedy
    if not others:
        return f"{location} has no object ending in {SHARD_SUFFIX}"
    return (
        f"{location} has no object ending in {SHARD_SUFFIX}; among the data "
        f"sets in this container are {others}"
    )


def _data_sets_text(container: Location, names: Sequence[str]) -> str:
    """Names some of the folders of objects; empty if there are none."""
    folders = sorted({name.rpartition("/")[0] for name in names})
    locations = [
        str(Location(container.container, folder)) for folder in folders
    ]
    more = ", ..." if len(locations) > MAX_NAMED else ""
    return ", ".join(locations[:MAX_NAMED]) + more


def find_index(
    connection: Connection, location: Location, suffix: str = ""
) -> DataIndex | None:
    """Loads the index of a data set; returns None if there is none."""
    try:
        return _read_index(connection, location, suffix)
    except NotFoundError:
        return None


def _read_index(
    connection: Connection, location: Location, suffix: str = ""
) -> DataIndex:
    def read() -> DataIndex:
        with connection.open(
            location.container, location.index_name + suffix
        ) as body:
            return DataIndex.from_bytes(
                body.read_whole(), name=f"{location}: the index"
            )

    try:
        return read_again(read)
    except HapiError as error:
        if error.code == "source_damaged":
            error.message += f"; or run 'hapi index {location}'"
        raise


def store_index(
    connection: Connection,
    location: Location,
    index: DataIndex,
    suffix: str = "",
) -> None:
    data = index.to_bytes()
    connection.put(
        location.container,
        location.index_name + suffix,
        io.BytesIO(data),
        len(data),
        content_type=CONTENT_TYPE_INDEX,
        md5=hashlib.md5(data, usedforsecurity=False).hexdigest(),
    )


@dataclass(frozen=True)
class IndexState:
    """A data set when the work on its index begins.

    Attributes:
        index_etag: ETag of its index; None without one.
        shards: names of its tar shards.
    """

    index_etag: str | None
    shards: frozenset[str]

    @classmethod
    def of(cls, connection: Connection, location: Location) -> IndexState:
        """Reads the state."""
        etag = _index_etag(connection, location)
        return cls(etag, _shards(connection, location))


def _index_etag(connection: Connection, location: Location) -> str | None:
    info = connection.head(location.container, location.index_name)
    return None if info is None else info.etag


def _shards(connection: Connection, location: Location) -> frozenset[str]:
    return frozenset(
        shard.name
        for shard in list_data(connection, location).shards
        if shard.name.endswith(SHARD_SUFFIX)
    )


def replace_index(
    connection: Connection,
    location: Location,
    index: DataIndex,
    before: IndexState,
) -> None:
    """Stores the index of a data set, unless another process has meanwhile.

    Swift cannot store an object only if it is still the same, so that two
    processes may store theirs at once.  Each stores its shards first: the one
    whose index is the last finds the other's shards.

    Args:
        connection: connection to the account.
        location: location of the data set.
        index: the new index.
        before: the state when the work on it began.

    Raises:
        ConflictError: there is another index, or there are other shards.
    """
    remedy = f"when both have ended, run 'hapi index {location}'"
    if _index_etag(connection, location) != before.index_etag:
        if find_index(connection, location) != index:
            raise ConflictError(
                "job_conflict",
                f"another upload to {location}, or another 'hapi index', has "
                "written its index meanwhile, which does not have what this "
                f"one stored; {remedy}",
            )
        return
    store_index(connection, location, index)
    known = before.shards | index.etags.keys()
    new = sorted(_shards(connection, location) - known)
    if new:
        more = f" and {len(new) - 1} more" if len(new) > 1 else ""
        raise ConflictError(
            "job_conflict",
            f"another upload to {location} stored {new[0]}{more} meanwhile, "
            f"which the new index does not have; {remedy}",
        )


def _some_names(connection: Connection, location: Location) -> list[str]:
    """Returns the first object names of the data set."""
    listed = connection.list(location.container, folder_of(location))
    return [info.name for info in islice(listed, MAX_LISTED)]
