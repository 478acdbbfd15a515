"""Cases of computed, shared and partly trained parameters."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from model_cases.case import IDS, a
from model_cases.nets import WIDTH, Net, Tokens


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight.tanh()


def normed(norm):
    model = Net()
    for name in ("stem", "head"):
        norm(model.get_submodule(name))
    norm(model.body[0])
    norm(model.neck[0])
    return model


def doubled():
    return normed(
        lambda m: parametrize.register_parametrization(m, "weight", Doubled())
    )


def weight_norm():
    return normed(parametrizations.weight_norm)


def old_weight_norm():
    return normed(nn.utils.weight_norm)


def spectral_norm():
    return normed(parametrizations.spectral_norm)


def old_spectral_norm():
    return normed(nn.utils.spectral_norm)


def orthogonal():
    model = Net()
    parametrizations.orthogonal(model.head)
    return model


class Tied(nn.Module):
    """A text model whose head has the embedding's weight."""

    def __init__(self, is_trained=True):
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, 64, bias=False)
        self.out.weight = self.embed.weight
        self.embed.weight.requires_grad_(is_trained)
        self.layers[0].requires_grad_(is_trained)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.out(x)


class TiedTail(Net):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x):
        x = self.features(x).mean((2, 3))
        return self.head(self.second(torch.relu(self.first(x))))


class LoRA(nn.Module):
    def __init__(self, layer, rank=2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


def lora(blocks):
    """Tokens with LoRA in the given blocks, and a trained head."""
    model = Tokens().requires_grad_(False)
    model.head.requires_grad_(True)
    for number in blocks:
        layer = model.blocks[number]
        # Not the layer's own linear: PyTorch's fast path reads its weight.
        model.blocks[number] = nn.Sequential(layer, LoRA(nn.Linear(8, 8)))
    return model


class Prompted(Tokens):
    def __init__(self, depth):
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)
        self.prompt = nn.Parameter(torch.randn(1, 2, WIDTH))
        self.at = depth

    def forward(self, x):
        x = self.embedded(x)
        for number, layer in enumerate(self.blocks):
            if number == self.at:
                prompt = self.prompt.expand(x.shape[0], -1, -1)
                x = torch.cat([prompt, x], 1)
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class FrozenNorms(Net):
    """Keeps its batch norms in eval mode, as fine-tuning scripts do."""

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


class InnerFrozenNorms(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = FrozenNorms()

    def forward(self, x):
        return self.net(x)


def freeze_first(model: nn.Module) -> nn.Module:
    model.stem.requires_grad_(False)
    return model


PARAMETERS = [
    *a("parametrisation", doubled, "stem body neck"),
    *a("weight norm", weight_norm, "stem body"),
    *a("old weight norm", old_weight_norm, "body"),
    *a("spectral norm", spectral_norm, "body"),
    *a("old spectral norm", old_spectral_norm, "body"),
    *a("orthogonal", orthogonal, "body"),
    *a(
        "tied frozen embedding",
        partial(Tied, False),
        "layers.0",
        sample=IDS,
    ),
    *a("tied in the tail", TiedTail, "body"),
    *a("LoRA after", partial(lora, [1, 2]), "auto blocks.0"),
    *a("LoRA everywhere", partial(lora, [0, 1, 2]), "auto"),
    *a("prompts after", partial(Prompted, 2), "auto blocks.1"),
    *a(
        "partly frozen by the user",
        lambda: freeze_first(Net()),
        "auto stem",
    ),
    *a("frozen batch norms", FrozenNorms, "body stem"),
    *a("frozen batch norms inside", InnerFrozenNorms, "net.body"),
]
