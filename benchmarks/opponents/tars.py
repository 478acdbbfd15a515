"""Samples of a tar that is read sequentially.

``tarfile`` copies its data several times; here a photograph is read from the
socket into the decoder's buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

BLOCK_BYTES = 512
NAME = slice(0, 100)
SIZE = slice(124, 136)
KIND = slice(156, 157)
REGULAR = (b"0", b"\0")


class Source(Protocol):
    """A file, or the body of a response."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


def samples(tar: Source) -> Iterator[tuple[str, bytearray, int]]:
    """Key, JPEG and label of each sample, from ``<key>.jpg``, ``<key>.cls``.

    Raises:
        EOFError: the tar ends too early.
        ValueError: it contains another kind of file, or a long name.
    """
    header = bytearray(BLOCK_BYTES)
    jpeg = bytearray()
    while True:
        _fill(tar, header)
        if not any(header):
            return
        name = bytes(header[NAME]).rstrip(b"\0").decode()
        if header[KIND] not in REGULAR:
            raise ValueError(f"{name} is no file with a name of plain ASCII")
        size = int(header[SIZE].rstrip(b"\0 "), 8)
        data = bytearray(-(-size // BLOCK_BYTES) * BLOCK_BYTES)
        _fill(tar, data)
        del data[size:]
        key, _, extension = name.rpartition(".")
        if extension == "jpg":
            jpeg = data
        elif extension == "cls":
            yield key, jpeg, int(data)


def _fill(tar: Source, buffer: bytearray) -> None:
    view = memoryview(buffer)
    while view:
        count = tar.readinto(view)
        if not count:
            raise EOFError("the tar ends too early")
        view = view[count:]
