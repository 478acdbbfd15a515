"""A digest of augmented images, to compare processes and machines."""

from __future__ import annotations

import hashlib

import torch

from hapi_protocol.transforms import Training
from hapi_splitter.inputs.augmentation import Augmentation
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.inputs.reference_image import reference_image

EVERYTHING = Augmentation(
    vertical_flip=0.5,
    brightness=(0.6, 1.4),
    contrast=(0.5, 1.5),
    saturation=(0.0, 2.0),
    hue=(-0.3, 0.3),
)
LANCZOS = hasattr(torch.ops.aten, "_upsample_lanczos2d_aa")
"""True if this release of torch has this interpolation."""
FIRST = Training(seed=7, epoch=0)


def photo() -> torch.Tensor:
    return decode_image(reference_image())


def noise(height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    size = (3, height, width)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


def pixels_digest() -> str:
    """Returns the SHA-256 of augmented pixels for all interpolations."""
    digest = hashlib.sha256()
    images = [photo(), noise(611, 340), noise(1, 977), noise(40, 31)]
    images.append(noise(300, 300)[:1].expand(3, -1, -1))
    modes = ["nearest", "nearest-exact", "bilinear", "bicubic"]
    if LANCZOS:
        modes.append("lanczos")
    for interpolation in modes:
        for antialias in (True, interpolation == "lanczos"):
            transform = ImageTransform(
                256,
                288,
                interpolation=interpolation,
                antialias=antialias,
                augmentation=EVERYTHING,
            )
            for number, image in enumerate(images):
                pixels = transform.training_pixels(image, str(number), FIRST)
                digest.update(pixels.numpy().tobytes())
    return digest.hexdigest()
