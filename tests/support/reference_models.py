"""Models for the equivalence tests of the splitter.

Small inputs keep the suite short; every operation still runs. Weights are
random. Running statistics differ from their initial values, which would hide a
missing batch norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torchvision import models


@dataclass(frozen=True)
class ReferenceModel:
    """A model, its freeze point and its input size in tests."""

    constructor: Callable[..., nn.Module]
    freeze: str
    pixels: int
    features: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.constructor(weights=None, **self.options).eval()
        randomise_statistics(model)
        return model

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        return (3, self.pixels, self.pixels)


def small_vit(weights: None) -> nn.Module:
    """Returns a vision transformer of three layers."""
    return models.VisionTransformer(
        image_size=48,
        patch_size=16,
        num_layers=3,
        num_heads=4,
        hidden_dim=96,
        mlp_dim=192,
    )


REFERENCE_MODELS: Mapping[str, ReferenceModel] = MappingProxyType(
    {
        "alexnet": ReferenceModel(models.alexnet, "features", 64, (9216,)),
        "resnet18": ReferenceModel(models.resnet18, "layer4", 64, (512,)),
        "resnet50": ReferenceModel(models.resnet50, "layer4", 64, (2048,)),
        "vgg11": ReferenceModel(models.vgg11, "features", 64, (25088,)),
        "densenet121": ReferenceModel(
            models.densenet121, "features", 64, (1024,)
        ),
        "vit": ReferenceModel(small_vit, "encoder", 48, (96,)),
        "mobilenet_v3_small": ReferenceModel(
            models.mobilenet_v3_small, "features", 64, (576,)
        ),
    }
)


def randomise_statistics(model: nn.Module) -> None:
    """Sets running statistics of batch norms to random values."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.2, 0.2)
            module.running_var.uniform_(0.5, 1.5)


class BranchedNet(nn.Module):
    """A custom model with branches, residuals and a size from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.left = nn.Conv2d(8, 8, 3, padding=1)
        self.right = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        self.mix = nn.Conv2d(16, 12, 3, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(48)
        self.head = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = x.size(0)
        x = torch.relu(self.stem(x))
        x = torch.cat([self.left(x) + x, self.right(x)], dim=1)
        x = self.pool(self.mix(x)).view(batch, -1)
        x = nn.functional.dropout(x, 0.5, training=self.training)
        return self.head(self.drop(self.norm(x)))
