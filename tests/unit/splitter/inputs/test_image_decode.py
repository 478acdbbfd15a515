"""Decoding of image files."""

import io
import struct
import subprocess
import sys
import time
import zlib
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, PngImagePlugin, features
from torchvision.io import ImageReadMode, decode_jpeg

from hapi_protocol.samples import IMAGE, SNIFF_BYTES, SampleError, sniff
from hapi_splitter.inputs import image_decode, image_header
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_header import read_header
from hapi_splitter.inputs.tiff_directory import upright
from pillow_formats import needs_format


def picture(mode="RGB", kind="JPEG", size=(40, 30), **options):
    """Returns a file with a smooth image."""
    width, height = size
    ramp = np.linspace(0, 255, width * height * 3).reshape(height, width, 3)
    image = Image.fromarray(ramp.astype(np.uint8)).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("JPEG", mode) for mode in ("RGB", "L", "CMYK")]
    + [("PNG", mode) for mode in ("RGB", "L", "P", "RGBA", "LA", "1")]
    + [("WEBP", mode) for mode in ("RGB", "RGBA")]
    + [("GIF", mode) for mode in ("RGB", "L")]
    + [("BMP", mode) for mode in ("RGB", "L", "P")]
    + [("TIFF", mode) for mode in ("RGB", "L", "RGBA", "CMYK")]
    + [("AVIF", "RGB")] * features.check("avif"),
)
def test_every_pixel_format_becomes_rgb_bytes(kind, mode):
    data = picture(mode, kind)
    image = decode_image(data)
    assert (image.dtype, image.shape) == (torch.uint8, (3, 30, 40))
    if mode not in ("CMYK", "1", "P"):
        pillow = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        error = image.permute(1, 2, 0).int() - torch.from_numpy(pillow).int()
        assert error.abs().max() <= 2


def test_16_bit_grey_becomes_its_upper_byte():
    grey = np.arange(40 * 30, dtype=np.uint16).reshape(30, 40) * 50
    Image.fromarray(grey).save(buffer := io.BytesIO(), "PNG")
    image = decode_image(buffer.getvalue())
    expected = torch.from_numpy((grey >> 8).astype(np.uint8))
    assert image.dtype == torch.uint8
    assert torch.equal(image, expected.expand(3, -1, -1))


@pytest.mark.parametrize(
    ("dtype", "most", "problem"),
    [
        (np.int32, 65_535, None),
        (np.int32, 65_536, "TIFF of more than 16 bits"),
        (np.int32, -1, "TIFF of more than 16 bits"),
        (np.float32, 1.0, "TIFF of floating-point numbers"),
    ],
)
def test_other_numbers_than_16_bits_are_refused(dtype, most, problem):
    grey = np.zeros((3, 4), dtype)
    grey[0, 0] = most
    Image.fromarray(grey).save(buffer := io.BytesIO(), "TIFF")
    if problem is None:
        assert decode_image(buffer.getvalue())[0, 0, 0] == 255
        return
    with pytest.raises(SampleError, match=problem):
        decode_image(buffer.getvalue())


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF"])
def test_first_frame_counts(kind):
    frames = [Image.new("RGB", (8, 8), (value, 0, 0)) for value in (0, 255)]
    buffer = io.BytesIO()
    lossless = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(
        buffer, kind, save_all=True, append_images=frames[1:], **lossless
    )
    assert not decode_image(buffer.getvalue()).any()


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "BMP", "TIFF"])
def test_other_formats_have_the_limits_of_png(kind):
    data = picture(kind=kind)
    with pytest.raises(SampleError, match="limit of 1199 pixels"):
        decode_image(data, max_pixels=1199)
    for length in (20, len(data) // 2):
        with pytest.raises(SampleError, match=f"damaged {kind}|no image"):
            decode_image(data[:length])
    with pytest.raises(SampleError, match=f"format {kind}; the allowed .*PNG"):
        decode_image(data, formats=("jpeg", "png"))


@pytest.mark.parametrize(
    "kind",
    [k for k in IMAGE.kinds if k != "avif" or features.check("avif")],
)
def test_formats_are_known_by_their_first_bytes(kind):
    assert sniff(picture(kind=kind.upper())[:SNIFF_BYTES]) == kind
    assert kind in image_header.FORMATS


def test_jpeg_equals_torchvision_bit_for_bit():
    data = picture()
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    expected = decode_jpeg(buffer, mode=ImageReadMode.RGB)
    assert torch.equal(decode_image(data), expected)


def test_exif_orientation_is_ignored():
    image = Image.open(io.BytesIO(picture()))
    exif = image.getexif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    assert decode_image(buffer.getvalue()).shape == (3, 30, 40)


def png_header(width, height):
    """Returns a PNG that states a size and has hardly any pixels."""

    def chunk(kind, body):
        check = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + check

    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(100))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    )


@pytest.mark.filterwarnings("error")
def test_huge_image_is_refused_from_its_header():
    with pytest.raises(SampleError, match=r"50000x50000 .* over the limit"):
        decode_image(png_header(50_000, 50_000))


def test_max_pixels_is_enforced():
    assert decode_image(picture(), max_pixels=1200).shape == (3, 30, 40)
    with pytest.raises(SampleError, match="limit of 1199 pixels"):
        decode_image(picture(), max_pixels=1199)


def tiff_of(strips, order="<", is_big=False):
    """A page of one row a strip, all of them the same byte."""
    number = "Q" if is_big else "I"
    size = 20 if is_big else 12
    head = 16 if is_big else 8
    tags = [
        *((256, 1), (257, strips), (258, 8), (259, 1), (262, 1)),
        *((273, None), (277, 1), (278, 1), (279, None)),
    ]
    count = struct.pack(order + ("Q" if is_big else "H"), len(tags))
    after = head + len(count) + len(tags) * size + struct.calcsize(number)
    entries, data = b"", b""
    for tag, value in tags:
        many = 1 if value is not None else strips
        if value is None:
            value = after + len(data)
            each = after + 8 * strips if tag == 273 else 1
            data += struct.pack(f"{order}{strips}I", *[each] * strips)
        kind = 16 if is_big and many == 1 else 4
        entries += struct.pack(
            order + "HH" + 2 * number, tag, kind, many, value
        )
    magic = (b"II" if order == "<" else b"MM") + struct.pack(
        order + ("HHHQ" if is_big else "HI"),
        *((43, 8, 0, head) if is_big else (42, head)),
    )
    return (
        magic + count + entries + bytes(struct.calcsize(number)) + data + b"7"
    )


@pytest.mark.parametrize(
    ("order", "is_big"),
    # Pillow reads no BigTIFF of big-endian machines.
    [("<", False), (">", False), ("<", True)],
)
def test_strips_of_a_tiff_are_counted_before_it_is_read(
    monkeypatch, order, is_big
):
    image = decode_image(tiff_of(300, order, is_big))
    assert image.shape == (3, 300, 1)
    many = tiff_of(image_header.MAX_PARTS + 1, order, is_big)
    monkeypatch.setattr(
        image_header, "pillow_parser", Mock(side_effect=["unused"])
    )
    with pytest.raises(SampleError, match="a TIFF of more than 65536 strips"):
        decode_image(many)


@pytest.mark.parametrize(
    "blocks", [b"!\xfe\x00" * 70_000, b"!\xfe" + b"\x01a" * 70_000]
)
def test_blocks_of_a_gif_are_counted_before_it_is_read(monkeypatch, blocks):
    image = picture("RGB", "GIF")
    start = 13 + (3 << (image[10] & 7) + 1)
    few = image[:start] + b"!\xfe\x02ab\x00" * 100 + image[start:]
    assert torch.equal(decode_image(few), decode_image(image))
    many = image[:start] + blocks + image[start:]
    monkeypatch.setattr(
        image_header, "pillow_parser", Mock(side_effect=["unused"])
    )
    with pytest.raises(SampleError, match="a GIF of more than 65536 blocks"):
        decode_image(many)


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("JPEG", b"\xff\xfe\0\2"),
        ("PNG", bytes(4) + b"abCd" + struct.pack(">I", zlib.crc32(b"abCd"))),
    ],
)
def test_empty_parts_of_a_file_are_counted_before_it_is_read(
    monkeypatch, kind, part
):
    image = picture("RGB", kind)
    start = 2 if kind == "JPEG" else 33
    few = image[:start] + part * 4000 + image[start:]
    assert torch.equal(decode_image(few), decode_image(image))
    many = image[:start] + part * 70_000 + image[start:]
    monkeypatch.setattr(image_header, "pillow_parser", Mock(side_effect=[]))
    with pytest.raises(SampleError, match=f"a {kind} of more than "):
        decode_image(many)


@pytest.mark.parametrize("kind", sorted(image_header.FORMATS))
def test_header_states_the_size_of_the_image(kind):
    needs_format(kind)
    for mode, options in (
        ("RGB", {}),
        ("RGBA", {"lossless": True} if kind == "webp" else {}),
    ):
        if mode == "RGBA" and kind in ("jpeg", "bmp"):
            continue
        header = read_header(picture(mode, kind.upper(), **options))
        assert (header.width, header.height) == (40, 30)
        assert header.is_large == (kind == "avif")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
def test_orientation_is_ignored_or_applied_as_by_pillow(kind, orientation):
    needs_format(kind)
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010E] = "a description"
    data = picture(kind=kind, exif=exif)
    image = Image.open(io.BytesIO(data))
    as_stored = torch.from_numpy(np.array(image.convert("RGB")))
    turned = torch.from_numpy(np.array(ImageOps.exif_transpose(image)))
    tolerance = 2 if kind == "JPEG" else 0  # another build of its library
    for wanted, turns in ((as_stored, False), (turned, True)):
        found = decode_image(data, turns=turns).permute(1, 2, 0)
        assert found.shape == wanted.shape
        assert (found.int() - wanted.int()).abs().max() <= tolerance
    assert (kind == "TIFF") == torch.equal(as_stored, turned) or (
        orientation == 1
    )


def png_chunk(name, content=b""):
    """A chunk with its checksum."""
    checksum = zlib.crc32(name + content)
    return (
        struct.pack(">I4s", len(content), name)
        + content
        + struct.pack(">I", checksum)
    )


def test_texts_of_a_png_are_counted_before_they_are_unpacked(monkeypatch):
    image = picture(kind="PNG")
    text = png_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(2**20 - 1)))
    assert not read_header(image[:33] + 5 * text + image[33:]).is_large
    # Pillow would unpack them as it opens the file: 5 ms each.
    monkeypatch.setattr(image_header, "pillow_parser", Mock(side_effect=[]))
    for at in (33, -12):
        assert read_header(image[:at] + 20 * text + image[at:]).is_large
    profile = png_chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(2**20 - 1)))
    assert not read_header(image[:33] + profile + image[33:]).is_large
    with pytest.raises(SampleError, match="more than 1 colour profile"):
        read_header(image[:33] + 4000 * profile + image[33:])


def test_tags_of_a_tiff_that_share_their_values_make_it_large():
    """Pillow copies them for each tag: gigabytes of a file of megabytes."""
    plain = tiff_of(4)
    assert not read_header(plain).is_large
    count = 300
    entries = [struct.pack("<HHII", 400 + n, 1, 10, 8) for n in range(count)]
    start = 10 + 9 * 12

    def with_tags(more):
        number = struct.pack("<H", 9 + len(more))
        return (
            plain[:8]
            + number
            + plain[10:start]
            + b"".join(more)
            + (plain[start:])
        )

    assert not read_header(with_tags(entries[:3])).is_large
    assert read_header(with_tags(entries)).is_large
    shared = struct.pack("<HHII", 400, 2, len(plain) + 12, 8)
    assert read_header(with_tags([shared])).is_large


def test_orientations_of_other_writers_are_read():
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = decode_image(picture(kind="PNG"))
    turned = upright(plain, 6)
    content = exif.tobytes()
    info = PngImagePlugin.PngInfo()
    digits = (b"Exif\0\0" + content).hex()
    info.add_text(
        "Raw profile type exif", f"\nexif\n {len(content)}\n{digits}\n"
    )
    signed = content.replace(b"\x12\1\3\0", b"\x12\1\x08\0")
    for data in (
        picture(kind="PNG", pnginfo=info),
        picture(kind="PNG", exif=b"Exif\0\0" + content),
        picture(kind="PNG", exif=signed),
    ):
        assert torch.equal(decode_image(data, turns=True), turned)
        assert torch.equal(decode_image(data), plain)


def test_tiff_of_an_unknown_orientation_is_upright():
    exif = Image.Exif()
    exif[0x0112] = 9
    data = picture(kind="TIFF", exif=exif)
    assert torch.equal(decode_image(data), decode_image(picture(kind="TIFF")))


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"II*\0",
        b"II*\0\xff\xff\xff\xff",
        b"MM\0*\0\0\0\x08\xff\xff",
        b"II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\x09\0\0\0",
        b"II*\0\x08\0\0\0\1\0\x12\1\2\0\1\0\0\0\x06\0\0\0",
        b"junk" * 20,
    ],
)
def test_damaged_exif_data_do_not_turn(exif):
    data = picture(exif=b"Exif\0\0" + exif)
    assert torch.equal(decode_image(data, turns=True), decode_image(data))


def test_progressive_jpeg_may_have_100_scans():
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    num_scans = data.count(b"\xff\xda")
    start = data.rindex(b"\xff\xda")

    def repeated(num_repeats):
        return data[:start] + data[start:-2] * num_repeats + data[-2:]

    at_limit = repeated(100 - num_scans + 1)
    assert decode_image(at_limit).shape == (3, 64, 64)
    with pytest.raises(SampleError, match="more than 100 scans"):
        decode_image(repeated(100 - num_scans + 2))


def test_scans_outside_the_image_do_not_count():
    chance = b"\xff\xda" * 200
    image = Image.open(io.BytesIO(picture()))
    exif = image.getexif()
    exif[0x010E] = chance.decode("latin-1")
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif, comment=chance)
    data = buffer.getvalue()
    assert data.count(chance) >= 1
    assert torch.equal(decode_image(data + chance), decode_image(data))


def test_many_segments_take_linear_time():
    """Pillow joins them, in quadratic time: sixteen times as long."""
    segment = b"\xff\xe1\xff\xffExif\0\0" + bytes(0xFFFF - 8)
    data = picture()

    def seconds(num_segments):
        hostile = data[:2] + num_segments * segment + data[2:]
        started = time.thread_time()
        assert torch.equal(decode_image(hostile), decode_image(data))
        return time.thread_time() - started

    few = min(seconds(200) for _ in range(3))
    assert min(seconds(800) for _ in range(3)) < 10 * few


def test_lack_of_memory_is_no_sample_error(monkeypatch):
    fail = Mock(side_effect=lambda *_, **__: torch.empty(2**60))
    monkeypatch.setattr(image_decode, "_jpeg_operator", lambda: fail)
    with pytest.raises(MemoryError):
        decode_image(picture())


def test_decoding_does_not_import_torchvision(tmp_path):
    (tmp_path / "image.jpg").write_bytes(picture())
    program = (
        "import pathlib, sys\n"
        "import hapi_worker.main\n"
        "from hapi_splitter.inputs.image_decode import decode_image\n"
        "decode_image(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "sys.exit('torchvision' in sys.modules)"
    )
    arguments = [sys.executable, "-c", program, tmp_path / "image.jpg"]
    subprocess.run(arguments, check=True)


def test_torchvision_without_a_decoder_is_named(monkeypatch, tmp_path):
    spec = Mock(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    monkeypatch.setattr(torch, "ops", object())
    image_decode._jpeg_operator.cache_clear()
    with pytest.raises(ImportError, match="cannot decode JPEGs with torch"):
        decode_image(picture())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no image; the allowed formats are JPEG, PNG,"),
        (b"PK\x03\x04" + bytes(100), "of the format NPZ; the allowed"),
        (b"GIF89a" + bytes(100), "damaged GIF"),
        (b"\xff\xd8\xff", "damaged JPEG"),
        (b"\xff\xd8\xff" + bytes(100), "damaged JPEG"),
        (b"\x89PNG\r\n\x1a\n", "damaged PNG"),
        (picture()[:300], "damaged JPEG"),
        (picture(size=(400, 300))[:2000], "damaged JPEG"),
        (picture(kind="PNG")[:100], "damaged PNG"),
        (png_header(64, 64), "damaged PNG"),
    ],
)
def test_unusable_image_gives_the_same_error_each_time(data, message):
    messages = set()
    for _ in range(3):
        with pytest.raises(SampleError, match=message) as caught:
            decode_image(data)
        messages.add(str(caught.value))
    assert len(messages) == 1
