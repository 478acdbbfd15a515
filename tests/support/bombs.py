"""Objects that are cheap to send and expensive to read, as pieces."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from collections.abc import Iterator

from PIL import Image

MIB = 1 << 20
GIB = 1 << 30
BLOCK_BYTES = tarfile.BLOCKSIZE
BLOCKS_PER_PIECE = 128


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Returns the header block of a member that claims ``size`` bytes."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def member(name: str, data: bytes) -> bytes:
    """Returns a complete regular member."""
    return header(name, len(data)) + data + bytes(-len(data) % BLOCK_BYTES)


def joined(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Joins blocks to larger pieces."""
    piece = []
    for block in blocks:
        piece.append(block)
        if len(piece) == BLOCKS_PER_PIECE:
            yield b"".join(piece)
            piece.clear()
    yield b"".join(piece) or bytes(BLOCK_BYTES)


def empty_members(count: int, kind: str) -> Iterator[bytes]:
    """Yields empty members: directories, single samples, or one sample."""
    form, type_ = {
        "directories": ("d{}", tarfile.DIRTYPE),
        "samples": ("s{}.jpg", tarfile.REGTYPE),
        "one sample": ("s.{}", tarfile.REGTYPE),
    }[kind]
    return joined(header(form.format(n), 0, type_) for n in range(count))


def claiming(start: bytes, size: int = GIB) -> Iterator[bytes]:
    """Yields ``start`` and then ``size`` zero bytes."""
    yield start
    zeros = bytes(64 * 1024)
    for _ in range(size // len(zeros)):
        yield zeros


def pax_size(size: int = GIB) -> bytes:
    """Returns an extended header that claims a large size."""
    record = b"size=%d\n" % size
    record = b"%d %s" % (len(record) + 3, record)
    return (
        header("pax", len(record), tarfile.XHDTYPE)
        + record
        + bytes(-len(record) % BLOCK_BYTES)
        + header("a.jpg")
    )


def large_samples(count: int, image: bytes, size: int) -> Iterator[bytes]:
    """Yields samples of the image and a member of ``size`` bytes each."""
    ballast = bytes(size)
    for number in range(count):
        key = f"k{number:06d}"
        yield member(f"{key}.jpg", image) + header(f"{key}.bin", size)
        yield ballast
    yield bytes(2 * BLOCK_BYTES)


def large_samples_bytes(count: int, image: bytes, size: int) -> int:
    """Returns the length of :func:`large_samples`."""
    assert size % BLOCK_BYTES == 0
    sample_bytes = len(member("k.jpg", image)) + BLOCK_BYTES + size
    return count * sample_bytes + 2 * BLOCK_BYTES


def huge_png(side: int, *, text: int = 0) -> bytes:
    """Returns a PNG that states a size and has hardly any pixels.

    Args:
        side: pixels of each side.
        text: length of a compressed comment.
    """
    chunks = [_chunk(b"IHDR", struct.pack(">2I5B", side, side, 8, 2, 0, 0, 0))]
    if text:
        comment = zlib.compress(bytes(text))
        chunks.append(_chunk(b"zTXt", b"c\0\0" + comment))
    chunks.append(_chunk(b"IDAT", zlib.compress(bytes(1000))))
    chunks.append(_chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, body: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + body))
    return struct.pack(">I", len(body)) + kind + body + check


def plain_image(side: int, kind: str = "PNG") -> bytes:
    """Returns an image of one colour: few bytes, many pixels."""
    sink = io.BytesIO()
    Image.new("RGB", (side, side), (9, 99, 199)).save(sink, kind)
    return sink.getvalue()


def huge_jpeg(side: int = 65_000) -> bytes:
    """Returns a small JPEG that states a larger size."""
    small = bytearray(plain_image(64, "JPEG"))
    start = small.index(b"\xff\xc0") + 5
    small[start : start + 4] = struct.pack(">2H", side, side)
    return bytes(small)


def jpeg_of_many_scans(num_scans: int) -> bytes:
    """Returns a progressive JPEG whose last scan is repeated."""
    sink = io.BytesIO()
    Image.new("RGB", (512, 512)).save(sink, "JPEG", progressive=True)
    whole = sink.getvalue()
    start = whole.rindex(b"\xff\xda")
    return whole[:start] + whole[start:-2] * num_scans + whole[-2:]
