"""Decodes image files to uint8 RGB tensors."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hapi_protocol.samples import SampleError
from hapi_splitter.inputs.image_header import (
    DEFAULT_MAX_PIXELS,
    FORMATS,
    ImageHeader,
    pillow_parser,
    read_header,
)
from hapi_splitter.inputs.tiff_directory import orientation, upright

_MODE_RGB = 3
"""``torchvision.io.ImageReadMode.RGB``."""
_OUT_OF_MEMORY = ("can't allocate memory", "Insufficient memory", "bad_alloc")


def decode_image(
    data: bytes,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    formats: Collection[str] = FORMATS,
    header: ImageHeader | None = None,
    turns: bool = False,
) -> torch.Tensor:
    """Decodes an image file to RGB pixels, uint8 ``[3, H, W]``.

    The format is detected by the first bytes. Grey, palette and CMYK images
    become RGB, alpha is dropped, 16-bit images keep their upper eight bits,
    others of more than eight are refused, and of several frames or pages the
    first one counts. The orientation of a TIFF, a tag of the format itself, is
    applied, as by Pillow.

    Args:
        data: the file.
        max_pixels: largest image that is decoded.
        formats: formats that are allowed, of ``FORMATS``.
        header: result of ``read_header`` with these arguments, if the caller
            has it.
        turns: apply the orientation in EXIF data, too, as browsers do; Pillow,
            ``ImageFolder`` and torchvision leave images as they are stored.

    Raises:
        SampleError: undecodable, truncated, of another format or larger
            than ``max_pixels``.
    """
    if header is None:
        header = read_header(data, max_pixels=max_pixels, formats=formats)
    image, stored = _decode(data, header)
    return upright(image, stored) if turns else image


def _decode(data: bytes, header: ImageHeader) -> tuple[torch.Tensor, int]:
    """Returns the image as it is stored, and its orientation."""
    name = header.kind.upper()
    try:
        if header.kind == "jpeg":
            image = _decode_jpeg(data)
            _check_size(header, image.shape[2], image.shape[1])
            return image, header.orientation
        return _decode_with_pillow(data, header)
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
            f"torchvision {metadata.version('torchvision')} cannot decode "
            f"JPEGs with torch {torch.__version__}: {error}; install the "
            "torchvision of this torch's release, from the same index"
        ) from error


def _exif(image: Any) -> bytes:
    """EXIF data of an image, also as old PNGs have them: as hex digits."""
    text = image.info.get("Raw profile type exif")
    if text is not None and "exif" not in image.info:
        try:
            return bytes.fromhex("".join(str(text).split("\n")[3:]))
        except ValueError:
            return b""
    exif: bytes = image.info.get("exif", b"")
    return exif


def preload_decoders() -> None:
    """Loads the decoders' libraries, before a process forks.

    Raises:
        ImportError: torchvision's library does not fit torch.
    """
    for kind in FORMATS:
        with contextlib.suppress(SampleError):  # this Pillow has it not
            pillow_parser(kind)
    _jpeg_operator()


def _check_size(header: ImageHeader, width: int, height: int) -> None:
    if (width, height) != (header.width, header.height):
        raise SampleError(
            f"damaged {header.kind.upper()}: its header states another size"
        )


def _decode_with_pillow(
    data: bytes, header: ImageHeader
) -> tuple[torch.Tensor, int]:
    # Also PNGs: torchvision's decoder reads past the end of a truncated file
    # and crashes the process.
    kind = header.kind
    with pillow_parser(kind)(io.BytesIO(data)) as image:
        if kind != "avif":
            # Only its decoder knows which of an AVIF's sizes is the image's.
            _check_size(header, *image.size)
        if image.mode == "F":
            raise SampleError(f"{kind.upper()} of floating-point numbers")
        if image.mode.startswith("I"):
            grey = np.asarray(image)
            if not 0 <= grey.min() <= grey.max() < 1 << 16:
                raise SampleError(f"{kind.upper()} of more than 16 bits")
            grey = (grey >> 8).astype(np.uint8)
            pixels = np.repeat(grey[..., None], 3, axis=2)
        else:
            pixels = np.array(image.convert("RGB"))
        exif = b"" if kind == "tiff" else _exif(image)
    decoded = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    return decoded, orientation(exif)
