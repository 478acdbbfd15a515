"""Streaming reader of WebDataset tar shards, for client and worker.

A *sample* is a run of consecutive regular members that share a key; the key
is the member's path up to the first dot of its base name (the WebDataset
convention), the rest is the extension.  Directories are skipped; links,
devices and sparse members are refused.  Long names (GNU ``L``, POSIX ``x``)
are read by the standard library from a bounded number of bytes.  A member is
read only if its header keeps all limits, so that a header cannot make the
reader allocate the size it claims.
"""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from hapi_protocol.errors import UnsupportedError

BLOCK_BYTES = tarfile.BLOCKSIZE
LABEL_EXTENSION = "cls"
META_EXTENSION = "json"

SNIFF_BYTES = 512
"""Number of leading bytes that :func:`sniff` needs."""

_EXTENDED_TYPES = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_REGULAR_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_ZERO_BLOCK = bytes(BLOCK_BYTES)


@dataclass(frozen=True)
class Medium:
    """A kind of stored samples: images, arrays or archives of arrays.

    Attributes:
        name: such as ``image``, for people.
        extensions: extensions of the member that is decoded.
        kinds: results of :func:`sniff` for such an object.
    """

    name: str
    extensions: tuple[str, ...]
    kinds: tuple[str, ...]

    def has(self, extension: str) -> bool:
        """Returns True if a member with this extension has such content."""
        return extension.rpartition(".")[2].lower() in self.extensions


IMAGE = Medium("image", ("jpg", "jpeg", "png"), ("jpeg", "png"))
ARRAY = Medium("array", ("npy",), ("npy",))
ARCHIVE = Medium("array archive", ("npz",), ("npz",))


class Readable(Protocol):
    """Anything with a file's ``read``; short reads are allowed."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Limits:
    """Limits that are checked before anything is allocated."""

    max_member_bytes: int = 64 * 1024 * 1024
    max_sample_bytes: int = 64 * 1024 * 1024
    """Maximum length of all members of a sample together."""
    max_extended_header_bytes: int = 64 * 1024
    """Maximum length of all extended headers of one member."""
    max_key_bytes: int = 1024
    max_extension_bytes: int = 256
    max_text_bytes: int = 64 * 1024
    """Maximum length of a ``.json`` or ``.cls`` member."""
    max_members_per_sample: int = 32
    max_skipped_members: int = 10_000
    """Maximum number of consecutive members without data (directories)."""


DEFAULT_LIMITS = Limits()


@dataclass
class Sample:
    """One sample of a shard.

    Attributes:
        index: zero-based position in the shard.
        key: the members' common path without extension.
        offset: byte of the shard at which its first tar header begins.
        length: bytes up to the end of its last member's padding.
        members: content by extension.
        crc32: CRC-32 of its members, with headers and padding.
        error: reason why the sample cannot be used, if it is known before
            decoding; never set for samples of shards.
    """

    index: int
    key: str
    offset: int
    length: int = 0
    members: dict[str, bytes] = field(default_factory=dict)
    error: str | None = None
    crc32: int = 0

    def member(self, medium: Medium) -> bytes | None:
        """Content of the first member of this medium, or None.

        Arrays in members of their own (``key.NAME.npy``) are an archive.
        """
        for extension, data in self.members.items():
            if medium.has(extension):
                return data
        return self._archive() if medium is ARCHIVE else None

    def _archive(self) -> bytes | None:
        arrays = {k: v for k, v in self.members.items() if ARRAY.has(k)}
        if not arrays:
            return None
        sink = io.BytesIO()
        with zipfile.ZipFile(sink, "w") as archive:
            for name, data in arrays.items():
                archive.writestr(name, data)
        return sink.getvalue()

    def missing_message(self, medium: Medium) -> str:
        """The error message of a sample without a member of this medium."""
        message = (
            f"has no {medium.name} member ({', '.join(medium.extensions)}) "
            f"but only: {', '.join(self.members):.200}"
        )
        if self.member(ARRAY) is not None:
            message += "; give the job an ArrayTransform for arrays"
        return message

    def label_and_meta(self) -> tuple[int | None, str | None]:
        """The label (``.cls``, if it is an integer) and the meta text.

        The meta text is the ``.json`` member; without one, a ``.cls``
        that is no integer gives ``{"cls": "<text>"}``, so that a client
        can turn class names into integers.
        """
        text = _text(self.members.get(LABEL_EXTENSION))
        meta = _text(self.members.get(META_EXTENSION))
        if text is None:
            return None, meta
        try:
            label = int(text)
        except ValueError:
            return None, meta or json.dumps({"cls": text.strip()})
        if not -(2**63) <= label < 2**63:
            return None, meta
        return label, meta


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "replace")


def sniff(start: bytes) -> str | None:
    """Detects ``tar``, ``jpeg``, ``png``, ``npy`` or ``npz`` by magic bytes.

    Args:
        start: the object's first :data:`SNIFF_BYTES` bytes, or all.
    """
    if start.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if start.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if start.startswith(b"\x93NUMPY"):
        return "npy"
    if start.startswith(b"PK\x03\x04"):
        return "npz"
    if len(start) < BLOCK_BYTES:
        return None
    if start[:BLOCK_BYTES] == _ZERO_BLOCK:
        return "tar"
    try:
        tarfile.TarInfo.frombuf(
            start[:BLOCK_BYTES], tarfile.ENCODING, "surrogateescape"
        )
    except tarfile.HeaderError:
        return None
    return "tar"


def iter_samples(
    stream: Readable,
    *,
    name: str,
    limits: Limits = DEFAULT_LIMITS,
    first_index: int = 0,
    first_offset: int = 0,
) -> Iterator[Sample]:
    """Yields the samples of a tar stream, in order.

    The stream need not end with tar's two zero blocks: it may be a byte
    range of whole members.

    Args:
        stream: the shard's bytes, or those of a range of whole members.
        name: the shard's name, for errors.
        limits: limits checked before allocation.
        first_index: index of the first sample in the stream.
        first_offset: offset in the shard of the stream's first byte.

    Raises:
        UnsupportedError: ``damaged_shard`` if a tar member is invalid or
            incomplete, ``limit_exceeded`` beyond ``limits``; both name the
            shard and the byte.
    """
    reader = _MemberReader(stream, name, limits, first_offset)
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
        self, stream: Readable, name: str, limits: Limits, offset: int
    ) -> None:
        self._stream = stream
        self._name = name
        self._limits = limits
        self._header: bytes | None = None
        """The header that is being read, with its extended headers."""
        self.position = offset

    def members(self) -> Iterator[_Member]:
        """Yields each member; its content must be read before the next."""
        skipped = 0
        while (header := self._next_header()) is not None:
            start, info = header
            if info.isdir():
                skipped += 1
                if skipped > self._limits.max_skipped_members:
                    raise self._over_limit(start, "too many empty members")
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
        for each in (header, data, padding):
            crc32 = zlib.crc32(each, crc32)
        return data, crc32

    def _next_header(self) -> tuple[int, tarfile.TarInfo] | None:
        start = self.position
        extended = b""
        while True:
            block = self._read(BLOCK_BYTES, may_be_at_end=not extended)
            if not block or (block == _ZERO_BLOCK and not extended):
                return None
            info = self._parse_header(start, block)
            if info.type not in _EXTENDED_TYPES:
                break
            extended += block + self._extended(start, info, len(extended))
        # Checked before names are resolved: that follows the maps of sparse
        # members.
        if not (info.isdir() or info.type in _REGULAR_TYPES):
            raise self._damaged(
                start, f"{info.name!r} is not a regular member"
            )
        if extended:
            info = self._resolve(start, extended + block)
        if info.issparse():
            raise self._damaged(start, f"{info.name!r} is sparse")
        return start, info

    def _parse_header(self, start: int, block: bytes) -> tarfile.TarInfo:
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise self._damaged(start, f"no tar header: {error}") from error

    def _extended(
        self, start: int, info: tarfile.TarInfo, so_far: int
    ) -> bytes:
        limit = self._limits.max_extended_header_bytes
        total = so_far + BLOCK_BYTES + info.size
        if info.size < 0 or total > limit:
            raise self._over_limit(
                start, f"extended headers of {total} bytes; at most {limit}"
            )
        return self._read(_padded(info.size))

    def _resolve(self, start: int, headers: bytes) -> tarfile.TarInfo:
        try:
            with tarfile.open(
                fileobj=io.BytesIO(headers),
                mode="r:",
                encoding="utf-8",
                errors="surrogateescape",
            ) as archive:
                info = archive.next()
        except (tarfile.TarError, ValueError, OverflowError) as error:
            raise self._damaged(
                start, f"a broken extended header: {error}"
            ) from error
        if info is None:
            raise self._damaged(start, "a broken extended header")
        return info

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
        return raw.decode("utf-8", "replace"), extension

    def _check_size(
        self, start: int, info: tarfile.TarInfo, extension: str
    ) -> None:
        is_text = extension in (LABEL_EXTENSION, META_EXTENSION)
        limit = (
            self._limits.max_text_bytes
            if is_text
            else self._limits.max_member_bytes
        )
        if not 0 <= info.size <= limit:
            raise self._over_limit(
                start,
                f"member {info.name!r} has {info.size} bytes; at most {limit}",
            )

    def _read(self, size: int, *, may_be_at_end: bool = False) -> bytes:
        pieces = []
        missing = size
        while missing:
            piece = self._stream.read(missing)
            if not piece:
                break
            pieces.append(piece)
            missing -= len(piece)
        if missing and not (may_be_at_end and missing == size):
            raise self._damaged(
                self.position, f"the shard ends {missing} bytes too early"
            )
        self.position += size - missing
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
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


def _padded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
