"""Stored samples: images, arrays, their labels, and how to recognise them."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from dataclasses import dataclass, field, replace

BLOCK_BYTES = tarfile.BLOCKSIZE
ZERO_BLOCK = bytes(BLOCK_BYTES)
LABEL_EXTENSION = "cls"
META_EXTENSION = "json"

MAX_TEXT_BYTES = 64 * 1024
"""Longest ``.cls`` or ``.json`` member that states a label.  img2dataset
writes more into ``.json`` members, such as all EXIF data."""
SNIFF_BYTES = BLOCK_BYTES
"""Number of leading bytes that :func:`sniff` needs."""


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
        names = [name for name in self.members if medium.has(name)]
        exact = [name for name in names if "." not in name]
        first, *others = exact or names or [""]
        if others:
            raise SampleError(self._ambiguous(medium, first, others[0]))
        if names:
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
        """Text of a member; its extension may have capitals.

        Bytes that are no UTF-8 are escaped, as in keys: two names must not
        become one.  None also for what is too long to be a label.
        """
        for name, data in self.members.items():
            if name.lower() == extension and len(data) <= MAX_TEXT_BYTES:
                text = data.decode("utf-8", "backslashreplace")
                return text.removeprefix("\ufeff")
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
    match = _PLAIN_INTEGER.fullmatch(text) if text is not None else None
    return int(match[1]) if match else None


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
    if start[:BLOCK_BYTES] == ZERO_BLOCK:
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


def is_hidden(path: str) -> bool:
    """Returns True for hidden files, and what macOS adds to archives."""
    return any(
        part == "__MACOSX" or (part.startswith(".") and part.strip("."))
        for part in path.split("/")
    )
