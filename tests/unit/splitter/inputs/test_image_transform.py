"""The input transform of images, and conversions from torchvision."""

import hashlib
import io
import json
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import interpolate
from torchvision import transforms as v1
from torchvision.models import ResNet18_Weights, ViT_B_16_Weights
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms._presets import ImageClassification

from augmented_pixels import noise
from hapi_protocol.samples import SampleError
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_transform import ImageTransform
from photos import jpegs

PRESETS = {
    "resnet18": ResNet18_Weights.IMAGENET1K_V1.transforms(),
    "vit_swag": ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1.transforms(),
    "small": ImageClassification(crop_size=24, resize_size=30),
}


def with_floats(transform):
    return replace(transform, integer_resize=False)


def sides(size):
    return [*size] if isinstance(size, tuple) else [size]


def float_reference(transform, pixels):
    """Applies torchvision's equivalent of the transform."""
    preset = ImageClassification(
        crop_size=0,
        mean=transform.mean,
        std=transform.std,
        interpolation=InterpolationMode(transform.interpolation),
        antialias=transform.antialias,
    )
    preset.crop_size = sides(transform.crop_size)
    preset.resize_size = sides(transform.resize_size)
    return preset(pixels)


def integer_reference(transform, pixels):
    """Applies torchvision's preset to bytes that torch has resized."""
    height, width = pixels.shape[-2:]
    shorter, longer = sorted((height, width))
    resized = sides(transform.resize_size)
    if len(resized) == 1:
        resized.append(resized[0] * longer // shorter)
        if height > width:
            resized.reverse()
    if [height, width] != resized:
        pixels = interpolate(
            pixels[None],
            resized,
            mode=transform.interpolation,
            antialias=transform.antialias
            and transform.interpolation in ("bilinear", "bicubic"),
        )[0]
    return float_reference(transform, pixels)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_matched_bit_for_bit_and_survives_json(name):
    preset = PRESETS[name]
    transform = ImageTransform.from_preset(preset)
    image = noise(500, 333)
    sample = with_floats(transform)(image)
    assert torch.equal(sample, preset(image))
    assert sample.shape == transform.output_shape
    for each in (transform, with_floats(transform)):
        document = json.loads(json.dumps(each.to_json()))
        assert ImageTransform.from_json(document) == each


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize(
    "interpolation", ["nearest", "nearest-exact", "bilinear", "bicubic"]
)
def test_transform_equals_torchvision_for_any_size(
    interpolation, antialias, integers
):
    rng = random.Random(0)
    for limit in (30, 120, 400) * 8:
        resize, crop, height, width = (rng.randint(1, limit) for _ in range(4))
        transform = ImageTransform(
            rng.choice([resize, height, (resize, crop)]),
            rng.choice([1, crop, crop, (resize, crop)]),
            interpolation=interpolation,
            antialias=antialias,
            integer_resize=integers,
        )
        # Bicubic interpolation overshoots between black and white.
        image = 255 * torch.randint(
            2, (3 * height * width,), dtype=torch.uint8
        )
        reference = integer_reference if integers else float_reference
        for pixels in (
            image.view(3, height, width),
            image.view(height, width, 3).permute(2, 0, 1),
        ):
            expected = reference(transform, pixels)
            assert torch.equal(transform(pixels), expected), transform


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torchvision takes floats on other processors",
)
def test_integer_resize_equals_torchvision_v2():
    shape = [v2.Resize(72), v2.CenterCrop(64)]
    scale = v2.ToDtype(torch.float32, scale=True)
    normalize = v2.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    composed = v2.Compose([*shape, scale, normalize])
    image = noise(500, 333)
    transform = ImageTransform.from_preset(composed)
    assert transform.integer_resize
    # v2 multiplies by 1/255; the preset divides by 255.
    is_close = partial(torch.allclose, composed(image), rtol=1e-6, atol=1e-6)
    assert is_close(transform(image))
    assert not is_close(with_floats(transform)(image))


def test_integer_resize_is_closer_to_pillow_than_floats():
    data, _ = next(jpegs(1, size=375))
    preset = ImageClassification(crop_size=224, resize_size=256)
    transform = ImageTransform.from_preset(preset)
    expected = preset(Image.open(io.BytesIO(data)).convert("RGB"))
    image = decode_image(data)

    def fraction_different(sample):
        levels = (sample - expected).abs() * 255 * 0.23
        assert levels.max() < 1.1
        return float((levels > 0.5).float().mean())

    of_integers = fraction_different(transform(image))
    assert of_integers < 0.01
    assert fraction_different(with_floats(transform)(image)) > 5 * of_integers


def test_missing_integer_resize_in_json_means_floats():
    document = ImageTransform(30, 24).to_json()
    del document["integer_resize"]
    transform = ImageTransform.from_json(document)
    assert transform == ImageTransform(30, 24, integer_resize=False)
    assert transform.to_json() == document
    fields = "resize_size crop_size mean std interpolation antialias"
    assert set(document) == set(fields.split())


def test_from_preset_takes_the_weights_function_and_no_other():
    transform = ImageTransform.from_preset(ResNet18_Weights.DEFAULT.transforms)
    assert (transform.resize_size, transform.crop_size) == (256, 224)


def test_from_preset_calls_no_other_function():
    called = []

    def function(*images):
        called.append(images)
        return ResNet18_Weights.DEFAULT.transforms()

    for transform in (function, partial(function)):
        with pytest.raises(TypeError, match=r"function.*; give a .* Compose"):
            ImageTransform.from_preset(transform)
    assert not called


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resize_size": 0}, "resize_size must be 1 to"),
        ({"crop_size": 4097}, "crop_size must be 1 to"),
        ({"crop_size": True}, "crop_size must be 1 to"),
        ({"mean": [0, 0]}, "mean must be three finite numbers"),
        ({"mean": [0, 0, float("nan")]}, "mean must be three finite"),
        ({"mean": "abc"}, "mean must be three"),
        ({"std": [1, 0, 1]}, "std must not be zero"),
        ({"std": [1, 1, 1e-50]}, "std must not be zero"),
        ({"std": [1, 1, "x"]}, "std must be three finite numbers"),
        ({"resize_size": [24]}, "resize_size must be 1 to"),
        ({"resize_size": [24, 4097]}, "resize_size must be 1 to"),
        ({"crop_size": [24, 0]}, "crop_size must be 1 to"),
        ({"crop_size": [24, [24]]}, "crop_size must be 1 to"),
        ({"interpolation": "hamming"}, "interpolation must be one of"),
        ({"interpolation": None}, "interpolation must be one of"),
        ({"antialias": 1}, "antialias must be true or false"),
        ({"integer_resize": 0}, "integer_resize must be true or false"),
        ({"fit": "fill"}, "fit must be null, 'cover' or 'contain'"),
        ({"fit": ["cover"]}, "fit must be null, 'cover' or 'contain'"),
        ({"fill": [0, 0, 256]}, "fill must be three bytes"),
        ({"fill": 0}, "fill must be three bytes"),
        ({"floor_crop": 0}, "floor_crop must be true or false"),
        ({"code": "import os"}, "ImageTransform is an object with the fields"),
    ],
)
def test_invalid_field_is_named(change, message):
    document = ImageTransform(30, 24).to_json() | change
    with pytest.raises(ValueError, match=message):
        ImageTransform.from_json(document)


@pytest.mark.parametrize("document", [None, [], "x", {}])
def test_other_json_is_refused(document):
    with pytest.raises(ValueError, match="ImageTransform is an object"):
        ImageTransform.from_json(document)
    augmented = ImageTransform(30, 24).to_json() | {"augmentation": document}
    with pytest.raises(ValueError, match="Augmentation is an object"):
        ImageTransform.from_json(augmented)


def test_elongated_image_is_refused_before_the_resize():
    image = torch.zeros(3, 1, 1 << 20, dtype=torch.uint8)
    with pytest.raises(SampleError, match=r"1048576x1 .* would be resized"):
        ImageTransform(256, 224)(image)
    # Stretched, it is small in the end, but not after its width is resized.
    with pytest.raises(SampleError, match=r"1x1048576 .* would be resized"):
        ImageTransform((224, 224), 224)(image.mT)
    assert (
        ImageTransform(224, 224, fit="contain")(image).shape[1:] == (224,) * 2
    )


MEAN, STD = [0.4, 0.5, 0.6], (0.2, 0.25, 0.3)
SHAPES = [v1.Resize(64), v1.CenterCrop(56)]
FLOATS = v2.ToDtype(torch.float32, scale=True)

NATIVE = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
TOLERANCE = 1e-5 if NATIVE else 2.002 / 255 / min(STD)

NEAREST = v1.Resize(64, InterpolationMode.NEAREST)
BICUBIC = v2.Resize([64], interpolation=v2.InterpolationMode.BICUBIC)
NORMALIZED = [FLOATS, v2.Normalize(MEAN, STD)]
SUPPORTED = [
    v1.Compose([*SHAPES, v1.ConvertImageDtype(torch.float32)]),
    v1.Compose(
        [*SHAPES, v1.ConvertImageDtype(torch.float32), v1.Normalize(MEAN, STD)]
    ),
    v2.Compose([v2.ToImage(), BICUBIC, v2.CenterCrop((56, 56)), *NORMALIZED]),
    nn.Sequential(
        nn.Identity(), v2.Resize(64), v2.CenterCrop(56), v2.Compose([FLOATS])
    ),
    v2.Compose([v2.Resize(64, antialias=False), v2.CenterCrop(60), FLOATS]),
    v1.Compose([v1.Resize((56, 64)), v1.ConvertImageDtype(torch.float32)]),
    v2.Compose([v2.ToImage(), v2.Resize((64, 80)), SHAPES[1], *NORMALIZED]),
]


@pytest.mark.parametrize("composition", SUPPORTED, ids=range(len(SUPPORTED)))
def test_converted_transform_gives_the_same_pixels(composition):
    transform = ImageTransform.from_preset(composition)
    image = decode_image(next(jpegs(1, size=133))[0])
    actual, expected = transform(image), composition(image)
    if isinstance(composition, v1.Compose):
        assert torch.equal(actual, expected)
    else:
        # v2 multiplies by 1/255 instead of dividing, and resizes with floats
        # on some processors.
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=TOLERANCE)


def test_to_tensor_is_supported():
    # Pillow's images are always antialiased.
    resize = v1.Resize(64, antialias=False)
    transform = ImageTransform.from_preset(
        v1.Compose([resize, SHAPES[1], v1.ToTensor(), NORMALIZED[1]])
    )
    assert transform == ImageTransform(64, 56, tuple(MEAN), STD)


def test_transform_of_the_shorter_side_keeps_its_json():
    digest = hashlib.sha256(
        json.dumps(ImageTransform(256, 224).to_json()).encode()
    ).hexdigest()
    assert (
        digest
        == "a44d9a1e33715c5c818293e6eac1952dddb7d9e5168d9df0d887331699d8ef06"
    )


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([v1.Resize(64, max_size=80), v1.CenterCrop(5), FLOATS], "max_size"),
        ([v1.CenterCrop(56), v1.Resize(64), FLOATS], "precedes Resize"),
        ([*SHAPES, v1.Resize(32), FLOATS], "follows CenterCrop"),
        ([v1.Resize(64), v1.Resize(64), FLOATS], "twice"),
        ([NEAREST, v1.CenterCrop(64), v1.ToTensor()], "nearest pixels of Pil"),
        ([v1.ToTensor(), *SHAPES], "follows the conversion to floats"),
        ([*SHAPES, v1.Normalize(MEAN, STD)], "precedes the conversion"),
        ([*SHAPES, FLOATS, v1.Normalize(MEAN, STD), FLOATS], "follows Norm"),
        ([*SHAPES], "no conversion to floats"),
        ([v1.Resize(64), FLOATS], "no CenterCrop"),
        ([FLOATS], "no Resize"),
        ([*SHAPES, v2.ToDtype(torch.float16, scale=True)], "float16"),
        ([*SHAPES, v2.ToDtype(torch.float32)], "does not scale"),
        ([v1.RandomResizedCrop(56), FLOATS], "augment=Augmentation"),
        ([*SHAPES, v2.RandomHorizontalFlip(), FLOATS], "it is random"),
        ([*SHAPES, v1.ColorJitter(), FLOATS], "it is random"),
        ([*SHAPES, v1.Grayscale(), FLOATS], "Grayscale.* no such step"),
        ([*SHAPES, v1.Lambda(lambda x: x), FLOATS], "Lambda.* no such step"),
    ],
)
@pytest.mark.parametrize("compose", [v1.Compose, v2.Compose])
def test_unsupported_composition_is_refused_with_a_remedy(
    compose, steps, reason
):
    with pytest.raises(TypeError, match=reason) as caught:
        ImageTransform.from_preset(compose(steps))
    assert "ImageTransform" in str(caught.value)


def test_unsupported_interpolation_is_named():
    resize = v2.Resize(64, v2.InterpolationMode.HAMMING)
    with pytest.raises(ValueError, match="interpolation must be one of"):
        ImageTransform.from_preset(v2.Compose([resize, SHAPES[1], FLOATS]))
