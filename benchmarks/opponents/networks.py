"""torchvision networks cut by hand, block by block.

A user who freezes layers by hand writes this for the one network at hand;
here it is written for three.  Random weights, from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

import torch
import torchvision
from torch import nn

SEED = 0

Blocks = Sequence[tuple[str, nn.Module]]


class VitTokens(nn.Module):
    """Images to tokens: patches, class token and positions."""

    def __init__(self, vit: torchvision.models.VisionTransformer) -> None:
        super().__init__()
        self.patches = vit.conv_proj
        self.class_token = vit.class_token
        self.positions = vit.encoder.pos_embedding

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        first = self.class_token.expand(len(images), -1, -1)
        return torch.cat([first, tokens], 1) + self.positions


class ClassToken(nn.Module):
    """The first of all tokens."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, 0]


def _resnet(model: nn.Module) -> Blocks:
    names = ["maxpool", "layer1", "layer2", "layer3", "layer4"]
    stem = nn.Sequential(model.conv1, model.bn1, model.relu)
    return [
        ("stem", stem),
        *((name, getattr(model, name)) for name in names),
        ("pool", nn.Sequential(model.avgpool, nn.Flatten())),
        ("head", model.fc),
    ]


def _mobilenet(model: nn.Module) -> Blocks:
    return [
        *((f"features.{n}", each) for n, each in enumerate(model.features)),
        ("pool", nn.Sequential(model.avgpool, nn.Flatten())),
        ("head", model.classifier),
    ]


def _vit(model: nn.Module) -> Blocks:
    layers = model.encoder.layers
    return [
        ("tokens", VitTokens(model)),
        *((f"layer_{n}", each) for n, each in enumerate(layers)),
        ("pool", nn.Sequential(model.encoder.ln, ClassToken())),
        ("head", model.heads),
    ]


_BLOCKS: Mapping[str, Callable[[nn.Module], Blocks]] = {
    "resnet18": _resnet,
    "mobilenet_v3_small": _mobilenet,
    "vit_b_16": _vit,
}
_LAST_FROZEN = {
    ("resnet18", "inner"): "layer2",
    ("mobilenet_v3_small", "inner"): "features.6",
    ("vit_b_16", "inner"): "layer_5",
}


def build(model: str, crop_size: int) -> nn.Module:
    """A network of torchvision, random weights, in eval mode."""
    sized = {"image_size": crop_size} if "vit" in model else {}
    torch.manual_seed(SEED)
    built: nn.Module = torchvision.models.get_model(
        model, weights=None, **sized
    )
    return built.eval()


def blocks(model: str, crop_size: int) -> Blocks:
    """The network's blocks, by name, each a function of the one before.

    The last, ``head``, is never frozen.
    """
    return _BLOCKS[model](build(model, crop_size))


def split(
    model: str, freeze: str, crop_size: int
) -> tuple[nn.Sequential, nn.Sequential]:
    """The frozen part and the tail that is trained.

    Args:
        model: one of the three.
        freeze: ``backbone``, all but the head, or ``inner``, about half.
        crop_size: pixels of both sides of an image.
    """
    found = blocks(model, crop_size)
    last = _LAST_FROZEN.get((model, freeze), "pool")
    count = len(list(takewhile(lambda each: each[0] != last, found))) + 1
    modules = [module for _, module in found]
    frozen = nn.Sequential(*modules[:count]).requires_grad_(False)
    return frozen, nn.Sequential(*modules[count:])
