"""Streaming reader of WebDataset tar shards, for client and worker.

A *sample* is a run of consecutive regular members that share a key; the key
is the member's path up to the first dot of its base name (the WebDataset
convention), the rest is the extension.  Members that belong to no sample are
passed over: directories, names without a dot, hidden files and folders
(``._x.jpg``, ``.DS_Store``), ``__MACOSX``, volume labels and lists of folders.
Links, devices and sparse members are refused.  Long names (GNU ``L``, POSIX
``x``) are read from a bounded number of bytes, in linear time.  A member is
read only if its header keeps all limits, so that a header cannot make the
reader allocate the size it claims.
"""

from __future__ import annotations

import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from hapi_protocol.errors import UnsupportedError
from hapi_protocol.samples import (
    BLOCK_BYTES,
    LABEL_EXTENSION,
    MAX_TEXT_BYTES,
    ZERO_BLOCK,
    Sample,
    compression_message,
    is_hidden,
)

_EXTENDED_TYPES = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_PAX_TYPES = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_PAX_LENGTH = re.compile(rb"([0-9]{1,9}) ")
_PAX_SIZE = re.compile(rb"-?[0-9]{1,18}")
_REGULAR_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_PASSED_TYPES = (b"V", b"D")
"""GNU tar's label of a volume, and its list of a folder's files."""
_PASSED_BYTES = 1024 * 1024
"""Length of the pieces in which members without a sample are read."""


class Readable(Protocol):
    """Anything with a file's ``read``; short reads are allowed."""

    def read(self, size: int, /) -> bytes: ...


def read_up_to(stream: Readable, size: int) -> bytes:
    """Reads a number of bytes; fewer only at the end of the stream."""
    pieces = []
    while size and (piece := stream.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@dataclass(frozen=True)
class Limits:
    """Limits that are checked before anything is allocated."""

    max_member_bytes: int = 64 * 1024 * 1024
    """Chosen, not measured, as all limits here: far above what data sets have,
    and low enough for the memory of a worker's jobs."""
    max_sample_bytes: int = 64 * 1024 * 1024
    """Maximum length of all members of a sample together."""
    max_extended_header_bytes: int = 64 * 1024
    """Maximum length of all extended headers of one member."""
    max_key_bytes: int = 1024
    max_extension_bytes: int = 256
    max_text_bytes: int = MAX_TEXT_BYTES
    """Maximum length of a ``.cls`` member."""
    max_members_per_sample: int = 32
    max_skipped_members: int = 10_000
    """Maximum number of consecutive members that belong to no sample."""


DEFAULT_LIMITS = Limits()


def iter_samples(
    stream: Readable,
    *,
    name: str,
    limits: Limits = DEFAULT_LIMITS,
    first_index: int = 0,
    first_offset: int = 0,
    on_passed: Callable[[str], object] = lambda name: None,
) -> Iterator[Sample]:
    """Yields the samples of a tar stream, in order.

    The stream need not end with tar's two zero blocks: it may be a byte
    range of whole members.  Only zeros may follow those blocks.

    Args:
        stream: the shard's bytes, or those of a range of whole members.
        name: the shard's name, for errors.
        limits: limits checked before allocation.
        first_index: index of the first sample in the stream.
        first_offset: offset in the shard of the stream's first byte.
        on_passed: called with the name of each member, other than a
            directory, that belongs to no sample.

    Raises:
        UnsupportedError: ``damaged_shard`` if a tar member is invalid or
            incomplete, or data follow the tar's end, ``limit_exceeded``
            beyond ``limits``; both name the shard and the byte.
    """
    reader = _MemberReader(stream, name, limits, first_offset, on_passed)
    sample: Sample | None = None
    for member in reader.members():
        if sample is None or member.key != sample.key:
            if sample is not None:
                yield sample
            index = first_index if sample is None else sample.index + 1
            sample = Sample(index, member.key, member.offset)
        reader.check_fits(member, sample)
        sample.members[member.extension], sample.crc32 = reader.content(
            member, sample.crc32
        )
        sample.length = reader.position - sample.offset
    if sample is not None:
        yield sample
    reader.check_end()


@dataclass(frozen=True)
class _Member:
    """A member whose content is next in the stream."""

    key: str
    extension: str
    offset: int
    size: int


class _MemberReader:
    """Reads tar members one by one; ``position`` is the next byte."""

    def __init__(
        self,
        stream: Readable,
        name: str,
        limits: Limits,
        offset: int,
        on_passed: Callable[[str], object],
    ) -> None:
        self._stream = stream
        self._name = name
        self._limits = limits
        self._on_passed = on_passed
        self._has_end = False
        self._header: bytes | None = None
        """The header that is being read, with its extended headers."""
        self.position = offset

    def members(self) -> Iterator[_Member]:
        """Yields each member; its content must be read before the next."""
        skipped = 0
        while (header := self._next_header()) is not None:
            start, info = header
            if _belongs_to_no_sample(info):
                skipped += 1
                if skipped > self._limits.max_skipped_members:
                    raise self._over_limit(
                        start, f"{skipped} members without a sample in a row"
                    )
                if not info.isdir():
                    self._pass(info)
                continue
            skipped = 0
            key, extension = self._name_parts(start, info)
            self._check_size(start, info, extension)
            yield _Member(key, extension, start, info.size)

    def check_fits(self, member: _Member, sample: Sample) -> None:
        """Checks that the sample may have this member as well.

        Raises:
            UnsupportedError: names the sample and the limit.
        """
        limits = self._limits
        if member.extension in sample.members:
            raise self._damaged(
                member.offset,
                f"member {member.key}.{member.extension} occurs twice",
            )
        if len(sample.members) >= limits.max_members_per_sample:
            raise self._over_limit(
                member.offset,
                f"sample {sample.key!r} has more than "
                f"{limits.max_members_per_sample} members",
            )
        so_far = sum(map(len, sample.members.values()))
        if so_far + member.size > limits.max_sample_bytes:
            raise self._over_limit(
                member.offset,
                f"sample {sample.key!r} has {so_far + member.size} bytes or "
                f"more; at most {limits.max_sample_bytes}",
            )

    def content(self, member: _Member, crc32: int) -> tuple[bytes, int]:
        """Reads the member's content, and its padding.

        Also returns ``crc32`` continued with header, content and padding.
        """
        header, self._header = self._header or b"", None
        data = self._read(member.size)
        padding = self._read(_padded(member.size) - member.size)
        for part in (header, data, padding):
            crc32 = zlib.crc32(part, crc32)
        return data, crc32

    def _pass(self, info: tarfile.TarInfo) -> None:
        """Reads a member that belongs to no sample."""
        self._on_passed(info.name)
        self._header = None  # belongs to no sample's checksum
        left = _padded(max(info.size, 0))
        while left:
            left -= len(self._read(min(left, _PASSED_BYTES)))

    def check_end(self) -> None:
        """Refuses data behind the tar's end, which would be lost silently.

        Raises:
            UnsupportedError: ``damaged_shard``, with their length.
        """
        if not self._has_end:
            return
        end = self.position
        last = end
        while piece := self._stream.read(_PASSED_BYTES):
            used = len(piece.rstrip(b"\0"))
            if used:
                last = self.position + used
            self.position += len(piece)
        if last > end:
            raise self._damaged(
                end,
                f"{last - end} bytes follow the tar's end, as after 'cat "
                "a.tar b.tar'; join tars with 'tar --concatenate', or keep "
                "them apart",
            )

    def _next_header(self) -> tuple[int, tarfile.TarInfo] | None:
        start = self.position
        fields: dict[str, bytes] = {}
        while True:
            is_first = self.position == start
            block = self._read(BLOCK_BYTES, may_be_at_end=is_first)
            if not block:
                return None
            if block == ZERO_BLOCK and is_first:
                self._has_end = True
                return None
            info = self._parse_header(start, block)
            if info.type not in _EXTENDED_TYPES:
                break
            fields = self._extended_fields(start, info) | fields
        if "path" in fields:
            info.name = fields["path"].decode("utf-8", "surrogateescape")
        if "size" in fields:
            info.size = int(fields["size"])
        if not (info.isdir() or info.type in _REGULAR_TYPES + _PASSED_TYPES):
            raise self._damaged(
                start, f"{info.name!r:.200} is not a regular member"
            )
        if any(field.startswith("GNU.sparse.") for field in fields):
            raise self._damaged(start, f"{info.name!r:.200} is sparse")
        return start, info

    def _parse_header(self, start: int, block: bytes) -> tarfile.TarInfo:
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            compressed = compression_message(block) if start == 0 else None
            raise self._damaged(
                start, compressed or f"no tar header: {error}"
            ) from error

    def _extended_fields(
        self, start: int, info: tarfile.TarInfo
    ) -> dict[str, bytes]:
        """Reads an extended header; returns what it says of the member."""
        limit = self._limits.max_extended_header_bytes
        total = self.position - start + info.size
        if info.size < 0 or total > limit:
            raise self._over_limit(
                start, f"extended headers of {total} bytes; at most {limit}"
            )
        data = self._read(_padded(info.size))[: info.size]
        if info.type == tarfile.GNUTYPE_LONGNAME:
            return {"path": data.partition(b"\0")[0]}
        if info.type not in _PAX_TYPES:
            return {}
        try:
            return _pax_fields(data)
        except ValueError as error:
            raise self._damaged(
                start, f"a broken extended header: {error}"
            ) from error

    def _name_parts(
        self, start: int, info: tarfile.TarInfo
    ) -> tuple[str, str]:
        folder, slash, base = info.name.rpartition("/")
        stem, _, extension = base.partition(".")
        key = folder + slash + stem
        raw = key.encode("utf-8", "surrogateescape")
        if len(raw) > self._limits.max_key_bytes:
            raise self._over_limit(
                start,
                f"a key of {len(raw)} bytes; at most "
                f"{self._limits.max_key_bytes}",
            )
        num_bytes = len(extension.encode("utf-8", "surrogateescape"))
        if num_bytes > self._limits.max_extension_bytes:
            raise self._over_limit(
                start,
                f"an extension of {num_bytes} bytes; at most "
                f"{self._limits.max_extension_bytes}",
            )
        # Other encodings are escaped: two keys must not become one.
        return raw.decode("utf-8", "backslashreplace"), extension

    def _check_size(
        self, start: int, info: tarfile.TarInfo, extension: str
    ) -> None:
        limit = (
            self._limits.max_text_bytes
            if extension.lower() == LABEL_EXTENSION
            else self._limits.max_member_bytes
        )
        if not 0 <= info.size <= limit:
            raise self._over_limit(
                start,
                f"member {info.name!r} has {info.size} bytes; at most {limit}",
            )

    def _read(self, size: int, *, may_be_at_end: bool = False) -> bytes:
        data = read_up_to(self._stream, size)
        missing = size - len(data)
        if missing and not (may_be_at_end and missing == size):
            raise self._damaged(
                self.position, f"the shard ends {missing} bytes too early"
            )
        self.position += len(data)
        if may_be_at_end:
            self._header = data
        elif self._header is not None:
            self._header += data
        return data

    def _damaged(self, offset: int, what: str) -> UnsupportedError:
        return self._error("damaged_shard", offset, what)

    def _over_limit(self, offset: int, what: str) -> UnsupportedError:
        return self._error("limit_exceeded", offset, what)

    def _error(self, code: str, offset: int, what: str) -> UnsupportedError:
        return UnsupportedError(
            code,
            f"shard {self._name}, byte {offset}: {what}",
            object_name=self._name,
            details={"offset": offset},
        )


def _belongs_to_no_sample(info: tarfile.TarInfo) -> bool:
    return (
        info.isdir()
        or info.type in _PASSED_TYPES
        or "." not in info.name.rpartition("/")[2]
        or is_hidden(info.name)
    )


def _pax_fields(data: bytes) -> dict[str, bytes]:
    """Parses the records of a pax header, ``LENGTH KEYWORD=VALUE\\n`` each.

    Not by the standard library, whose time grows with the square of the
    number of digits (CVE-2024-6232) in supported releases.

    Raises:
        ValueError: names the byte of the record that is not valid.
    """
    fields = {}
    position = 0
    while data[position : position + 1] not in (b"", b"\0"):
        length = _PAX_LENGTH.match(data, position)
        end = position + int(length[1]) if length else 0
        record = data[length.end() : end] if length else b""
        keyword, _, value = record.partition(b"=")
        if not keyword or not value.endswith(b"\n") or end > len(data):
            raise ValueError(f"no pax record at byte {position}")
        fields[keyword.decode("utf-8", "replace")] = value[:-1]
        position = end
    if not _PAX_SIZE.fullmatch(fields.get("size", b"0")):
        raise ValueError(f"its size is {fields['size']!r:.40}")
    return fields


def _padded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
