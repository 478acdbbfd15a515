"""Images made of valid parts in odd numbers, sizes and orders.

Damaged images (``test_parsers``) rarely cost much; these are made to.  Large
ones are decoded in processes with a deadline: here their headers are read.
"""

import functools
import io
import random
import struct
import zlib

import pytest
from PIL import Image

from fuzzing import NUMBERS, fuzz
from hapi_protocol.samples import SampleError
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_header import read_header
from pillow_formats import needs_format

MAX_PIXELS = 1 << 20
COUNTS = (0, 1, 1, 1, 2, 5, 100, 4000, 70_000)
SIDES = (0, 1, 7, 24, 255, 256, 1000, 65_535)


def picture(kind: str, **options) -> bytes:
    image = Image.linear_gradient("L").resize((24, 24)).convert("RGB")
    image.save(sink := io.BytesIO(), kind, **options)
    return sink.getvalue()


def noise(chance: random.Random) -> bytes:
    return chance.randbytes(chance.choice((0, 1, 2, 30, 1000)))


@functools.cache
def zeros(count: int) -> bytes:
    return zlib.compress(bytes(count), 9)


def _most(data: bytes) -> int:
    """Number of the counts that a part may have, so that files stay small."""
    return 9 if len(data) < 99 else 8 if len(data) < 2000 else 6


def gif(chance: random.Random) -> bytes:
    """Blocks before and after images, of any size of screen and frame."""
    whole = picture("GIF")
    colours = 3 << (whole[10] & 7) + 1
    body = whole[13 + colours :]
    size = [chance.choice(SIDES) for _ in range(2)]
    screen = b"GIF89a" + struct.pack("<HH", *size) + whole[10:13]
    parts = [screen, whole[13 : 13 + colours]]
    for _ in range(chance.choice((1, 2, 3))):
        data = noise(chance)[:255]
        block = b"!" + bytes([chance.choice((0xF9, 0xFE, 0xFF, 0x01))])
        block += bytes([len(data)]) + data + b"\0"
        parts.append(block * chance.choice(COUNTS))
        frame = bytearray(body)
        struct.pack_into(
            "<HH", frame, 5, *(chance.choice(SIDES) for _ in "wh")
        )
        frame[10] = chance.choice((2, 8, 12, frame[10]))
        parts.append(bytes(frame) * chance.choice((1, 1, 3)))
    return b"".join(parts)


def tiff(chance: random.Random) -> bytes:
    """A directory of the known tags, with odd types, numbers and values."""
    order = chance.choice("<>")
    usual = {256: 24, 257: 24, 258: 8, 259: 1, 262: 1, 273: 200, 277: 1}
    usual |= {278: 24, 279: 576}
    chosen = chance.sample(sorted(usual), chance.choice((7, 8, 9, 9)))
    chosen += chance.sample((274, 317, 320, 322, 323, 324, 325, 330, 34675), 2)
    entries = []
    for tag in sorted(chosen):
        value = usual.get(tag, 1)
        count, kind = 1, 4
        if chance.random() < 0.2:
            value = chance.choice((*SIDES, *NUMBERS, 5, 7, 8, 32773, 50000))
        if chance.random() < 0.1:
            count = chance.choice((*COUNTS, *NUMBERS))
        if chance.random() < 0.1:
            kind = chance.choice((1, 2, 3, 5, 7, 12, 13, 16, 99))
        entries.append(
            struct.pack(
                f"{order}HHII", tag, kind, count % 2**32, value % 2**32
            )
        )
    head = (b"II" if order == "<" else b"MM") + struct.pack(
        f"{order}HIH", 42, 8, len(entries)
    )
    data = head + b"".join(entries) + bytes(4)
    return data.ljust(200, b"\0") + bytes(chance.choice((576, 10**5, 10**6)))


def webp(chance: random.Random) -> bytes:
    """Chunks of an animation, of any number and size."""
    image = picture("WEBP")[12:]
    alpha = picture("WEBP", lossless=True)[12:]

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            name
            + struct.pack("<I", len(data))
            + data
            + b"\0" * (len(data) % 2)
        )

    sides = [
        struct.pack("<I", chance.choice((23, 23, 23, *SIDES)))[:3]
        for _ in range(4)
    ]
    parts = [
        chunk(
            b"VP8X",
            bytes([chance.choice((0, 2, 16, 18)), 0, 0, 0])
            + sides[0]
            + sides[1],
        ),
        chunk(b"ANIM", bytes(6)),
    ]
    for _ in range(chance.choice((1, 2, 3))):
        frame = bytes(6) + sides[2] + sides[3] + bytes(4)
        part = chance.choice(
            (
                chunk(b"ANMF", frame + chance.choice((image, alpha, b""))),
                image,
                alpha,
                chunk(b"ALPH", noise(chance)),
                chunk(b"XXXX", noise(chance)),
            )
        )
        parts.append(part * chance.choice(COUNTS[:-1]))
    if chance.random() < 0.3:
        unknown = chunk(b"XXXX", noise(chance)) * chance.choice(COUNTS)
        parts = [parts[0], chance.choice((image, alpha)), unknown]
    body = b"WEBP" + b"".join(parts)
    size = chance.choice((len(body),) * 3 + (0, 2**32 - 1, len(body) - 9))
    return b"RIFF" + struct.pack("<I", max(size, 0)) + body


def png(chance: random.Random) -> bytes:
    """Chunks with their checksums: bombs, empty ones, odd headers."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data))
            + name
            + data
            + struct.pack(">I", zlib.crc32(name + data))
        )

    sides = [chance.choice(SIDES) for _ in range(2)]
    kind = chance.choice(((8, 2), (8, 0), (16, 0), (1, 0), (8, 3), (8, 6)))
    parts = [
        b"\x89PNG\r\n\x1a\n",
        chunk(
            b"IHDR",
            struct.pack(
                ">II5B", *sides, *kind, 0, 0, chance.choice((0, 0, 1))
            ),
        ),
    ]
    # Pillow unpacks up to 1 MiB.
    bomb = zeros(chance.choice((100, 2**20 - 1, 3 * 10**7)))
    for _ in range(chance.choice((1, 2, 3))):
        name, data = chance.choice(
            (
                (b"tEXt", b"k\0" + noise(chance)),
                (b"zTXt", b"k\0\0" + bomb),
                (b"iTXt", b"k\0\1\0\0\0" + bomb),
                (b"iCCP", b"k\0\0" + bomb),
                (b"eXIf", b"II*\0" + noise(chance)),
                (b"PLTE", noise(chance)[:768]),
                (b"acTL", bytes(8)),
                (b"fcTL", bytes(26)),
                (b"IDAT", b""),
            )
        )
        parts.append(chunk(name, data) * chance.choice(COUNTS[: _most(data)]))
    pixels = zeros(chance.choice((10, 2000, 10**6)))
    size = chance.choice((1, 100, len(pixels)))
    parts += [
        chunk(b"IDAT", pixels[n : n + size])
        for n in range(0, len(pixels), size)
    ]
    return b"".join(parts) + chunk(b"IEND", b"")


def jpeg(chance: random.Random) -> bytes:
    """Segments and scans of any number, in any frame."""
    data = picture("JPEG", progressive=chance.random() < 0.5)
    start = data.index(b"\xff\xda")
    frame = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    changed = bytearray(data)
    for side in (frame + 5, frame + 7):
        if chance.random() < 0.5:
            struct.pack_into(">H", changed, side, chance.choice(SIDES))
    if chance.random() < 0.3:
        changed[frame + 11] = chance.choice((0x11, 0x22, 0x44, 0xFF, 0))
    head, scans = bytes(changed[2:start]), bytes(changed[start:-2])
    part = noise(chance)
    marker = chance.choice((0xE0, 0xE1, 0xED, 0xFE, 0xDB, 0xC4, 0xDD))
    segment = (
        b"\xff" + bytes([marker]) + struct.pack(">H", len(part) + 2) + part
    )
    return (
        data[:2]
        + segment * chance.choice(COUNTS[: _most(part)])
        + head
        + scans * chance.choice((1, 1, 2, 50, 101))
        + b"\xff\xd9"
    )


def avif(chance: random.Random) -> bytes:
    """Boxes inside the meta box, repeated, and other numbers in them."""
    data = picture("AVIF", speed=10)
    names = (b"ispe", b"iloc", b"infe", b"ipma", b"pixi", b"av1C", b"ipco")
    changed = bytearray(data)
    for name in chance.sample(names, 2):
        at = data.find(name)
        if at > 0:
            place = at + chance.choice((-4, 4, 8, 10, 12, 14))
            number = chance.choice(NUMBERS) % 2**32
            struct.pack_into(">I", changed, place, number)
    box = data[(at := data.find(b"ispe") - 4) : at + 20]
    return bytes(changed) + box * chance.choice(COUNTS)


MAKERS = {
    "gif": gif,
    "tiff": tiff,
    "webp": webp,
    "png": png,
    "jpeg": jpeg,
    "avif": avif,
}


def read(data: bytes) -> None:
    header = read_header(data, max_pixels=MAX_PIXELS)
    if header.is_large:
        raise SampleError("a process with a deadline decodes it")
    decode_image(data, max_pixels=MAX_PIXELS, header=header)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MAKERS)
def test_odd_structures_cost_little(kind):
    needs_format(kind)
    fuzz(f"structure of {kind}", MAKERS[kind], read, SampleError)
