"""Transforms of timm, open_clip and Hugging Face transformers.

Pixels are compared with the library's own.
"""

import importlib
import io
import json
import os
import tarfile
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision import transforms as v1

from augmented_pixels import LANCZOS
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_transform import ImageTransform
from photos import PHOTOS, photo

pytest.importorskip("open_clip")
pytest.importorskip("timm")
pytest.importorskip("transformers")

from open_clip import image_transform
from timm.data import create_transform

NUM_STORED = 8
"""Photographs of ImageNet, if there are any."""


def processor(name, **options):
    """Makes an image processor; names with Pil are those for Pillow."""
    model = {"DINOv3ViT": "dinov3_vit", "MobileNetV2": "mobilenet_v2"}.get(
        name.removesuffix("Pil"), name.removesuffix("Pil").lower()
    )
    kind = (
        "image_processing_pil" if name.endswith("Pil") else "image_processing"
    )
    module = importlib.import_module(
        f"transformers.models.{model}.{kind}_{model}"
    )
    suffix = "Pil" if name.endswith("Pil") else ""
    name = name.removesuffix("Pil")
    return getattr(module, f"{name}ImageProcessor{suffix}")(**options)


timm = partial(create_transform, is_training=False)
open_clip = partial(image_transform, is_train=False)

CROPPED = {
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 160},
}
PROCESSORS = [
    ("ViT", {}),
    ("ViT", {"resample": 3, "size": {"height": 90, "width": 150}}),
    ("ViT", {"size": {"height": 256, "width": 240}, **CROPPED}),
    ("Siglip", {"do_normalize": False}),
    ("CLIP", {}),
    ("CLIP", {"do_rescale": False}),
    ("CLIP", {"rescale_factor": 1 / 127.5, "size": {"shortest_edge": 233}}),
    ("Bit", {"size": {"shortest_edge": 256}}),
    ("ConvNext", {}),
    ("ConvNext", {"size": {"shortest_edge": 223}}),
    ("Beit", {}),
    ("Levit", {}),
    ("MobileNetV2", {}),
    ("PoolFormer", {}),
    ("Segformer", {}),
]
TRANSFORMS = {
    **{
        f"{name}{kind}-{number}": partial(processor, name + kind, **options)
        for number, (name, options) in enumerate(PROCESSORS)
        for kind in ("", "Pil")
    },
    "ViT-nearest": partial(processor, "ViT", resample=0),
    "DINOv3": partial(processor, "DINOv3ViT"),
    "DINOv3-crop": partial(
        processor, "DINOv3ViT", size={"shortest_edge": 232}, **CROPPED
    ),
    "timm": partial(timm, (3, 224, 224), interpolation="bicubic"),
    "timm-squash": partial(timm, 224, crop_mode="squash", crop_pct=0.9),
    "timm-border": partial(timm, 224, crop_mode="border", crop_pct=1.0),
    "timm-border-crop": partial(timm, 224, crop_mode="border", crop_pct=0.9),
    "timm-wide": partial(timm, (3, 160, 224), crop_pct=0.9),
    "timm-wide-squash": partial(timm, (3, 160, 224), crop_mode="squash"),
    "open_clip": partial(open_clip, 224),
    "open_clip-squash": partial(open_clip, 224, resize_mode="squash"),
    "open_clip-longest": partial(
        open_clip, 224, resize_mode="longest", fill_color=9
    ),
    "open_clip-wide": partial(open_clip, (160, 224)),
    "torchvision": lambda: v1.Compose([v1.Resize((224, 99)), v1.ToTensor()]),
}
if LANCZOS:
    TRANSFORMS["ViT-lanczos"] = partial(processor, "ViTPil", resample=1)


@pytest.fixture(scope="module")
def photographs():
    """Encoded photographs, wide and tall, large and small."""
    images = [photo(name) for name in PHOTOS]
    images.append(images[1].transpose(Image.Transpose.ROTATE_90))
    images.append(images[1].resize((77, 51)))
    found = []
    for image in images:
        sink = io.BytesIO()
        image.save(sink, "JPEG", quality=90)
        found.append(sink.getvalue())
    if folder := os.environ.get("HAPI_TEST_DATA"):
        with tarfile.open(min(Path(folder).glob("imagenet-*.tar"))) as tar:
            names = [n for n in tar.getnames() if n.endswith(".jpg")]
            for name in names[:NUM_STORED]:
                found.append(tar.extractfile(name).read())
    return found


def resize_width_first(resize):
    """Pillow 13 begins with the height where that is faster, which changes
    stretched images.  Earlier releases and torch begin with the width."""

    def resized(image, size, resample=None, **options):
        narrow = resize(image, (size[0], image.height), resample, **options)
        return resize(narrow, size, resample, **options)

    return resized


@pytest.mark.parametrize("name", TRANSFORMS)
def test_pixels_equal_those_of_the_library(name, photographs, monkeypatch):
    resize = resize_width_first(Image.Image.resize)
    monkeypatch.setattr(Image.Image, "resize", resize)
    original = TRANSFORMS[name]()
    transform = ImageTransform.from_preset(original)
    document = json.loads(json.dumps(transform.to_json()))
    assert ImageTransform.from_json(document) == transform
    to_levels = 255 * torch.tensor(transform.std).view(3, 1, 1)
    # Two passes of torch and Pillow may each round differently, and bicubic
    # filters amplify that.
    limit = 1 if transform.interpolation == "bilinear" else 2
    for data in photographs:
        image = Image.open(io.BytesIO(data)).convert("RGB")
        if hasattr(original, "image_mean"):
            batch = original(images=image, return_tensors="pt")
            expected = batch["pixel_values"][0]
        else:
            expected = original(image)
        found = transform(decode_image(data))
        assert found.shape == expected.shape == transform.output_shape
        levels = ((found - expected) * to_levels).abs()
        assert levels.max() < limit + 0.01
        assert (levels > 1.01).float().mean() < 1e-4
        assert (levels > 0.51).float().mean() < 0.05


def test_usual_rescale_factor_changes_neither_mean_nor_std():
    clip = processor("CLIP")
    transform = ImageTransform.from_preset(clip)
    assert transform.mean == tuple(clip.image_mean)
    assert transform.std == tuple(clip.image_std)


def test_conversion_to_rgb_is_detected_by_its_library():
    def _convert_image_to_rgb(image):
        return image.convert("RGB")

    steps = [v1.Resize(64), v1.CenterCrop(56), _convert_image_to_rgb]
    composed = v1.Compose([*steps, v1.ToTensor()])
    with pytest.raises(TypeError, match=r"_convert_image_to_rgb.* no such st"):
        ImageTransform.from_preset(composed)
    _convert_image_to_rgb.__module__ = "clip.clip"
    assert ImageTransform.from_preset(composed).crop_size == 56


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("ViT", {"do_pad": True}, "do_pad is on"),
        (
            "ViT",
            {"do_flip_channel_order": True},
            "do_flip_channel_order is on",
        ),
        ("ViT", {"do_resize": False}, "do_resize is off"),
        ("ViT", {"rescale_factor": -1.0}, "rescale_factor is -1"),
        ("ViT", {"resample": 5}, "interpolation .*, not 'hamming'"),
        ("ViTPil", {"resample": 0}, "nearest pixels of Pillow"),
        ("ViT", {"size": {"max_height": 9, "max_width": 9}}, "max_height"),
        ("CLIP", {"do_center_crop": False}, "without do_center_crop"),
        ("CLIP", {"size": {"shortest_edge": 200}}, "crop_size .* is larger"),
        ("ConvNext", {**CROPPED}, "do_center_crop is on"),
        ("DINOv3ViT", {"resample": 3}, "its resample is"),
        ("EfficientNet", {}, "include_top is on"),
        ("EfficientNet", {"include_top": False}, "replaces rescale"),
        ("MobileViT", {}, "do_flip_channel_order is on"),
        ("Siglip2", {}, "Siglip2ImageProcessor replaces"),
    ],
)
def test_unsupported_processor_is_refused(name, options, reason):
    with pytest.raises((TypeError, ValueError), match=reason):
        ImageTransform.from_preset(processor(name, **options))


def test_processor_whose_class_replaces_a_step_is_refused():
    class Own(type(processor("ViT"))):
        def resize(self, image, size, **options):
            return image

    with pytest.raises(TypeError, match="Own replaces resize"):
        ImageTransform.from_preset(Own())


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (create_transform(224, is_training=True), "Random.*it is random"),
        (timm(224, normalize=False), "MaybePILToTensor.* no such step"),
        (timm(224, crop_border_pixels=4), "TrimBorder.* no such step"),
        (timm(224, naflex=True), "ResizeToSequence.* no such step"),
        (timm(224, interpolation="nearest"), "nearest pixels of Pillow"),
        (image_transform(224, is_train=True), "Random.*it is random"),
    ],
)
def test_unsupported_step_is_named(transform, reason):
    with pytest.raises(TypeError, match=reason):
        ImageTransform.from_preset(transform)
