"""Conversion of torchvision's composed transforms."""

import pytest
import torch
from torch import nn
from torchvision import transforms as v1
from torchvision.transforms import v2

from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_transform import ImageTransform
from photos import jpegs

MEAN, STD = [0.4, 0.5, 0.6], (0.2, 0.25, 0.3)
SHAPES = [v1.Resize(64), v1.CenterCrop(56)]
FLOATS = v2.ToDtype(torch.float32, scale=True)

NATIVE = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
TOLERANCE = 1e-5 if NATIVE else 2.002 / 255 / min(STD)

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
    transform = ImageTransform.from_preset(
        v1.Compose([*SHAPES, v1.ToTensor(), v1.Normalize(MEAN, STD)])
    )
    assert transform == ImageTransform(64, 56, tuple(MEAN), STD)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([v1.Resize((64, 64)), v1.CenterCrop(56), FLOATS], "aspect ratio"),
        ([v1.Resize(64, max_size=80), v1.CenterCrop(5), FLOATS], "max_size"),
        ([v1.Resize(64), v1.CenterCrop((56, 60)), FLOATS], "not square"),
        ([v1.CenterCrop(56), v1.Resize(64), FLOATS], "precedes Resize"),
        ([*SHAPES, v1.Resize(32), FLOATS], "follows CenterCrop"),
        ([v1.Resize(64), v1.Resize(64), FLOATS], "twice"),
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
    resize = v2.Resize(64, v2.InterpolationMode.LANCZOS)
    with pytest.raises(ValueError, match="interpolation must be one of"):
        ImageTransform.from_preset(v2.Compose([resize, SHAPES[1], FLOATS]))
