"""Decoding and the input transform."""

from __future__ import annotations

import io
import itertools
import json
import random
import struct
import zlib
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.models import ResNet18_Weights, ViT_B_16_Weights
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms._presets import ImageClassification

from hapi_splitter.inputs import image_transform as transforms
from hapi_splitter.inputs.image_decode import SampleError, decode_image
from hapi_splitter.inputs.image_transform import ImageTransform

PRESETS = {
    "resnet18": ResNet18_Weights.IMAGENET1K_V1.transforms(),
    "vit_swag": ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1.transforms(),
    "small": ImageClassification(crop_size=24, resize_size=30),
}


def picture(
    mode: str = "RGB", kind: str = "JPEG", size: tuple[int, int] = (40, 30)
) -> bytes:
    """A file with a smooth image."""
    width, height = size
    ramp = np.linspace(0, 255, width * height * 3).reshape(height, width, 3)
    image = Image.fromarray(ramp.astype(np.uint8)).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def with_floats(transform: ImageTransform) -> ImageTransform:
    return replace(transform, integer_resize=False)


def with_integers(
    transform: ImageTransform, pixels: torch.Tensor
) -> torch.Tensor:
    """Bytes of torch's own resize in the place of the preset's."""
    height, width = pixels.shape[-2:]
    shorter, longer = sorted((height, width))
    sides = [transform.resize_size, transform.resize_size * longer // shorter]
    if height > width:
        sides.reverse()
    if [height, width] != sides:
        pixels = interpolate(
            pixels[None],
            sides,
            mode=transform.interpolation,
            antialias=transform.antialias
            and transform.interpolation in ("bilinear", "bicubic"),
        )[0]
    # What is resized already, the preset only crops and normalises.
    return preset_of(transform)(pixels)


def preset_of(transform: ImageTransform) -> torch.nn.Module:
    """What torchvision does the same with."""
    return ImageClassification(
        crop_size=transform.crop_size,
        resize_size=transform.resize_size,
        mean=transform.mean,
        std=transform.std,
        interpolation=InterpolationMode(transform.interpolation),
        antialias=transform.antialias,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_transform_equals_torchvisions_preset_to_the_bit(name: str) -> None:
    preset = PRESETS[name]
    transform = with_floats(ImageTransform.from_preset(preset))
    image = decode_image(picture(size=(333, 500)))
    assert torch.equal(transform(image), preset(image))
    assert transform(image).shape == transform.output_shape


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize(
    "interpolation", ["nearest", "nearest-exact", "bilinear", "bicubic"]
)
def test_transform_equals_torchvisions_for_any_sizes(
    interpolation: str, antialias: bool, integers: bool
) -> None:
    rng = random.Random(0)
    for sides in (30, 120, 400) * 8:
        resize, crop, height, width = (rng.randint(1, sides) for _ in range(4))
        transform = ImageTransform(
            rng.choice([resize, height]),
            rng.choice([1, crop, crop]),
            interpolation=interpolation,
            antialias=antialias,
            integer_resize=integers,
        )
        # Black and white: bicubic goes beyond both.
        image = 255 * torch.randint(
            2, (3 * height * width,), dtype=torch.uint8
        )
        for pixels in (
            image.view(3, height, width),
            image.view(height, width, 3).permute(2, 0, 1),
        ):
            if integers:
                expected = with_integers(transform, pixels)
            else:
                expected = preset_of(transform)(pixels)
            assert torch.equal(transform(pixels), expected), transform


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torchvision takes floats on other processors",
)
def test_integers_are_those_of_torchvisions_second_version() -> None:
    composed = v2.Compose(
        [
            v2.Resize(72),
            v2.CenterCrop(64),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
        ]
    )
    image = decode_image(picture(size=(333, 500)))
    transform = ImageTransform.from_preset(composed)
    assert transform.integer_resize
    # It multiplies by 1/255 where the preset divides by 255.
    close = partial(torch.allclose, composed(image), rtol=1e-6, atol=1e-6)
    assert close(transform(image))
    assert not close(with_floats(transform)(image))


def test_integers_are_nearer_to_pillow_than_floats() -> None:
    data = picture(size=(500, 375))
    opened = Image.open(io.BytesIO(data)).convert("RGB")
    preset = ImageClassification(crop_size=224, resize_size=256)
    transform = ImageTransform.from_preset(preset)
    pillow = preset(opened)

    def differing(pixels: torch.Tensor) -> float:
        # Steps of a byte.
        steps = (pixels - pillow).abs() * 255 * 0.23
        assert steps.max() < 1.1
        return float((steps > 0.5).float().mean())

    image = decode_image(data)
    integers = differing(transform(image))
    assert integers < 0.01
    assert differing(with_floats(transform)(image)) > 5 * integers


@pytest.mark.parametrize("name", PRESETS)
def test_transform_survives_json(name: str) -> None:
    transform = ImageTransform.from_preset(PRESETS[name])
    for each in (transform, with_floats(transform)):
        document = json.loads(json.dumps(each.to_json()))
        assert ImageTransform.from_json(document) == each


def test_documents_that_do_not_tell_of_integers_mean_floats() -> None:
    document = ImageTransform(30, 24).to_json()
    del document["integer_resize"]
    found = ImageTransform.from_json(document)
    assert found == ImageTransform(30, 24, integer_resize=False)
    assert found.to_json() == document


def test_from_preset_takes_the_weights_function() -> None:
    found = ImageTransform.from_preset(ResNet18_Weights.DEFAULT.transforms)
    assert (found.resize_size, found.crop_size) == (256, 224)


def test_from_preset_refuses_other_transforms() -> None:
    with pytest.raises(TypeError, match="kind Identity cannot be taken"):
        ImageTransform.from_preset(lambda: torch.nn.Identity())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"resize_size": 0}, "resize_size must be 1 to"),
        ({"crop_size": 4097}, "crop_size must be 1 to"),
        ({"crop_size": True}, "crop_size must be 1 to"),
        ({"mean": [0, 0]}, "mean must be three finite numbers"),
        ({"mean": [0, 0, float("nan")]}, "mean must be three finite"),
        ({"mean": "abc"}, "mean must be a list"),
        ({"std": [1, 0, 1]}, "std must not be zero"),
        ({"std": [1, 1, 1e-50]}, "std must not be zero"),
        ({"std": [1, 1, "x"]}, "std must be three finite numbers"),
        ({"interpolation": "lanczos"}, "interpolation must be one of"),
        ({"interpolation": None}, "interpolation must be one of"),
        ({"antialias": 1}, "antialias must be true or false"),
        ({"integer_resize": 0}, "integer_resize must be true or false"),
        ({"code": "import os"}, "a transform has the fields"),
    ],
)
def test_every_wrong_field_is_an_error_naming_it(
    change: dict[str, Any], said: str
) -> None:
    document = ImageTransform(30, 24).to_json() | change
    with pytest.raises(ValueError, match=said):
        ImageTransform.from_json(document)


@pytest.mark.parametrize("document", [None, [], "x", {}])
def test_what_is_not_a_transform_is_an_error(document: object) -> None:
    with pytest.raises(ValueError, match="a transform"):
        ImageTransform.from_json(document)


def test_elongated_image_is_refused_before_it_is_resized() -> None:
    image = torch.zeros(3, 1, 1 << 20, dtype=torch.uint8)
    with pytest.raises(SampleError, match=r"1048576x1 .* would be resized"):
        ImageTransform(256, 224)(image)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("RGB", "JPEG"),
        ("L", "JPEG"),
        ("CMYK", "JPEG"),
        ("RGB", "PNG"),
        ("L", "PNG"),
        ("P", "PNG"),
        ("RGBA", "PNG"),
        ("LA", "PNG"),
        ("1", "PNG"),
        ("I;16", "PNG"),
    ],
)
def test_every_kind_of_pixel_becomes_rgb_bytes(mode: str, kind: str) -> None:
    if mode == "I;16":
        grey = np.arange(40 * 30, dtype=np.uint16).reshape(30, 40) * 50
        buffer = io.BytesIO()
        Image.fromarray(grey).save(buffer, kind)
        data = buffer.getvalue()
        expected = torch.from_numpy((grey >> 8).astype(np.uint8))
        assert torch.equal(decode_image(data)[0], expected)
    else:
        data = picture(mode, kind)
    image = decode_image(data)
    assert (image.dtype, image.shape) == (torch.uint8, (3, 30, 40))
    if mode not in ("CMYK", "I;16", "1", "P"):
        pillow = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        error = image.permute(1, 2, 0).int() - torch.from_numpy(pillow).int()
        assert error.abs().max() <= 2


def test_jpeg_is_decoded_by_torchvision_to_the_bit() -> None:
    data = picture()
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    expected = decode_jpeg(buffer, mode=ImageReadMode.RGB)
    assert torch.equal(decode_image(data), expected)


def test_exif_orientation_is_ignored() -> None:
    image = Image.open(io.BytesIO(picture()))
    exif = image.getexif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    assert decode_image(buffer.getvalue()).shape == (3, 30, 40)


def png_header(width: int, height: int) -> bytes:
    """A PNG that states a size and has hardly any pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + check

    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(100))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    )


@pytest.mark.filterwarnings("error")
def test_huge_image_is_refused_by_its_header() -> None:
    with pytest.raises(SampleError, match=r"50000x50000 .* over the limit"):
        decode_image(png_header(50_000, 50_000))


def test_max_pixels_is_kept() -> None:
    assert decode_image(picture(), max_pixels=1200).shape == (3, 30, 40)
    with pytest.raises(SampleError, match="limit of 1199 pixels"):
        decode_image(picture(), max_pixels=1199)


def test_jpeg_of_endless_scans_is_refused() -> None:
    sink = io.BytesIO()
    Image.new("RGB", (64, 64)).save(sink, "JPEG", progressive=True)
    progressive = sink.getvalue()
    assert decode_image(progressive).shape == (3, 64, 64)
    start = progressive.rindex(b"\xff\xda")
    scan, end = progressive[start:-2], progressive[-2:]
    bomb = progressive[:start] + scan * 200 + end
    with pytest.raises(SampleError, match="more than 100 scans"):
        decode_image(bomb)


@pytest.mark.parametrize("num_scans", [0, 1, 99, 100])
def test_start_of_a_scan_is_found_at_any_place(num_scans: int) -> None:
    marker = b"\xff\xda"
    between = itertools.cycle((b"", b"\xff", b"\xda", b"\xda\xff", b"abc"))
    pieces = [marker + next(between) for _ in range(num_scans)]
    data = b"\xff\xd8\xff" + b"".join(pieces)
    assert transforms._num_scans(data) == data.count(marker) >= num_scans


def test_want_of_memory_is_no_property_of_the_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(data: bytes) -> torch.Tensor:
        return torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr(transforms, "_decode_jpeg", fail)
    with pytest.raises(MemoryError):
        decode_image(picture())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "neither a JPEG nor a PNG"),
        (b"GIF89a" + bytes(100), "neither a JPEG nor a PNG"),
        (b"\xff\xd8\xff", "damaged JPEG"),
        (b"\xff\xd8\xff" + bytes(100), "damaged JPEG"),
        (b"\x89PNG\r\n\x1a\n", "damaged PNG"),
        (picture()[:300], "damaged JPEG"),
        (picture(size=(400, 300))[:2000], "damaged JPEG"),
        (picture(kind="PNG")[:100], "damaged PNG"),
        (png_header(64, 64), "damaged PNG"),
    ],
)
def test_unusable_image_is_the_same_error_each_time(
    data: bytes, said: str
) -> None:
    texts = set()
    for _ in range(3):
        with pytest.raises(SampleError, match=said) as caught:
            decode_image(data)
        texts.add(str(caught.value))
    assert len(texts) == 1
