"""Decodes image files to uint8 RGB tensors."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import re
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from PIL import features

from hapi_protocol.samples import SNIFF_BYTES, SampleError, sniff

DEFAULT_MAX_PIXELS = 1 << 26
"""Largest image that is decoded, 67 million pixels."""
MAX_SCANS = 100
"""Most scans of a progressive JPEG, which usually has about ten.  A scan of a
few bytes still costs a pass over the whole image."""

MAX_BLOCKS = 1 << 16
"""Most strips or tiles of a TIFF, and blocks before the image of a GIF.  Each
costs Pillow microseconds, even if empty, and 16 MB can hold millions.  A TIFF
of a row a strip has as many as rows."""

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
_START_OF_SCAN, _END_OF_IMAGE = b"\xda", b"\xd9"
_START_OF_FRAME = tuple(
    bytes([marker])
    for marker in range(0xC0, 0xD0)
    if marker not in (0xC4, 0xC8, 0xCC)
)
_NO_LENGTH = (b"\x01", b"\xd8")

_BLOCK_TAGS = (273, 279, 324, 325)
"""Offsets and lengths of a TIFF's strips and tiles."""
_EXTENSION = 0x21
"""First byte of a GIF's block that is no image, such as a comment."""

_MAX_BYTE = 255
_MODE_RGB = 3
"""``torchvision.io.ImageReadMode.RGB``."""
_OUT_OF_MEMORY = ("can't allocate memory", "Insufficient memory", "bad_alloc")


def decode_image(
    data: bytes,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    formats: Collection[str] = FORMATS,
) -> torch.Tensor:
    """Decodes an image file to RGB pixels, uint8 ``[3, H, W]``.

    The format is detected by the first bytes. Grey, palette and CMYK images
    become RGB, alpha is dropped, 16-bit images keep their upper eight bits,
    others of more than eight are refused, and of several frames or pages the
    first one counts. EXIF orientation is ignored, as in torchvision's default.

    Args:
        data: the file.
        max_pixels: largest image that is decoded.
        formats: formats that are allowed, of :data:`FORMATS`.

    Raises:
        SampleError: undecodable, truncated, of another format or larger
            than ``max_pixels``.
    """
    kind = sniff(bytes(data[:SNIFF_BYTES]))
    if kind is None or kind not in formats:
        allowed = ", ".join(each.upper() for each in formats)
        found = f"of the format {kind.upper()}" if kind else "no image"
        raise SampleError(f"{found}; the allowed formats are {allowed}")
    width, height = (
        _jpeg_size(data) if kind == "jpeg" else _read_size(data, kind)
    )
    if width * height > max_pixels:
        raise SampleError(
            f"an image of {width}x{height} pixels is over the limit of "
            f"{max_pixels} pixels (max_pixels)"
        )
    image = _decode(data, kind)
    if tuple(image.shape) != (3, height, width):
        raise SampleError(
            f"damaged {kind.upper()}: its header states another size"
        )
    return image


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """Reads width and height, and counts the scans.

    Only the image's own segments count: no thumbnail, and nothing that
    follows the image.  Pillow's parser takes quadratic time for many Exif
    segments.
    """
    size = (0, 0)
    scans = position = 0
    while found := _SEGMENTS.search(data, position):
        marker, position = found[1], found.end()
        if marker == _END_OF_IMAGE:
            break
        if marker in _START_OF_FRAME:
            frame = data[position + 3 : position + 7]
            height = int.from_bytes(frame[:2], "big")
            size = int.from_bytes(frame[2:], "big"), height
        if marker not in _NO_LENGTH:
            position += int.from_bytes(data[position : position + 2], "big")
        scans += marker == _START_OF_SCAN
    if scans > MAX_SCANS:
        raise SampleError(f"a JPEG of more than {MAX_SCANS} scans")
    if not all(size):
        raise SampleError("damaged JPEG: unreadable header")
    return size


def _check_tiff(data: bytes) -> None:
    """Counts the strips and tiles of the first page (TIFF 6.0, section 2).

    Raises:
        struct.error: if the file ends within its directory.
    """
    order = "<" if data[:1] == b"I" else ">"
    is_big = data[2:4] in (b"+\0", b"\0+")
    at, offset, length, entry = (
        (8, "Q", "Q", "HHQ8x") if is_big else (4, "I", "H", "HHI4x")
    )
    (place,) = struct.unpack_from(order + offset, data, at)
    (count,) = struct.unpack_from(order + length, data, place)
    place += struct.calcsize(order + length)
    for number in range(min(count, MAX_BLOCKS)):
        tag, _, found = struct.unpack_from(
            order + entry,
            data,
            place + number * struct.calcsize(order + entry),
        )
        if tag in _BLOCK_TAGS and found > MAX_BLOCKS:
            raise SampleError(f"a TIFF of more than {MAX_BLOCKS} strips")


def _check_gif(data: bytes) -> None:
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
            if blocks > MAX_BLOCKS:
                raise SampleError(
                    f"a GIF of more than {MAX_BLOCKS} blocks before its image"
                )
            place += 1 + data[place]
            if not data[place - 1]:
                break


def _parser(kind: str) -> Any:
    """Pillow's class for a format.

    Unlike ``Image.open``, it neither tries other formats nor warns about
    large images.
    """
    if kind in _OPTIONAL and not features.check(kind):
        raise SampleError(f"{kind.upper()}, which this Pillow cannot read")
    module, _, name = FORMATS[kind].partition(".")
    return getattr(importlib.import_module(f"PIL.{module}"), name)


_CHECKS = {"tiff": _check_tiff, "gif": _check_gif}
"""Limits of what Pillow does for a header."""


def _read_size(data: bytes, kind: str) -> tuple[int, int]:
    parser = _parser(kind)
    try:
        if kind in _CHECKS:
            _CHECKS[kind](data)
        with parser(io.BytesIO(data)) as header:  # reads headers only
            width, height = header.size
    except (MemoryError, SampleError):
        raise
    except Exception as error:  # Pillow's parsers raise many types
        raise SampleError(
            f"damaged {kind.upper()}: unreadable header"
        ) from error
    return int(width), int(height)


def _decode(data: bytes, kind: str) -> torch.Tensor:
    name = kind.upper()
    try:
        if kind == "jpeg":
            return _decode_jpeg(data)
        return _decode_with_pillow(data, kind)
    except (MemoryError, ImportError, SampleError):
        raise
    except Exception as error:  # Pillow's decoders raise many types
        if any(words in str(error) for words in _OUT_OF_MEMORY):
            # A retry may succeed, so this is no SampleError.
            raise MemoryError(f"decoding a {name}: {error}") from error
        # The libraries' messages contain paths and change with releases.
        raise SampleError(f"damaged {name}: it cannot be decoded") from error


def _decode_jpeg(data: bytes) -> torch.Tensor:
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    image: torch.Tensor = _jpeg_operator()(buffer, _MODE_RGB)
    return image


@functools.cache
def _jpeg_operator() -> Any:
    """Returns the operator behind ``torchvision.io.decode_jpeg``.

    Only its library is loaded: importing torchvision takes a worker seconds
    of a core and 180 MB, nearly all for ``torch.compile``.
    """
    ops: Any = torch.ops  # its annotations are incomplete
    package = importlib.util.find_spec("torchvision")
    assert package is not None
    assert package.origin is not None
    try:
        for library in Path(package.origin).parent.glob("image*.so"):
            ops.load_library(library)
        return ops.image.decode_jpeg
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"torchvision cannot decode JPEGs: {error}; install the "
            f"torchvision that belongs to torch {torch.__version__}"
        ) from error


def _decode_with_pillow(data: bytes, kind: str) -> torch.Tensor:
    # Also PNGs: torchvision's decoder reads past the end of a truncated file
    # and crashes the process.
    with _parser(kind)(io.BytesIO(data)) as image:
        if image.mode == "F":
            raise SampleError(f"{kind.upper()} of floating-point numbers")
        if image.mode.startswith("I"):
            grey = np.asarray(image).astype(np.int64) >> 8
            if not 0 <= grey.min() <= grey.max() <= _MAX_BYTE:
                raise SampleError(f"{kind.upper()} of more than 16 bits")
            pixels = np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)
        else:
            pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
