"""torchvision's evaluation transform, with functions of its second version.

These resize bytes with integer arithmetic on most processors.
"""

from __future__ import annotations

import torch
from torchvision.transforms.v2 import functional

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Statistics of ImageNet's channels in torchvision's presets."""


class Preset:
    """Converts uint8 ``[3, H, W]`` to float32 ``[3, crop, crop]``.

    Args:
        resize_size: pixels of the shorter side.
        crop_size: pixels of both sides of the centre crop.
    """

    def __init__(self, resize_size: int = 256, crop_size: int = 224) -> None:
        self._resize_size = [resize_size]
        self._crop_size = [crop_size]

    def pixels(self, image: torch.Tensor) -> torch.Tensor:
        """Resizes and crops to uint8 ``[3, crop, crop]``."""
        resized = functional.resize(image, self._resize_size, antialias=True)
        cropped: torch.Tensor = functional.center_crop(
            resized, self._crop_size
        )
        return cropped

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        pixels = self.pixels(image).to(torch.float32).div_(255)
        return functional.normalize(pixels, MEAN, STD, inplace=True)
