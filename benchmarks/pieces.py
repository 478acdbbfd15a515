"""torchvision networks as the modules they call, one after the other.

The names are those of torchvision.  What has no parameters goes with the
module before it, as a freeze point moves over it.  Imports nothing of HAPI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
from benchmarks.workloads import BACKBONE, NETWORKS
from torch import nn

SEED = 0


@dataclass(frozen=True)
class SpanSlice:
    """One of the modules.

    Attributes:
        name: of the boundary behind it.
        module: takes what the one before it gives.
    """

    name: str
    module: nn.Module


class Embedding(nn.Module):
    """Images to tokens: all that ViT does before its first layer."""

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.vit._process_input(images)
        first = self.vit.class_token.expand(len(tokens), -1, -1)
        whole = torch.cat([first, tokens], dim=1)
        return self.vit.encoder.dropout(whole + self.vit.encoder.pos_embedding)


class ClassToken(nn.Module):
    """The last normalisation, and the token that the head looks at."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(tokens)
        return normed[:, 0]


def _resnet(model: Any) -> list[SpanSlice]:
    first = nn.Sequential(model.conv1, model.bn1, model.relu)
    names = ("maxpool", "layer1", "layer2", "layer3", "layer4")
    return [
        SpanSlice("conv1", first),
        *(SpanSlice(name, getattr(model, name)) for name in names),
        SpanSlice("avgpool", nn.Sequential(model.avgpool, nn.Flatten())),
        SpanSlice("fc", model.fc),
    ]


def _mobilenet(model: Any) -> list[SpanSlice]:
    return [
        *(SpanSlice(f"features.{n}", m) for n, m in enumerate(model.features)),
        SpanSlice("avgpool", nn.Sequential(model.avgpool, nn.Flatten())),
        SpanSlice("classifier", model.classifier),
    ]


def _vit(model: Any) -> list[SpanSlice]:
    layers = model.encoder.layers.named_children()
    return [
        SpanSlice("conv_proj", Embedding(model)),
        *(
            SpanSlice(f"encoder.layers.{name}", layer)
            for name, layer in layers
        ),
        SpanSlice("encoder.ln", ClassToken(model.encoder.ln)),
        SpanSlice("heads", model.heads),
    ]


_FAMILIES: Mapping[str, Callable[[Any], list[SpanSlice]]] = {
    "resnet18": _resnet,
    "mobilenet_v3_small": _mobilenet,
    "vit_b_16": _vit,
}


def built(name: str) -> nn.Module:
    """A network of :data:`NETWORKS` with random weights, always the same."""
    torch.manual_seed(SEED)
    sized = {"image_size": NETWORKS[name].crop_size} if "vit" in name else {}
    model: nn.Module = torchvision.models.get_model(
        name, weights=None, **sized
    )
    return model


def pieces_of(name: str, model: nn.Module) -> list[SpanSlice]:
    """All pieces, the head last; run in order they are the model."""
    return _FAMILIES[name](model)


def num_frozen(name: str, kind: str, pieces: Sequence[SpanSlice]) -> int:
    """How many pieces a freeze of this kind has.

    Args:
        name: of the network.
        kind: ``backbone``, which is all but the head, or ``inner``.
        pieces: of the network.
    """
    if kind == BACKBONE:
        return len(pieces) - 1
    names = [piece.name for piece in pieces]
    return names.index(NETWORKS[name].freeze[kind]) + 1
