"""The objects of a data set: tar shards, or loose images and arrays.

Loose objects are listed as *groups* of up to :data:`GROUP_SAMPLES`, in the
order of a hash, so that a group mixes the folders.  A group is a shard whose
samples are objects; its ETag is made of theirs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import INDEX_NAME, MAX_SPAN_SAMPLES
from hapi_protocol.samples import ARCHIVE, ARRAY, IMAGE, is_hidden

SHARD_SUFFIX = ".tar"
GROUP_SAMPLES = MAX_SPAN_SAMPLES
_MEDIA = (IMAGE, ARRAY, ARCHIVE)


@dataclass(frozen=True)
class Listing:
    """The objects of a data set.

    Attributes:
        shards: tar shards, or groups of loose objects, by name.
        groups: the objects of each group; empty for tar shards.
        index: its index; None without one.
        inner: folders below it that have an index of their own.
    """

    shards: Sequence[ObjectInfo] = ()
    groups: Mapping[str, Sequence[ObjectInfo]] = field(default_factory=dict)
    index: ObjectInfo | None = None
    inner: Sequence[Location] = ()

    @property
    def etags(self) -> dict[str, str]:
        """ETag of each shard, by name."""
        return {shard.name: shard.etag for shard in self.shards}

    @classmethod
    def of(
        cls,
        location: Location,
        objects: Iterable[ObjectInfo],
        inner: Sequence[Location] = (),
    ) -> Listing:
        """Makes the listing of the objects of a folder."""
        objects = list(objects)
        indexes = [x for x in objects if x.name == location.index_name]
        shards = [x for x in objects if x.name.endswith(SHARD_SUFFIX)]
        groups = {} if shards else _grouped(location, objects)
        return cls(
            shards or [_group_info(*group) for group in groups.items()],
            groups,
            indexes[0] if indexes else None,
            inner,
        )


def list_objects(
    connection: Connection, location: Location
) -> list[ObjectInfo]:
    """Lists shards, indexes and loose samples in a folder and below it.

    A dynamic large object is listed as an empty one, so those are asked for
    themselves.

    Raises:
        HapiError: if there is no such container, or it may not be listed.
    """
    objects = connection.list(location.container, folder_of(location))
    return [
        info
        if info.length_bytes or not info.name.endswith(SHARD_SUFFIX)
        else connection.head(location.container, info.name) or info
        for info in objects
        if not is_hidden(info.name)
        and (
            info.name.endswith((SHARD_SUFFIX, INDEX_NAME)) or _is_sample(info)
        )
    ]


def list_data(connection: Connection, location: Location) -> Listing:
    """Lists a data set.

    Folders below it that have an index are other data sets.  Loose samples
    count if there is no tar.

    Raises:
        HapiError: as :func:`list_objects`.
    """
    objects = list_objects(connection, location)
    folders = sorted(
        info.name.removesuffix(f"/{INDEX_NAME}")
        for info in objects
        if info.name.endswith(f"/{INDEX_NAME}")
        and info.name != location.index_name
    )
    below = tuple(f"{folder}/" for folder in folders)
    return Listing.of(
        location,
        (info for info in objects if not info.name.startswith(below)),
        [Location(location.container, folder) for folder in folders],
    )


def folder_of(location: Location) -> str:
    """The beginning of the names of the objects in a folder."""
    return f"{location.prefix}/" if location.prefix else ""


def _is_sample(info: ObjectInfo) -> bool:
    extension = info.name.rpartition("/")[2].partition(".")[2]
    return info.length_bytes > 0 and any(
        medium.has(extension) for medium in _MEDIA
    )


def _grouped(
    location: Location, objects: Sequence[ObjectInfo]
) -> dict[str, list[ObjectInfo]]:
    samples = sorted(
        filter(_is_sample, objects),
        key=lambda info: hashlib.sha256(info.name.encode()).digest(),
    )
    return {
        location.object_name(f"objects-{start // GROUP_SAMPLES:06d}"): samples[
            start : start + GROUP_SAMPLES
        ]
        for start in range(0, len(samples), GROUP_SAMPLES)
    }


def _group_info(name: str, objects: Sequence[ObjectInfo]) -> ObjectInfo:
    digest = hashlib.sha256()
    for info in objects:
        digest.update(f"{len(info.name)}:{info.name} {info.etag}\n".encode())
    length_bytes = sum(info.length_bytes for info in objects)
    return ObjectInfo(name, digest.hexdigest(), length_bytes)
