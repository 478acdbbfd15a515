"""Large objects of Swift: segments, of which some are sent or read at once."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from hapi_client.swift.connection import Connection
from hapi_client.swift.retry import read_again
from hapi_protocol.errors import ClientError, TruncatedStreamError
from hapi_protocol.headers import ByteRange
from hapi_protocol.sample_checks import check_md5

T = TypeVar("T")
Read: TypeAlias = Callable[[int, int], bytes]
"""Returns a number of bytes of a file from an offset on."""

# Chosen: larger ones are no faster, and four of a checkpoint of 128 MiB are
# sent at once.
SEGMENT_BYTES = 32 << 20
NUM_THREADS = 4
"""Segments that a rank sends at once, and ranges that it reads."""
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


class _Part:
    """Bytes of a file from an offset on, and the MD5 of those that are read.

    A request that is repeated seeks the offset again.
    """

    def __init__(self, read: Read, start: int) -> None:
        self._read = read
        self.seek(start)

    def seek(self, position: int) -> None:
        self._position = position
        self.md5 = hashlib.md5(usedforsecurity=False)

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        data = self._read(self._position, size)
        self._position += len(data)
        self.md5.update(data)
        return data


def put_segment(
    connection: Connection,
    container: str,
    name: str,
    read: Read,
    start: int,
    size: int,
) -> Segment:
    """Uploads bytes of a file as a segment.

    Raises:
        HapiError: of Swift, or if it has got other bytes.
    """
    part: Any = _Part(read, start)
    etag = connection.put(container, name, part, size)
    actual = part.md5.hexdigest()
    if etag != actual:
        # The first rank would take it for a whole one.
        connection.delete(container, name)
        check_md5(name, actual, etag)
    return Segment(name, etag, size)


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
    """Reads bytes of one version of an object, by some requests at once.

    One whose body breaks off goes on where it was.
    """
    size = stop - start
    length = max(SEGMENT_BYTES, -(-size // NUM_THREADS))
    # They are filled in place, and never copied.
    file = io.BytesIO(bytes(size))
    buffer = file.getbuffer()

    def fill(first: int) -> None:
        rest = buffer[first : first + length]
        end = start + first + len(rest)

        def go_on() -> None:
            nonlocal rest
            missing = ByteRange(end - len(rest), end - 1)
            with connection.open_range(
                container, name, missing, if_match=etag
            ) as body:
                while count := body.readinto(rest):
                    rest = rest[count:]
            if rest:
                raise TruncatedStreamError(
                    "truncated", f"{container}/{name} ends before byte {end}"
                )

        read_again(go_on)

    in_parallel(fill, range(0, size, length))
    return file.getvalue()


def in_parallel(
    function: Callable[[int], T], numbers: Iterable[int]
) -> list[T]:
    """Returns the results of a function, called in some threads."""
    with ThreadPoolExecutor(NUM_THREADS, "hapi-segment") as executor:
        return list(executor.map(function, numbers))
