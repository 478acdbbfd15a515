"""torchvision's evaluation transform, by functions of its second version.

These resize bytes with integers, on most processors; imports nothing of HAPI.
"""

from __future__ import annotations

import torch
from torchvision.transforms.v2 import functional

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Of the channels of ImageNet, as torchvision's presets have them."""


class Preset:
    """From uint8 ``[3, H, W]`` to float32 ``[3, crop, crop]``.

    Args:
        resize_size: pixels of the shorter side.
        crop_size: pixels of both sides of the middle.
    """

    def __init__(self, resize_size: int = 256, crop_size: int = 224) -> None:
        self._resize_size = [resize_size]
        self._crop_size = [crop_size]

    def pixels(self, image: torch.Tensor) -> torch.Tensor:
        """Before it makes floats: uint8 ``[3, crop, crop]``."""
        resized = functional.resize(image, self._resize_size, antialias=True)
        return functional.center_crop(resized, self._crop_size)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        pixels = self.pixels(image).to(torch.float32).div_(255)
        return functional.normalize(pixels, MEAN, STD, inplace=True)
