"""Small image network with fixed random weights."""

from __future__ import annotations

import torch
from torch import nn

from hapi_splitter.freezing.split_model import SplitModel, split
from hapi_splitter.inputs.image_transform import ImageTransform

SMALL_IMAGE = 64


def small_transform() -> ImageTransform:
    """Returns ImageNet's evaluation transform at 64 pixels."""
    return ImageTransform(resize_size=72, crop_size=SMALL_IMAGE)


def small_network(num_classes: int = 4, seed: int = 0) -> nn.Module:
    """Returns a network of convolutions and a linear ``head``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SmallNetwork(num_classes)


def small_parts(seed: int = 0) -> SplitModel:
    """Returns the network, split behind its ``body``."""
    network = small_network(seed=seed)
    return split(network, "body", transform=small_transform())


class SmallNetwork(nn.Module):
    """A network whose ``body`` is frozen and ``head`` trained by tests."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            _Residual(8),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(inplace=True),
        )
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(self.pool(self.body(images)), 1))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(images + self.conv(images))
