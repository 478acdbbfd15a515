"""Catalog of the data sets in a container."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hapi_client.data.index import find_index
from hapi_client.data.listing import SHARD_SUFFIX, Listing, list_objects
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
class CatalogEntry:
    """A folder with shards, an index, or both.

    Attributes:
        location: location of the folder.
        index: ``there``, ``stale`` (shards were added, removed or changed
            since it was written), ``damaged`` or ``missing``.
        num_shards: number of shards in the folder.
        num_samples: number of samples in the index; None without a valid
            index.
        length_bytes: size of the shards.
    """

    location: Location
    index: str
    num_shards: int
    num_samples: int | None
    length_bytes: int


@dataclass(frozen=True)
class IndexDifference:
    """Shards that differ between an index and its container.

    Attributes:
        changed: shards with another ETag in the container.
        missing: shards in the index only.
        added: shards in the container only.
    """

    changed: tuple[str, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def is_stale(self) -> bool:
        """True if ``hapi index`` would write a different index."""
        return bool(self.changed or self.missing or self.added)

    @classmethod
    def between(
        cls, index: DataIndex, etags: Mapping[str, str]
    ) -> IndexDifference:
        """Compares an index with the container.

        Args:
            index: index of the data set.
            etags: ETags of the shards in the container, by name.
        """
        indexed = index.etags
        common = sorted(indexed.keys() & etags.keys())
        return cls(
            changed=tuple(n for n in common if indexed[n] != etags[n]),
            missing=tuple(sorted(indexed.keys() - etags.keys())),
            added=tuple(sorted(etags.keys() - indexed.keys())),
        )


def list_data_sets(
    connection: Connection, location: Location
) -> list[CatalogEntry]:
    """Lists the data sets in a folder and below it, by name.

    As for ``hapi index``, a shard belongs to the nearest folder above it that
    has an index; without one, to its own folder.

    Raises:
        HapiError: if there is no such container, or it may not be listed.
    """
    objects = list_objects(connection, location)
    indexed = {
        _folder_of(info.name)
        for info in objects
        if info.name.rpartition("/")[2] == INDEX_NAME
    }
    data_sets: dict[str, list[ObjectInfo]] = {folder: [] for folder in indexed}
    for info in objects:
        own = _folder_of(info.name)
        nearest = max(indexed & _ancestors(own), key=len, default=None)
        if nearest is not None:
            data_sets[nearest].append(info)
        elif info.name.endswith(SHARD_SUFFIX):
            data_sets.setdefault(own, []).append(info)
    return [
        _catalog_entry(
            connection,
            place := Location(location.container, folder),
            Listing.of(place, data_sets[folder]),
        )
        for folder in sorted(data_sets)
    ]


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def _ancestors(folder: str) -> set[str]:
    """Returns a folder and all above it, up to the container itself."""
    parts = folder.split("/")
    return {"/".join(parts[:count]) for count in range(len(parts) + 1)}


def _catalog_entry(
    connection: Connection,
    location: Location,
    listing: Listing,
) -> CatalogEntry:
    index, state = None, INDEX_MISSING
    if listing.index is not None:
        index, state = _read_index(connection, location)
    if (
        index is not None
        and IndexDifference.between(index, listing.etags).is_stale
    ):
        state = INDEX_STALE
    return CatalogEntry(
        location,
        state,
        num_shards=len(listing.shards),
        num_samples=None if index is None else len(index),
        length_bytes=sum(shard.length_bytes for shard in listing.shards),
    )


def _read_index(
    connection: Connection, location: Location
) -> tuple[DataIndex | None, str]:
    try:
        index = find_index(connection, location)
    except DataIndexError:
        return None, INDEX_DAMAGED
    return index, INDEX_MISSING if index is None else INDEX_THERE
