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

import io
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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
_PAX_TYPES = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_PAX_LENGTH = re.compile(rb"([0-9]{1,9}) ")
_PAX_SIZE = re.compile(rb"-?[0-9]{1,18}")
_REGULAR_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_PASSED_TYPES = (b"V", b"D")
"""GNU tar's label of a volume, and its list of a folder's files."""
_PASSED_BYTES = 1024 * 1024
"""Length of the pieces in which members without a sample are read."""
_ZERO_BLOCK = bytes(BLOCK_BYTES)


@dataclass(frozen=True)
class Medium:
    """A kind of stored samples: images, arrays or archives of arrays.

    Attributes:
        name: such as ``image``, for people.
        extensions: extensions of the member that is decoded.
        kinds: results of :func:`sniff` for such an object.
        member: extension of the member to take, in lower case; None for
            the rule of :meth:`Sample.content`.
    """

    name: str
    extensions: tuple[str, ...]
    kinds: tuple[str, ...]
    member: str | None = None

    def has(self, extension: str) -> bool:
        """Returns True if a member with this extension has such content."""
        return extension.rpartition(".")[2].lower() in self.extensions


_JPEG = ("jpg", "jpeg", "jpe", "jfif")
IMAGE = Medium(
    "image",
    (*_JPEG, "png", "webp", "gif", "bmp", "tif", "tiff", "avif"),
    ("jpeg", "png", "webp", "gif", "bmp", "tiff", "avif"),
)
ARRAY = Medium("array", ("npy",), ("npy",))
ARCHIVE = Medium("array archive", ("npz",), ("npz",))


class SampleError(Exception):
    """A sample is unusable, and a retry would fail in the same way.

    The message depends only on the sample's bytes.
    """


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
    """Maximum number of consecutive members that belong to no sample."""


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

    def content(self, medium: Medium) -> bytes:
        """Content of the member that is decoded.

        Without ``medium.member``, it is the only member whose whole
        extension is of this medium (``key.jpg``), or else the only one whose
        last part is (``key.left.jpg``).  Arrays in members of their own
        (``key.NAME.npy``) are an archive.

        Raises:
            SampleError: there is none, or more than one; a clause that
                follows the sample's key.
        """
        if medium.member is not None:
            for extension, data in self.members.items():
                if extension.lower() == medium.member:
                    return data
            raise SampleError(
                f"has no member {medium.member!r}{self._but_only()}"
            )
        found = [name for name in self.members if medium.has(name)]
        exact = [name for name in found if "." not in name]
        first, *others = exact or found or [""]
        if others:
            raise SampleError(self._ambiguous(medium, first, others[0]))
        if found:
            return self.members[first]
        archive = self._archive() if medium is ARCHIVE else None
        if archive is None:
            raise SampleError(self._missing(medium))
        return archive

    def _ambiguous(self, medium: Medium, first: str, second: str) -> str:
        remedy = (
            f"name one of them, as in image={first.lower()!r}"
            if medium.name == IMAGE.name
            else "keep one of them, or take both with NamedArrays"
        )
        return (
            f"has several {medium.name} members, {self.key}.{first} and "
            f"{self.key}.{second}: {remedy}; if they are two samples, rename "
            "them, because a key ends at the first dot of the file's name"
        )

    def _archive(self) -> bytes | None:
        arrays = {k: v for k, v in self.members.items() if ARRAY.has(k)}
        if not arrays:
            return None
        sink = io.BytesIO()
        with zipfile.ZipFile(sink, "w") as archive:
            for name, data in arrays.items():
                archive.writestr(name, data)
        return sink.getvalue()

    def _missing(self, medium: Medium) -> str:
        message = (
            f"has no {medium.name} member ({', '.join(medium.extensions)})"
            f"{self._but_only()}"
        )
        if any(map(ARRAY.has, self.members)):
            message += "; give the job an ArrayTransform for arrays"
        return message

    def _but_only(self) -> str:
        return f" but only: {', '.join(self.members):.200}"

    def image_error(self, image: str | None = None) -> str | None:
        """Why it is unclear which member is the image, if it is.

        Args:
            image: extension of the member to take, if it is named.
        """
        medium = replace(IMAGE, member=image)
        if image is not None or any(map(IMAGE.has, self.members)):
            try:
                self.content(medium)
            except SampleError as error:
                return str(error)
        return None

    def text(self, extension: str) -> str | None:
        """Text of a member; its extension may have capitals."""
        for name, data in self.members.items():
            if name.lower() == extension:
                return data.decode("utf-8", "replace")
        return None

    def label_and_meta(self) -> tuple[int | None, str | None]:
        """The label, if ``.cls`` is an integer, and the text of ``.json``."""
        return plain_integer(self.text(LABEL_EXTENSION)), self.text(
            META_EXTENSION
        )


_PLAIN_INTEGER = re.compile(r"\s*(0|-?[1-9][0-9]{0,17})\s*", re.ASCII)


def plain_integer(text: str | None) -> int | None:
    """The integer that a label's text is, else None.

    Only plain decimals are: no ``007``, ``1_2`` or ``1.0``, which may be
    names, and no more than 18 digits.
    """
    found = _PLAIN_INTEGER.fullmatch(text) if text is not None else None
    return int(found[1]) if found else None


def sniff(start: bytes) -> str | None:
    """Detects a kind of :class:`Medium`, or ``tar``, by magic bytes.

    Args:
        start: the object's first :data:`SNIFF_BYTES` bytes, or all.
    """
    for magic, kind in _MAGIC.items():
        if start.startswith(magic):
            return kind
    if _is_tar(start):
        return "tar"
    # These bytes may begin the name of a tar's first member.
    for pattern, kind in _WEAK_MAGIC.items():
        if pattern.match(start):
            return kind
    return None


_MAGIC = {
    b"\xff\xd8\xff": "jpeg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"\x93NUMPY": "npy",
    b"PK\x03\x04": "npz",
}
_WEAK_MAGIC = {
    re.compile(rb"RIFF.{4}WEBP", re.DOTALL): "webp",
    re.compile(rb"GIF8[79]a"): "gif",
    re.compile(rb"BM.{4}\0{4}", re.DOTALL): "bmp",
    re.compile(rb"II[*+]\0|MM\0[*+]"): "tiff",
    re.compile(rb".{4}ftypavi[fs]", re.DOTALL): "avif",
}
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}


def _is_tar(start: bytes) -> bool:
    if len(start) < BLOCK_BYTES:
        return False
    if start[:BLOCK_BYTES] == _ZERO_BLOCK:
        return True
    try:
        tarfile.TarInfo.frombuf(
            start[:BLOCK_BYTES], tarfile.ENCODING, "surrogateescape"
        )
    except tarfile.HeaderError:
        return False
    return True


def compression_message(start: bytes) -> str | None:
    """The remedy for a compressed object; None if it is none."""
    for magic, (name, command) in _COMPRESSED.items():
        if start.startswith(magic):
            return (
                f"it is compressed with {name}: unpack it with '{command}' "
                "and store the plain tar, whose samples can be read one by "
                "one"
            )
    return None


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
        for each in (header, data, padding):
            crc32 = zlib.crc32(each, crc32)
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
            if block == _ZERO_BLOCK and is_first:
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
        is_text = extension.lower() in (LABEL_EXTENSION, META_EXTENSION)
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


def is_hidden(path: str) -> bool:
    """Returns True for hidden files, and what macOS adds to archives."""
    return any(
        part == "__MACOSX" or (part.startswith(".") and part.strip("."))
        for part in path.split("/")
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
