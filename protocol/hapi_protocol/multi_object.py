"""Framing of many objects in the body of one job.

The body is one ustar stream.  For its thirteenth object it has a member
``00000012.json`` with the result of the object's GET and, if that succeeded,
``00000012.img`` with the object's bytes.  Only the JSON has names of objects,
so that a hostile name cannot imitate another member.  A body may have some of
a request's objects only, in their order.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hapi_protocol.errors import AnnotationError
from hapi_protocol.json_messages import parse_object, read_message_fields
from hapi_protocol.samples import BLOCK_BYTES
from hapi_protocol.shards import Readable, read_up_to

_NAME = "objects of a job"

END = bytes(2 * BLOCK_BYTES)
"""The last two blocks of a tar stream."""

ENTRY_EXTENSION = "json"
BYTES_EXTENSION = "img"

_MAX_ENTRY_BYTES = 64 * 1024
"""An entry has a name of at most 1024 bytes (Swift's limit) and an error."""
_SKIP_BYTES = 256 * 1024
"""Length of the pieces in which objects are skipped; any bounds memory."""


@dataclass(frozen=True)
class ObjectEntry:
    """Result of the GET of one object.

    Attributes:
        index: zero-based position in the request.
        key: the object's name, as requested.
        status: Swift's status; 413 if the object is too large for the
            filter, 503 if the answer broke off.
        etag: None if Swift gave none.
        error: ``<code>: <message>``; None if the object's bytes follow.
    """

    index: int
    key: str
    status: int
    etag: str | None
    error: str | None = None

    def failed(self, status: int, error: str) -> ObjectEntry:
        """This entry with an error instead of the object's bytes."""
        return replace(self, status=status, error=error)

    def meta(self) -> str:
        """The ``meta`` of the object's row."""
        return json.dumps({"status": self.status, "etag": self.etag})


def entry_member(entry: ObjectEntry, number: int) -> bytes:
    """The tar member with an object's entry, at a position of the body."""
    text = json.dumps(vars(entry)).encode()
    header = _header(number, ENTRY_EXTENSION, len(text))
    return header + text + padding(len(text))


def object_header(number: int, length_bytes: int) -> bytes:
    """The tar header before an object's bytes, at a position of the body."""
    return _header(number, BYTES_EXTENSION, length_bytes)


def padding(length_bytes: int) -> bytes:
    """Zeros that fill the last tar block of a member."""
    return bytes(-length_bytes % BLOCK_BYTES)


def iter_objects(
    stream: Readable,
    num_objects: int,
    max_bytes: int,
    *,
    is_part: bool = False,
) -> Iterator[tuple[ObjectEntry, bytes]]:
    """Reads the objects of a framed body, in order.

    Args:
        stream: the body.
        num_objects: number of objects that it must hold.
        max_bytes: maximum length of one object; a larger one is skipped and
            its entry has an error.
        is_part: they are some of the request's objects, not all.

    Yields:
        Each entry, and the object's bytes if the entry has no error.

    Raises:
        AnnotationError: ``bad_request``: the framing is wrong.
    """
    reader = _FrameReader(stream)
    last = -1
    for number in range(num_objects):
        size = reader.next_size(number, ENTRY_EXTENSION, _MAX_ENTRY_BYTES)
        entry = _parse_entry(reader.read(size), number)
        if entry.index <= last or not (is_part or entry.index == number):
            raise _bad(f"object {number} has the index {entry.index}")
        last = entry.index
        if entry.error is not None:
            yield entry, b""
            continue
        size = reader.next_size(number, BYTES_EXTENSION)
        if size > max_bytes:
            reader.skip(size)
            yield entry.failed(413, too_large_message(size, max_bytes)), b""
        else:
            yield entry, reader.read(size)
    reader.end()


def too_large_message(length_bytes: int, max_bytes: int) -> str:
    """The error in the row of an object that is too large."""
    return (
        f"object_too_large: {length_bytes} bytes; at most {max_bytes} in a "
        "request for many objects: request it alone"
    )


def _header(index: int, extension: str, size: int) -> bytes:
    info = tarfile.TarInfo(_member_name(index, extension))
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT)


def _member_name(index: int, extension: str) -> str:
    return f"{index:08d}.{extension}"


class _FrameReader:
    """Reads members in a known order."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream

    def next_size(
        self, index: int, extension: str, max_bytes: int | None = None
    ) -> int:
        """Reads the header of the next member and returns its length."""
        name = _member_name(index, extension)
        try:
            info = tarfile.TarInfo.frombuf(
                self._read(BLOCK_BYTES), "utf-8", "surrogateescape"
            )
        except tarfile.HeaderError as error:
            raise _bad(f"no header of {name}: {error}") from error
        if info.name != name or info.type != tarfile.REGTYPE:
            raise _bad(f"{info.name!r} instead of {name}")
        if info.size < 0 or (max_bytes is not None and info.size > max_bytes):
            raise _bad(f"{name} has {info.size} bytes")
        return info.size

    def read(self, size: int) -> bytes:
        """Reads a member's bytes, and its padding."""
        data = self._read(size)
        self._read(-size % BLOCK_BYTES)
        return data

    def end(self) -> None:
        """Checks that the stream ends here."""
        if self._read(len(END)) != END:
            raise _bad("more objects than announced")

    def skip(self, size: int) -> None:
        """Skips a member's bytes and its padding."""
        left = size + -size % BLOCK_BYTES
        while left:
            left -= len(self._read(min(left, _SKIP_BYTES)))

    def _read(self, size: int) -> bytes:
        data = read_up_to(self._stream, size)
        if len(data) < size:
            raise _bad(f"the body ends {size - len(data)} bytes too early")
        return data


def _parse_entry(text: bytes, index: int) -> ObjectEntry:
    fields = parse_object(text, _NAME)
    entry = read_message_fields(
        ObjectEntry, fields, f"{_NAME}: object {index}"
    )
    if fields.keys() != vars(entry).keys():
        raise _bad(f"object {index}: {text!r:.200}")
    return entry


def _bad(reason: str) -> AnnotationError:
    return AnnotationError("bad_request", f"{_NAME}: {reason}")
