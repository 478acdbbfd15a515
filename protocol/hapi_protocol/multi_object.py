"""Many objects in the body of one job: how the filter frames them.

The body is one ustar stream.  Of the object asked for in place 12 it has a
member ``00000012.json``, which says what the object's GET gave, and then,
where that was the object, ``00000012.img`` with its bytes.  Names of objects
stand in the JSON alone, so that no name can be taken for another's.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hapi_protocol.errors import AnnotationError
from hapi_protocol.shards import BLOCK_BYTES, Readable

END = bytes(2 * BLOCK_BYTES)
"""What a tar stream ends with."""

ABOUT = "json"
BYTES = "img"

_MAX_ABOUT_BYTES = 64 * 1024
_SKIP_BYTES = 256 * 1024


@dataclass(frozen=True)
class ObjectEntry:
    """What the GET of one object gave.

    Attributes:
        index: its place in the request.
        key: the object's name, as asked for.
        status: Swift's; 413 for one that is too large to be read here, 503
            for one that broke off.
        etag: None where Swift gave none.
        error: ``<code>: <message>``; None where the object's bytes follow.
    """

    index: int
    key: str
    status: int
    etag: str | None
    error: str | None = None

    def failed(self, status: int, error: str) -> ObjectEntry:
        """The same object, which cannot be used."""
        return replace(self, status=status, error=error)

    def meta(self) -> str:
        """The row's ``meta``."""
        return json.dumps({"status": self.status, "etag": self.etag})


def entry_member(entry: ObjectEntry) -> bytes:
    """The member that tells of an object."""
    about = json.dumps(vars(entry)).encode()
    return _header(entry.index, ABOUT, len(about)) + about + padding(about)


def object_header(index: int, length_bytes: int) -> bytes:
    """What stands in front of an object's bytes."""
    return _header(index, BYTES, length_bytes)


def padding(data: bytes | int) -> bytes:
    """Zeros that fill up the last block of ``data``, or of so many bytes."""
    length = data if isinstance(data, int) else len(data)
    return bytes(-length % BLOCK_BYTES)


def iter_objects(
    stream: Readable, num_objects: int, max_bytes: int
) -> Iterator[tuple[ObjectEntry, bytes]]:
    """The objects of a framed body, in order.

    Args:
        stream: the body.
        num_objects: that it must hold.
        max_bytes: of one object; a larger one is passed over, and its entry
            says so.

    Yields:
        Each entry, and the object's bytes where it has no error.

    Raises:
        AnnotationError: ``bad_request``: it is framed in another way.
    """
    reader = _Frames(stream)
    for index in range(num_objects):
        entry = _parse_entry(
            reader.read(reader.size(index, ABOUT, _MAX_ABOUT_BYTES)), index
        )
        if entry.error is not None:
            yield entry, b""
            continue
        size = reader.size(index, BYTES)
        if size > max_bytes:
            reader.skip(size)
            yield entry.failed(413, too_large(size, max_bytes)), b""
        else:
            yield entry, reader.read(size)
    reader.end()


def too_large(length_bytes: int, max_bytes: int) -> str:
    """The error of an object of so many bytes."""
    return (
        f"object_too_large: {length_bytes} bytes; at most {max_bytes} in a "
        "request for many objects: ask for it by itself"
    )


def _header(index: int, extension: str, size: int) -> bytes:
    info = tarfile.TarInfo(_member_name(index, extension))
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT)


def _member_name(index: int, extension: str) -> str:
    return f"{index:08d}.{extension}"


class _Frames:
    """Reads members whose order is known."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream

    def size(self, index: int, extension: str, most: int | None = None) -> int:
        """Of the member that comes next."""
        name = _member_name(index, extension)
        try:
            info = tarfile.TarInfo.frombuf(
                self._read(BLOCK_BYTES), "utf-8", "surrogateescape"
            )
        except tarfile.HeaderError as error:
            raise _bad(f"no header of {name}: {error}") from error
        if info.name != name or info.type != tarfile.REGTYPE:
            raise _bad(f"{info.name!r} in the place of {name}")
        if info.size < 0 or (most is not None and info.size > most):
            raise _bad(f"{name} of {info.size} bytes")
        return info.size

    def read(self, size: int) -> bytes:
        """A member's bytes; its padding is passed over."""
        data = self._read(size)
        self._read(-size % BLOCK_BYTES)
        return data

    def end(self) -> None:
        """Checks that there is no more."""
        if self._read(len(END)) != END:
            raise _bad("there are more than were announced")

    def skip(self, size: int) -> None:
        """A member that is not wanted."""
        left = size + -size % BLOCK_BYTES
        while left:
            left -= len(self._read(min(left, _SKIP_BYTES)))

    def _read(self, size: int) -> bytes:
        pieces = []
        while size:
            piece = self._stream.read(size)
            if not piece:
                raise _bad(f"it ends {size} bytes too early")
            pieces.append(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _parse_entry(about: bytes, index: int) -> ObjectEntry:
    try:
        fields: Any = json.loads(about)
        entry = ObjectEntry(**fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise _bad(f"object {index}: {error}") from error
    is_sound = (
        entry.index == index
        and type(entry.status) is int
        and isinstance(entry.key, str)
        and isinstance(entry.etag, str | None)
        and isinstance(entry.error, str | None)
    )
    if not is_sound:
        raise _bad(f"object {index}: {about!r:.200}")
    return entry


def _bad(what: str) -> AnnotationError:
    return AnnotationError("bad_request", f"the objects of a job: {what}")
