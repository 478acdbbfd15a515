"""Which data sets a container has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hapi_client.data.index import SHARD_SUFFIX, find_index
from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import INDEX_NAME, DataIndex
from hapi_protocol.errors import DataIndexError

INDEX_THERE = "there"
INDEX_STALE = "stale"
INDEX_DAMAGED = "damaged"
INDEX_MISSING = "missing"


@dataclass(frozen=True)
class ListedData:
    """A folder with shards, an index, or both.

    Attributes:
        location: of the folder.
        index: ``there``, ``stale`` (shards have come, gone or changed
            since), ``damaged`` or ``missing``.
        num_shards: that are there.
        num_samples: as the index says; None where it cannot.
        length_bytes: of the shards.
    """

    location: Location
    index: str
    num_shards: int
    num_samples: int | None
    length_bytes: int


@dataclass(frozen=True)
class IndexDifference:
    """Shards whose index rows are not those of the objects.

    Attributes:
        changed: they have another ETag by now.
        missing: the index has them, the container has not.
        added: the container has them, the index has not.
    """

    changed: tuple[str, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def is_stale(self) -> bool:
        """Whether ``hapi index`` would write another one."""
        return bool(self.changed or self.missing or self.added)

    @classmethod
    def between(
        cls, index: DataIndex, etags: Mapping[str, str]
    ) -> IndexDifference:
        """
        Args:
            index: of the data set.
            etags: of its shards, by name.
        """
        known = index.etags
        both = sorted(known.keys() & etags.keys())
        return cls(
            changed=tuple(n for n in both if known[n] != etags[n]),
            missing=tuple(sorted(known.keys() - etags.keys())),
            added=tuple(sorted(etags.keys() - known.keys())),
        )


def list_data_sets(
    connection: Connection, location: Location
) -> list[ListedData]:
    """The data sets in a folder and those below it, by name.

    As for ``hapi index``, all shards below a folder with an index belong to
    it; others are told of by the folder that they lie in.

    Raises:
        HapiError: there is no such container, or it may not be listed.
    """
    prefix = f"{location.prefix}/" if location.prefix else ""
    objects = [
        each
        for each in connection.list(location.container, prefix)
        if each.name.endswith((SHARD_SUFFIX, INDEX_NAME))
    ]
    indexed = {
        _folder_of(each.name)
        for each in objects
        if each.name.rpartition("/")[2] == INDEX_NAME
    }
    shards: dict[str, list[ObjectInfo]] = {folder: [] for folder in indexed}
    for each in objects:
        if each.name.endswith(SHARD_SUFFIX):
            own = _folder_of(each.name)
            for home in indexed & _ancestors(own) or {own}:
                shards.setdefault(home, []).append(each)
    return [
        _describe(
            connection,
            Location(location.container, folder),
            found,
            is_indexed=folder in indexed,
        )
        for folder, found in sorted(shards.items())
    ]


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def _ancestors(folder: str) -> set[str]:
    """A folder and those above it, up to the container itself."""
    parts = folder.split("/")
    return {"/".join(parts[:count]) for count in range(len(parts) + 1)}


def _describe(
    connection: Connection,
    location: Location,
    shards: list[ObjectInfo],
    *,
    is_indexed: bool,
) -> ListedData:
    index, state = None, INDEX_MISSING
    if is_indexed:
        index, state = _read_index(connection, location)
    if index is not None:
        etags = {each.name: each.etag for each in shards}
        if IndexDifference.between(index, etags).is_stale:
            state = INDEX_STALE
    return ListedData(
        location,
        state,
        num_shards=len(shards),
        num_samples=None if index is None else len(index),
        length_bytes=sum(each.length_bytes for each in shards),
    )


def _read_index(
    connection: Connection, location: Location
) -> tuple[DataIndex | None, str]:
    try:
        index = find_index(connection, location)
    except DataIndexError:
        return None, INDEX_DAMAGED
    return index, INDEX_MISSING if index is None else INDEX_THERE
