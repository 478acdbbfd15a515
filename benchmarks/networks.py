"""Networks and freeze points of the benchmarks; imports nothing of HAPI.

Each network is also written as a list of blocks, as a user who freezes layers
by hand would write it.  Parameter-free layers belong to the block before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torchvision
from torch import nn

BACKBONE = "backbone"
INNER = "inner"
FREEZES = (BACKBONE, INNER)
SEED = 0


@dataclass(frozen=True)
class Network:
    """A torchvision network with random weights.

    ``freeze`` has the last frozen module of ``backbone`` (all but the head)
    and of ``inner`` (about half of the network).
    """

    resize_size: int
    crop_size: int
    freeze: Mapping[str, str]
    batch_size: int


NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        "resnet18": Network(
            256, 224, {BACKBONE: "layer4", INNER: "layer2"}, 8
        ),
        "mobilenet_v3_small": Network(
            256, 224, {BACKBONE: "features", INNER: "features.6"}, 16
        ),
        "vit_b_16": Network(
            128,
            112,
            {
                BACKBONE: "encoder",
                INNER: "encoder.layers.encoder_layer_5",
            },
            8,
        ),
    }
)


@dataclass(frozen=True)
class Block:
    """A part of a network.

    ``name`` is that of the boundary after it, by torchvision.
    """

    name: str
    module: nn.Module


class VitTokens(nn.Module):
    """Images to tokens: patches, class token and positions."""

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.patches = vit.conv_proj
        self.class_token = vit.class_token
        self.positions = vit.encoder.pos_embedding

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        first = self.class_token.expand(len(images), -1, -1)
        whole: torch.Tensor = torch.cat([first, tokens], 1) + self.positions
        return whole


class ClassToken(nn.Module):
    """Selects the first token."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, 0]


def _resnet(model: Any) -> list[Block]:
    first = nn.Sequential(model.conv1, model.bn1, model.relu)
    names = ("maxpool", "layer1", "layer2", "layer3", "layer4")
    return [
        Block("conv1", first),
        *(Block(name, getattr(model, name)) for name in names),
        Block("avgpool", nn.Sequential(model.avgpool, nn.Flatten())),
        Block("fc", model.fc),
    ]


def _mobilenet(model: Any) -> list[Block]:
    return [
        *(Block(f"features.{n}", m) for n, m in enumerate(model.features)),
        Block("avgpool", nn.Sequential(model.avgpool, nn.Flatten())),
        Block("classifier", model.classifier),
    ]


def _vit(model: Any) -> list[Block]:
    layers = model.encoder.layers.named_children()
    return [
        Block("conv_proj", VitTokens(model)),
        *(Block(f"encoder.layers.{name}", layer) for name, layer in layers),
        Block("encoder.ln", nn.Sequential(model.encoder.ln, ClassToken())),
        Block("heads", model.heads),
    ]


_FAMILIES: Mapping[str, Callable[[Any], list[Block]]] = MappingProxyType(
    {
        "resnet18": _resnet,
        "mobilenet_v3_small": _mobilenet,
        "vit_b_16": _vit,
    }
)


def build(name: str, seed: int = SEED) -> nn.Module:
    """A network of :data:`NETWORKS`, random weights, in eval mode."""
    torch.manual_seed(seed)
    sized = {"image_size": NETWORKS[name].crop_size} if "vit" in name else {}
    model: nn.Module = torchvision.models.get_model(
        name, weights=None, **sized
    )
    return model.eval()


def blocks_of(name: str, model: nn.Module) -> list[Block]:
    """All blocks of a network, the head last."""
    return _FAMILIES[name](model)


def num_frozen(name: str, kind: str, blocks: Sequence[Block]) -> int:
    """Number of blocks that a freeze of this kind has."""
    if kind == BACKBONE:
        return len(blocks) - 1
    names = [block.name for block in blocks]
    return names.index(NETWORKS[name].freeze[kind]) + 1


def split(
    name: str, kind: str, model: nn.Module
) -> tuple[nn.Sequential, nn.Sequential]:
    """The frozen part of a network, and the tail that is trained."""
    blocks = blocks_of(name, model)
    count = num_frozen(name, kind, blocks)
    modules = [block.module for block in blocks]
    frozen = nn.Sequential(*modules[:count]).eval().requires_grad_(False)
    return frozen, nn.Sequential(*modules[count:])
