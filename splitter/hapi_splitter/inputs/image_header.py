"""Headers of image files: format, size, and what decoding will cost.

Everything here takes milliseconds, whatever the file holds: a stranger's image
may be made to cost minutes.
"""

from __future__ import annotations

import importlib
import io
import re
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from PIL import features

from hapi_protocol.samples import SNIFF_BYTES, SampleError, sniff
from hapi_splitter.inputs import tiff_directory
from hapi_splitter.inputs.tiff_directory import EXIF_PREFIX, ORIENTATION

DEFAULT_MAX_PIXELS = 1 << 26
"""Largest image that is decoded, 67 million pixels."""
MAX_SCANS = 100
"""Most scans of a progressive JPEG, which usually has about ten.  A scan of a
few bytes still costs a pass over the whole image."""

MAX_PARTS = 1 << 16
"""Most parts of a file: chunks of a PNG, strips or tiles of a TIFF, blocks
before the image of a GIF.  Each costs microseconds, even if empty, and 16 MB
can hold millions.  A TIFF of a row a strip has as many as rows."""
MAX_SEGMENTS = 1 << 12
"""Most segments of a JPEG; each may have 64 kB."""

LARGE_BYTES = 64 << 20
"""An image whose decoding takes more memory is large (:attr:`ImageHeader`):
16 million pixels of JPEG, 4 of PNG.  On one core it takes 0.1 s or more."""
LARGE_FILE_BYTES = 8 << 20
LARGE_PARTS = 1 << 12
LARGE_SCANS = 20
"""More parts, scans or bytes make an image large, whatever its size."""

_BYTES_PER_PIXEL: Mapping[str, int] = MappingProxyType(
    {
        "jpeg": 4,
        "png": 16,
        "webp": 26,
        "gif": 16,
        "bmp": 16,
        "tiff": 16,
        "avif": 26,
    }
)
"""Memory of ``decode_image``, its result included: most that 64 million pixels
took, flat, of noise, transparent, grey of 16 bits (Pillow 12.3; JPEG 3.1 to
3.6, WebP 25, others 11 to 15.7).  AVIF of more than eight bits keeps planes of
16."""
_PROGRESSIVE_BYTES = 6
"""Bytes for each pixel of a progressive JPEG, whose coefficients are kept."""

FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "jpeg": "JpegImagePlugin.JpegImageFile",
        "png": "PngImagePlugin.PngImageFile",
        "webp": "WebPImagePlugin.WebPImageFile",
        "gif": "GifImagePlugin.GifImageFile",
        "bmp": "BmpImagePlugin.BmpImageFile",
        "tiff": "TiffImagePlugin.TiffImageFile",
        "avif": "AvifImagePlugin.AvifImageFile",
    }
)
"""Formats that are read, by the names of :func:`hapi_protocol.samples.sniff`,
and Pillow's classes for them."""
_OPTIONAL = ("webp", "avif")
"""Formats that Pillow may have been built without."""

_SEGMENTS = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])", re.DOTALL)
"""The next marker of a JPEG.  Inside coded data 0xff is followed by 0 or a
restart marker (ITU-T T.81, B.1.1.5), and 0xff may be repeated before one."""
_START_OF_SCAN, _END_OF_IMAGE, _APP1 = b"\xda", b"\xd9", b"\xe1"
_START_OF_FRAME = tuple(
    bytes([marker])
    for marker in range(0xC0, 0xD0)
    if marker not in (0xC4, 0xC8, 0xCC)
)
_NO_LENGTH = (b"\x01", b"\xd8")

_PROGRESSIVE = (b"\xc2", b"\xc6", b"\xca", b"\xce")
_ISPE = re.compile(rb"ispe\0{4}(.{4})(.{4})", re.DOTALL)
"""Width and height in an AVIF, of the image and of its parts (ISO/IEC
23008-12, 6.5.3)."""

_PNG_PIXELS = (b"IDAT", b"fdAT", b"fcTL")
_MANY_PNG_CHUNKS = 16
"""More chunks besides pixels, of which a PNG has about ten, make it large:
unpacking one may take 5 ms."""
_MANY_TIFF_TAGS = 256
"""More tags, of which a TIFF has a few dozen, make it large."""
_BLOCK_TAGS = (273, 279, 324, 325)
"""Offsets and lengths of a TIFF's strips and tiles."""
_SIZE_TAGS = (256, 257)
_EXTENSION = 0x21
"""First byte of a GIF's block that is no image, such as a comment."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """An image's format and size, and the cost of decoding it.

    Args:
        kind: a key of :data:`FORMATS`.
        width: pixels.
        height: pixels.
        num_parts: segments, chunks, strips or blocks.
        num_scans: scans of a JPEG.
        bytes_per_pixel: memory of decoding; 0 for the usual of the format.
        is_opaque: True if only the decoder can tell what it will cost.
        orientation: EXIF orientation of a JPEG, 1 to 8.
    """

    kind: str
    width: int
    height: int
    num_parts: int = 0
    num_scans: int = 0
    bytes_per_pixel: int = 0
    is_opaque: bool = False
    orientation: int = 1

    @property
    def decoding_bytes(self) -> int:
        """Memory of ``decode_image``, its result included."""
        per_pixel = self.bytes_per_pixel or _BYTES_PER_PIXEL[self.kind]
        return self.width * self.height * per_pixel

    @property
    def is_large(self) -> bool:
        """True if decoding takes more than some 0.1 s of a core, or nobody can
        tell before."""
        return (
            self.is_opaque
            or self.decoding_bytes > LARGE_BYTES
            or self.num_parts > LARGE_PARTS
            or self.num_scans > LARGE_SCANS
        )


def read_header(
    data: bytes,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    formats: Collection[str] = FORMATS,
) -> ImageHeader:
    """Reads the header of an image file, in milliseconds whatever it holds.

    Args:
        data: the file.
        max_pixels: largest image that is decoded.
        formats: formats that are allowed, of :data:`FORMATS`.

    Raises:
        SampleError: no image, of another format, larger than ``max_pixels``,
            of more parts than :data:`MAX_PARTS`, or its header is damaged.
    """
    kind = sniff(bytes(data[:SNIFF_BYTES]))
    if kind is None or kind not in formats:
        allowed = ", ".join(name.upper() for name in formats)
        content = f"of the format {kind.upper()}" if kind else "no image"
        raise SampleError(f"{content}; the allowed formats are {allowed}")
    try:
        header = _PARSERS[kind](data)
    except (MemoryError, ImportError, SampleError):
        raise
    except Exception as error:  # Pillow's parsers raise many types
        raise SampleError(
            f"damaged {kind.upper()}: unreadable header"
        ) from error
    if header.width * header.height > max_pixels:
        raise SampleError(
            f"an image of {header.width}x{header.height} pixels is over the "
            f"limit of {max_pixels} pixels (max_pixels)"
        )
    is_opaque = header.is_opaque or len(data) > LARGE_FILE_BYTES
    return replace(header, is_opaque=is_opaque)


def _jpeg(data: bytes) -> ImageHeader:
    """Reads width and height, and counts the scans.

    Only the image's own segments count: no thumbnail, and nothing that
    follows the image.  Pillow's parser takes quadratic time for many Exif
    segments.
    """
    size = (0, 0)
    scans = position = num_parts = bytes_per_pixel = 0
    exif = b""
    while match := _SEGMENTS.search(data, position):
        marker, position = match[1], match.end()
        if marker == _END_OF_IMAGE:
            break
        if marker in _START_OF_FRAME:
            frame = data[position + 3 : position + 7]
            height = int.from_bytes(frame[:2], "big")
            size = int.from_bytes(frame[2:], "big"), height
            if marker in _PROGRESSIVE:
                bytes_per_pixel = _PROGRESSIVE_BYTES
        if marker == _APP1 and not exif:
            part = data[position + 2 : position + (1 << 16)]
            exif = part if part.startswith(EXIF_PREFIX) else b""
        if marker not in _NO_LENGTH:
            position += int.from_bytes(data[position : position + 2], "big")
        scans += marker == _START_OF_SCAN
        num_parts += 1
        _check_parts(num_parts, "JPEG", "segments", MAX_SEGMENTS)
    if scans > MAX_SCANS:
        raise SampleError(f"a JPEG of more than {MAX_SCANS} scans")
    if not all(size):
        raise SampleError("damaged JPEG: unreadable header")
    orientation = tiff_directory.orientation(exif)
    return ImageHeader(
        "jpeg",
        *size,
        num_parts,
        scans,
        bytes_per_pixel,
        orientation=orientation,
    )


def _check_parts(
    number: int, kind: str, parts: str, limit: int = MAX_PARTS
) -> None:
    if number > limit:
        raise SampleError(f"a {kind} of more than {limit} {parts}")


def _png(data: bytes) -> ImageHeader:
    """Reads the size, and counts the chunks (PNG, third edition, 5.3, 11.2.1).

    Pillow's parser unpacks profiles and texts of up to 1 MiB when it opens the
    file, also those of which there may be only one: 4 MB took half a minute.

    Raises:
        struct.error: if the file ends within its first chunk.
    """
    width, height = struct.unpack_from(">II", data, 16)
    place, num_parts, num_others, num_profiles = 8, 0, 0, 0
    while place < len(data):
        kind = data[place + 4 : place + 8]
        place += 12 + int.from_bytes(data[place : place + 4], "big")
        num_parts += 1
        _check_parts(num_parts, "PNG", "chunks")
        num_others += kind not in _PNG_PIXELS
        num_profiles += kind == b"iCCP"
    _check_parts(num_profiles, "PNG", "colour profile", 1)
    return ImageHeader(
        "png",
        width,
        height,
        num_parts,
        is_opaque=num_others > _MANY_PNG_CHUNKS,
    )


def _webp(data: bytes) -> ImageHeader:
    """Reads the size of the canvas or of the only image (RFC 9649, 2.7; RFC
    6386, 9.1).  Pillow's parser walks through all frames of the file."""
    pillow_parser("webp")
    kind, start = data[12:16], data[20:30]
    if len(start) < 10:
        raise SampleError("damaged WEBP: unreadable header")
    if kind == b"VP8X":
        width, height = (
            int.from_bytes(start[at : at + 3], "little") + 1 for at in (4, 7)
        )
    elif kind == b"VP8L":
        bits = int.from_bytes(start[1:5], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        width, height = (
            int.from_bytes(start[at : at + 2], "little") & 0x3FFF
            for at in (6, 8)
        )
    return ImageHeader("webp", width, height)


def _avif(data: bytes) -> ImageHeader:
    """Reads the largest size that the file states.

    The coded frames may be larger, and libavif looks through all items for
    each of them, so that its cost is known only afterwards.
    """
    pillow_parser("avif")
    sizes = [
        (int.from_bytes(match[1], "big"), int.from_bytes(match[2], "big"))
        for match in _ISPE.finditer(data)
    ]
    if not sizes:
        raise SampleError("damaged AVIF: unreadable header")
    width, height = max(sizes, key=lambda size: size[0] * size[1])
    return ImageHeader("avif", width, height, is_opaque=True)


def _tiff(data: bytes) -> ImageHeader:
    """Reads the size and counts the strips and tiles of the first page.

    Pillow's parser lists them all, and copies the values of each tag, also if
    a thousand tags state the same megabytes of the file.

    Raises:
        struct.error: if the file ends within its directory.
        KeyError: if it has no size.
    """
    entries = {}
    num_entries = num_bytes = 0
    for entry in tiff_directory.entries(data):
        num_entries += 1
        num_bytes += entry.num_bytes
        if entry.tag in _BLOCK_TAGS:
            _check_parts(entry.num_values, "TIFF", "strips")
        entries[entry.tag] = entry
    width, height = (entries[tag].number or 0 for tag in _SIZE_TAGS)
    if ORIENTATION in entries and entries[ORIENTATION].number in range(5, 9):
        width, height = height, width  # Pillow turns it
    num_parts = max(
        entries[tag].num_values for tag in _BLOCK_TAGS if tag in entries
    )
    return ImageHeader(
        "tiff",
        width,
        height,
        num_parts,
        is_opaque=num_bytes > len(data) or num_entries > _MANY_TIFF_TAGS,
    )


def _gif(data: bytes) -> ImageHeader:
    """Counts the blocks before the first image (GIF89a, sections 15 to 24).

    Raises:
        IndexError: if the file ends within them.
    """
    place, blocks = 13, 0
    if data[10] & 0x80:  # a table of colours
        place += 3 << (data[10] & 7) + 1
    while data[place] == _EXTENSION:
        place += 2
        while True:
            blocks += 1
            _check_parts(blocks, "GIF", "blocks before its image")
            place += 1 + data[place]
            if not data[place - 1]:
                break
    return ImageHeader("gif", *_pillow_size(data, "gif"), blocks)


def _bmp(data: bytes) -> ImageHeader:
    return ImageHeader("bmp", *_pillow_size(data, "bmp"))


_PARSERS: Mapping[str, Callable[[bytes], ImageHeader]] = MappingProxyType(
    {
        "jpeg": _jpeg,
        "png": _png,
        "webp": _webp,
        "gif": _gif,
        "bmp": _bmp,
        "tiff": _tiff,
        "avif": _avif,
    }
)


def pillow_parser(kind: str) -> Any:
    """Pillow's class for a format.

    Unlike ``Image.open``, it neither tries other formats nor warns about
    large images.
    """
    if kind in _OPTIONAL and not features.check(kind):
        raise SampleError(f"{kind.upper()}, which this Pillow cannot read")
    module, _, name = FORMATS[kind].partition(".")
    return getattr(importlib.import_module(f"PIL.{module}"), name)


def _pillow_size(data: bytes, kind: str) -> tuple[int, int]:
    with pillow_parser(kind)(io.BytesIO(data)) as image:  # reads headers only
        width, height = image.size
    return int(width), int(height)
