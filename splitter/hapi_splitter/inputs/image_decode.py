"""Decodes image files to uint8 RGB tensors."""

from __future__ import annotations

import functools
import importlib.util
import io
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

DEFAULT_MAX_PIXELS = 1 << 26
"""Largest image that is decoded, 67 million pixels."""
MAX_SCANS = 100
"""Most scans of a progressive JPEG, which usually has about ten.  A scan of a
few bytes still costs a pass over the whole image."""

_START_OF_SCAN = b"\xff\xda"
"""Inside coded data 0xff is followed by 0 or a restart marker (ITU-T T.81,
B.1.1.5), so this marks a scan, or is a coincidence inside metadata."""

_MODE_RGB = 3
"""``torchvision.io.ImageReadMode.RGB``."""
_OUT_OF_MEMORY = ("can't allocate memory", "Insufficient memory", "bad_alloc")

_MAGIC: Mapping[str, bytes] = MappingProxyType(
    {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n"}
)


class SampleError(Exception):
    """A sample is unusable, and a retry would fail in the same way.

    The message depends only on the sample's bytes.
    """


def decode_image(
    data: bytes, *, max_pixels: int = DEFAULT_MAX_PIXELS
) -> torch.Tensor:
    """Decodes a JPEG or PNG file to RGB pixels, uint8 ``[3, H, W]``.

    The format is detected by the first bytes. Grey, palette and CMYK images
    become RGB, alpha is dropped, 16-bit PNGs keep their upper eight bits. EXIF
    orientation is ignored, as in torchvision's default.

    Raises:
        SampleError: undecodable, truncated, of another format or larger
            than ``max_pixels``.
    """
    kind = _detect_format(data)
    if kind == "JPEG" and _num_scans(data) > MAX_SCANS:
        raise SampleError(f"a JPEG of more than {MAX_SCANS} scans")
    width, height = _read_size(data, kind)
    if width * height > max_pixels:
        raise SampleError(
            f"an image of {width}x{height} pixels is over the limit of "
            f"{max_pixels} pixels"
        )
    image = _decode(data, kind)
    if tuple(image.shape) != (3, height, width):
        raise SampleError(f"damaged {kind}: its header states another size")
    return image


def _detect_format(data: bytes) -> str:
    for kind, magic in _MAGIC.items():
        if bytes(data[: len(magic)]) == magic:
            return kind
    raise SampleError("neither a JPEG nor a PNG image")


def _num_scans(data: bytes) -> int:
    # Six times faster than bytes.count, and it releases the GIL.
    values = np.frombuffer(data, np.uint8)
    first, second = _START_OF_SCAN
    is_scan = (values[:-1] == first) & (values[1:] == second)
    return int(np.count_nonzero(is_scan))


def _read_size(data: bytes, kind: str) -> tuple[int, int]:
    # Unlike Image.open, the plugin classes neither try other formats nor warn
    # about large images. They read only headers.
    parser = JpegImageFile if kind == "JPEG" else PngImageFile
    try:
        with parser(io.BytesIO(data)) as header:
            width, height = header.size
    except MemoryError:
        raise
    except Exception as error:  # Pillow's parsers raise many types
        raise SampleError(f"damaged {kind}: unreadable header") from error
    return int(width), int(height)


def _decode(data: bytes, kind: str) -> torch.Tensor:
    try:
        return _decode_jpeg(data) if kind == "JPEG" else _decode_png(data)
    except (RuntimeError, OSError, ValueError, SyntaxError) as error:
        if any(words in str(error) for words in _OUT_OF_MEMORY):
            # A retry may succeed, so this is no SampleError.
            raise MemoryError(f"decoding a {kind}: {error}") from error
        # The libraries' messages contain paths and change with releases.
        raise SampleError(f"damaged {kind}: it cannot be decoded") from error


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


def _decode_png(data: bytes) -> torch.Tensor:
    # torchvision's decoder reads past the end of a truncated file and crashes
    # the process. PNG is lossless, so Pillow yields the same pixels.
    with PngImageFile(io.BytesIO(data)) as image:
        if image.mode.startswith("I"):
            grey = np.asarray(image).astype(np.uint32) >> 8
            pixels = np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)
        else:
            pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
