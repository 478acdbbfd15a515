"""Objects that are cheap to send and dear to read, as streams of pieces."""

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
BLOCKS_A_PIECE = 128


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A member's first block, which claims ``size`` bytes."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def member(name: str, data: bytes) -> bytes:
    """A whole regular member."""
    return header(name, len(data)) + data + bytes(-len(data) % BLOCK_BYTES)


def joined(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces worth sending."""
    piece = []
    for block in blocks:
        piece.append(block)
        if len(piece) == BLOCKS_A_PIECE:
            yield b"".join(piece)
            piece.clear()
    yield b"".join(piece) or bytes(BLOCK_BYTES)


def empty_members(count: int, kind: str) -> Iterator[bytes]:
    """``count`` members without content: directories, or samples of
    their own, or all of one sample."""
    form, type_ = {
        "directories": ("d{}", tarfile.DIRTYPE),
        "samples": ("s{}.jpg", tarfile.REGTYPE),
        "one sample": ("s.{}", tarfile.REGTYPE),
    }[kind]
    return joined(header(form.format(n), 0, type_) for n in range(count))


def claiming(start: bytes, size: int = GIB) -> Iterator[bytes]:
    """``start``, and then as many zero bytes as it claims."""
    yield start
    zeros = bytes(64 * 1024)
    for _ in range(size // len(zeros)):
        yield zeros


def pax_size(size: int = GIB) -> bytes:
    """An extended header which gives a small member a large size."""
    record = b"size=%d\n" % size
    record = b"%d %s" % (len(record) + 3, record)
    return (
        header("pax", len(record), tarfile.XHDTYPE)
        + record
        + bytes(-len(record) % BLOCK_BYTES)
        + header("a.jpg")
    )


def large_samples(count: int, image: bytes, size: int) -> Iterator[bytes]:
    """``count`` samples: the image, and a member of ``size`` bytes."""
    ballast = bytes(size)
    for number in range(count):
        key = f"k{number:06d}"
        yield member(f"{key}.jpg", image) + header(f"{key}.bin", size)
        yield ballast
    yield bytes(2 * BLOCK_BYTES)


def large_samples_bytes(count: int, image: bytes, size: int) -> int:
    """Length of :func:`large_samples`; ``size`` is whole blocks."""
    assert size % BLOCK_BYTES == 0
    a_sample = len(member("k.jpg", image)) + BLOCK_BYTES + size
    return count * a_sample + 2 * BLOCK_BYTES


def huge_png(side: int, *, text: int = 0) -> bytes:
    """A PNG that states a size and has hardly any pixels.

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
    """A whole image of one colour: few bytes, many pixels."""
    sink = io.BytesIO()
    Image.new("RGB", (side, side), (9, 99, 199)).save(sink, kind)
    return sink.getvalue()


def huge_jpeg(side: int = 65_000) -> bytes:
    """A JPEG that states a size and has pixels for a smaller one."""
    small = bytearray(plain_image(64, "JPEG"))
    start = small.index(b"\xff\xc0") + 5
    small[start : start + 4] = struct.pack(">2H", side, side)
    return bytes(small)


def jpeg_of_many_scans(num_scans: int) -> bytes:
    """A progressive JPEG whose last scan is there many times."""
    sink = io.BytesIO()
    Image.new("RGB", (512, 512)).save(sink, "JPEG", progressive=True)
    whole = sink.getvalue()
    start = whole.rindex(b"\xff\xda")
    return whole[:start] + whole[start:-2] * num_scans + whole[-2:]
