"""Large objects of Swift: segments, of which some are sent or read at once."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from hapi_client.swift.connection import Connection
from hapi_protocol.errors import ClientError
from hapi_protocol.headers import ByteRange

T = TypeVar("T")

# Chosen: larger ones are no faster, and four of a checkpoint of 128 MiB are
# sent at once.
SEGMENT_BYTES = 32 << 20
NUM_THREADS = 4
"""Segments that a rank sends or reads at once."""
MAX_SEGMENTS = 1000
"""Default of Swift's ``max_manifest_segments``."""


@dataclass(frozen=True)
class Segment:
    """A part of an object.

    Attributes:
        name: its name in the container of segments.
        etag: its MD5, in hexadecimal digits.
        size: its length, in bytes.
    """

    name: str
    etag: str
    size: int


def segments_of(container: str) -> str:
    """Returns the container of the segments of a container's objects.

    Raises:
        ClientError: ``bad_configuration`` for another account's container:
            Swift reads segments of an object's own account only.
    """
    if container.startswith("/"):
        raise ClientError(
            "bad_configuration",
            f"{container} is in another account; checkpoints are written to "
            "one's own: give swift://CONTAINER/PREFIX, and credentials of "
            "that account",
        )
    return f"{container}_segments"


def segment_bytes(size: int) -> int:
    """Returns the length of the segments of an object of a given size."""
    return max(SEGMENT_BYTES, -(-size // MAX_SEGMENTS))


def put_segment(
    connection: Connection, container: str, name: str, data: bytes
) -> Segment:
    """Uploads a segment; Swift compares its MD5."""
    etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
    connection.put(container, name, io.BytesIO(data), len(data), md5=etag)
    return Segment(name, etag, len(data))


def put_manifest(
    connection: Connection,
    container: str,
    name: str,
    segments: Sequence[Segment],
    headers: Mapping[str, str] | None = None,
) -> None:
    """Makes an object of segments that are there.

    Args:
        connection: connection to the account.
        container: container of the object.
        name: its name.
        segments: its parts; Swift compares their ETags and lengths.
        headers: further headers, such as ``If-None-Match``.

    Raises:
        HapiError: of Swift.
    """
    there = segments_of(container)
    manifest = json.dumps(
        [
            {
                "path": f"/{there}/{segment.name}",
                "etag": segment.etag,
                "size_bytes": segment.size,
            }
            for segment in segments
        ]
    ).encode()
    connection.put(
        container,
        name,
        io.BytesIO(manifest),
        len(manifest),
        headers=headers,
        query={"multipart-manifest": "put"},
    )


def read_range(
    connection: Connection,
    container: str,
    name: str,
    etag: str,
    start: int,
    stop: int,
) -> bytes:
    """Reads bytes of one version of an object, by some requests at once."""

    def get(first: int) -> bytes:
        last = min(stop, first + SEGMENT_BYTES) - 1
        return connection.get_range(
            container, name, ByteRange(first, last), if_match=etag
        )

    return b"".join(in_parallel(get, range(start, stop, SEGMENT_BYTES)))


def in_parallel(
    function: Callable[[int], T], numbers: Iterable[int]
) -> list[T]:
    """Returns the results of a function, called in some threads."""
    with ThreadPoolExecutor(NUM_THREADS, "hapi-segment") as executor:
        return list(executor.map(function, numbers))
