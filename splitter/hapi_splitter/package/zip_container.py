"""Writes and reads the zip container of a package in one exact form.

A package is a zip so that any tool can list it, but zip libraries are too
lenient to read it safely. Members are stored, in order, from byte 0, without
gaps, comments, extra fields, times or data descriptors. The reader accepts
only that form, so no two readers see different members in the same bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from hapi_protocol.errors import PackageError

MEMBERS = ("hapi.json", "graph.json", "weights.safetensors")

Buffer: TypeAlias = bytes | memoryview
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_VERSION = 20
_DATE = 0x21  # 1980-01-01, the zero of zip's calendar
_MAX_BYTES = 0xFFFFFFFF - 1


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes
    length: int
    crc: int
    offset: int

    @property
    def start(self) -> int:
        """Position of the content."""
        return self.offset + LOCAL_HEADER.size + len(self.name)

    @property
    def end(self) -> int:
        return self.start + self.length

    def local_header(self) -> bytes:
        return (
            LOCAL_HEADER.pack(
                b"PK\x03\x04",
                *(_VERSION, 0, 0, 0, _DATE),
                *(self.crc, self.length, self.length),
                *(len(self.name), 0),
            )
            + self.name
        )

    def central_header(self) -> bytes:
        return (
            _CENTRAL.pack(
                b"PK\x01\x02",
                *(_VERSION, _VERSION, 0, 0, 0, _DATE),
                *(self.crc, self.length, self.length),
                *(len(self.name), 0, 0, 0, 0),
                *(0, self.offset),
            )
            + self.name
        )


def data_offset(lengths: Mapping[str, int], name: str) -> int:
    """Returns the position of a member's content in the package.

    Args:
        lengths: content lengths of the members before it.
        name: of the member.
    """
    offset = 0
    for member in MEMBERS:
        offset += LOCAL_HEADER.size + len(member)
        if member == name:
            return offset
        offset += lengths[member]
    raise KeyError(name)


def pack(members: Mapping[str, bytes | Iterable[Buffer]]) -> Iterator[Buffer]:
    """Yields the package in pieces.

    Args:
        members: content by name; one in pieces is read twice, because its
            checksum comes before it.

    Raises:
        PackageError: if the package would exceed 4 GiB.
    """
    offset = 0
    entries = []
    for name in MEMBERS:
        length, crc = 0, 0
        content = members[name]
        pieces = [content] if isinstance(content, bytes) else content
        for piece in pieces:
            length += len(piece)
            crc = zlib.crc32(piece, crc)
        entry = _Entry(name.encode(), length, crc, offset)
        if entry.end > _MAX_BYTES:
            raise _error(f"with {name} the package exceeds 4 GiB")
        entries.append(entry)
        yield entry.local_header()
        yield from pieces
        offset = entry.end
    yield _directory(entries)


def _directory(entries: list[_Entry]) -> bytes:
    headers = b"".join(entry.central_header() for entry in entries)
    count, offset = len(entries), entries[-1].end
    return headers + _END.pack(
        b"PK\x05\x06", *(0, 0, count, count), len(headers), offset, 0
    )


def unpack(data: memoryview) -> dict[str, memoryview]:
    """Returns the members of a package as views of its bytes.

    Raises:
        PackageError: naming the difference from the accepted form.
    """
    entries = _read_directory(data)
    position = 0
    for entry in entries:
        if entry.offset < position:
            raise _error(f"member {_text(entry.name)} overlaps another")
        if entry.offset > position:
            raise _error(f"bytes before member {_text(entry.name)}")
        if entry.end > len(data):
            raise _error(f"member {_text(entry.name)} ends after the file")
        position = entry.end
    for entry in entries:
        if data[entry.offset : entry.start] != entry.local_header():
            raise _error(
                f"member {_text(entry.name)}: its header differs from the "
                "directory"
            )
        if zlib.crc32(data[entry.start : entry.end]) != entry.crc:
            raise _error(f"member {_text(entry.name)}: wrong checksum")
    if data[position:] != _directory(entries):
        raise _error("bytes between the members and the directory")
    return {
        entry.name.decode(): data[entry.start : entry.end] for entry in entries
    }


def _read_directory(data: memoryview) -> list[_Entry]:
    if len(data) < _END.size:
        raise _error("not a zip file")
    signature, disk, first_disk, disk_count, count, length, offset, comment = (
        _END.unpack(data[-_END.size :])
    )
    if signature != b"PK\x05\x06" or comment:
        raise _error(
            "not a zip file, or one with a comment or bytes after its end"
        )
    if disk or first_disk or disk_count != count or count != len(MEMBERS):
        raise _error(
            f"{count} members instead of {len(MEMBERS)}: {', '.join(MEMBERS)}"
        )
    if offset + length + _END.size != len(data):
        raise _error("its directory is not at the end of the file")
    entries = []
    for name in MEMBERS:
        entry, offset = _read_entry(data, offset, name)
        entries.append(entry)
    return entries


def _read_entry(
    data: memoryview, offset: int, expected: str
) -> tuple[_Entry, int]:
    end = offset + _CENTRAL.size
    if end > len(data):
        raise _error("its directory is truncated")
    fields = _CENTRAL.unpack(data[offset:end])
    flags, method, crc, stored, length = (*fields[3:5], *fields[7:10])
    name_length, extra, comment = fields[10:13]
    name = bytes(data[end : end + name_length])
    if fields[0] != b"PK\x01\x02":
        raise _error("its directory is damaged")
    if name != expected.encode():
        raise _error(
            f"member {_text(name)} instead of {expected}: members must be "
            f"{', '.join(MEMBERS)}, each once, in this order"
        )
    if flags & 1:
        raise _error(f"member {expected} is encrypted")
    if method:
        raise _error(f"member {expected} is compressed, not stored")
    if stored != length:
        raise _error(f"member {expected} has two different sizes")
    if flags or extra or comment:
        raise _error(f"member {expected} has flags, extra fields or a comment")
    entry = _Entry(name, length, crc, fields[16])
    return entry, end + name_length


def _text(name: bytes) -> str:
    return repr(name.decode("utf-8", "replace")[:80])


def _error(message: str) -> PackageError:
    return PackageError("bad_package", f"the package is refused: {message}")
