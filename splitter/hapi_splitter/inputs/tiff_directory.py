"""Directories of TIFF files, which EXIF data are too, and orientations."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

ORIENTATION = 274
EXIF_PREFIX = b"Exif\0\0"
MAX_ENTRIES = 1 << 16
"""Most entries of a directory; BigTIFF allows 2**64."""

_NUMBERS: Mapping[int, str] = MappingProxyType(
    {1: "B", 3: "H", 4: "I", 8: "h", 9: "i", 16: "Q"}
)
"""BYTE, SHORT, LONG, their signed forms, and BigTIFF's LONG8."""
_SIZES: Mapping[int, int] = MappingProxyType(
    {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
    | dict.fromkeys((16, 17, 18), 8)
)
"""Bytes of a value, if more than one."""


class DirectoryEntry(NamedTuple):
    """An entry of a directory (TIFF 6.0, section 2).

    Attributes:
        tag: what it is about.
        num_values: number of its values.
        num_bytes: bytes of all its values.
        number: the first of its values; None if it is no whole number.
    """

    tag: int
    num_values: int
    num_bytes: int
    number: int | None


def entries(data: bytes) -> Iterator[DirectoryEntry]:
    """Yields the entries of a file's first directory.

    Raises:
        struct.error: if the file ends within it.
    """
    order = "<" if data[:1] == b"I" else ">"
    is_big = data[2:4] in (b"+\0", b"\0+")
    at, offset, length, entry = (
        (8, "Q", "Q", "HHQ8s") if is_big else (4, "I", "H", "HHI4s")
    )
    (place,) = struct.unpack_from(order + offset, data, at)
    (num_entries,) = struct.unpack_from(order + length, data, place)
    place += struct.calcsize(order + length)
    for _ in range(min(num_entries, MAX_ENTRIES)):
        tag, kind, count, value = struct.unpack_from(
            order + entry, data, place
        )
        place += struct.calcsize(order + entry)
        number = None
        if kind in _NUMBERS:
            if struct.calcsize(order + _NUMBERS[kind]) * count > len(value):
                (start,) = struct.unpack_from(order + offset, value)
                value = data[start : start + 8].ljust(8, b"\0")
            (number,) = struct.unpack_from(order + _NUMBERS[kind], value)
        yield DirectoryEntry(tag, count, count * _SIZES.get(kind, 1), number)


def orientation(exif: bytes) -> int:
    """Reads the orientation of EXIF data, 1 to 8 (CIPA DC-008, 4.6.5.A).

    Returns:
        1, upright, without one or if the data are damaged.
    """
    while exif.startswith(EXIF_PREFIX):  # some writers add another
        exif = exif.removeprefix(EXIF_PREFIX)
    if exif[:4] in (b"II*\0", b"MM\0*"):
        with suppress(struct.error):
            for entry in entries(exif):
                number = entry.number or 0
                if entry.tag == ORIENTATION and 1 <= number <= 8:
                    return number
    return 1


def upright(image: torch.Tensor, orientation: int) -> torch.Tensor:
    """Turns an image as its orientation says.

    Args:
        image: ``[3, H, W]``.
        orientation: 1 to 8.

    Returns:
        ``[3, H, W]``, or ``[3, W, H]`` from orientation 5 on.
    """
    if orientation > 4:
        image = image.transpose(1, 2)
    # Of 5 to 8, in the order of the transposed image.
    axes = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}
    if orientation in axes:
        image = image.flip(axes[orientation])
    return image.contiguous()
