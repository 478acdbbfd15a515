"""Cases of single layers and functions in the frozen part."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from model_cases.case import a, unheld
from model_cases.nets import WIDTH, Net


class GeM(nn.Module):
    def __init__(self):
        super().__init__()
        self.power = nn.Parameter(torch.tensor([3.0]))

    def forward(self, x):
        x = x.clamp(min=1e-3).pow(self.power)
        return x.mean((2, 3)).pow(1.0 / self.power)


class GeMNet(Net):
    def __init__(self):
        super().__init__()
        self.pool = GeM()

    def forward(self, x):
        return self.head(self.pool(self.neck(self.features(x))))


class QueryPool(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 2, width))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        query = self.query.expand(x.shape[0], -1, -1)
        return self.attention(query, x, x, need_weights=False)[0].flatten(1)


class QueryNet(Net):
    def __init__(self):
        super().__init__()
        self.pool = QueryPool()
        self.head = nn.Linear(2 * WIDTH, 5)

    def forward(self, x):
        x = self.features(x).flatten(2).transpose(1, 2)
        return self.head(self.pool(x))


class FiLM(Net):
    def __init__(self):
        super().__init__()
        self.condition = nn.Linear(3, 2 * WIDTH)

    def forward(self, x):
        scale, shift = self.condition(x.mean((2, 3))).chunk(2, -1)
        y = self.features(x)
        return self.logits(y * scale[..., None, None] + shift[..., None, None])


class Recurrent(Net):
    def __init__(self):
        super().__init__()
        self.memory = nn.LSTM(
            WIDTH, WIDTH, batch_first=True, bidirectional=True
        )
        self.head = nn.Linear(2 * WIDTH, 5)

    def forward(self, x):
        x = self.features(x).flatten(2).transpose(1, 2)
        return self.head(self.memory(x)[0][:, -1])


class Layers(nn.Module):
    """A chain of one layer kind between two convolutions."""

    def __init__(self, layer):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.layer = layer
        self.head = nn.Linear(WIDTH, 5)

    @classmethod
    def of(cls, function):
        """Returns a builder with a function as the layer."""
        return lambda: cls(Function(function))

    def forward(self, x):
        return self.head(self.layer(self.stem(x)).flatten(2).mean(-1))


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


KINDS = [
    *a("layer: vmap", Layers.of(torch.vmap(lambda y: y * 2)), "layer"),
    *a("layer: norm", Layers.of(partial(F.normalize, dim=1)), "layer"),
    *a(
        "layer: local response norm",
        lambda: Layers(nn.LocalResponseNorm(3)),
        "layer",
    ),
    *a(
        "layer: alpha dropout",
        lambda: Layers(
            nn.Sequential(nn.AlphaDropout(), nn.FeatureAlphaDropout())
        ),
        "layer",
    ),
    *unheld("layer: sort", Layers.of(lambda x: x.sort(1).values), "layer"),
    *unheld(
        "layer: grid_sample",
        Layers.of(
            lambda x: F.grid_sample(
                x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False
            )
        ),
        "layer",
    ),
    *a(
        "layer: encoder",
        lambda: nn.Sequential(
            nn.Linear(4, 8),
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
            ),
            nn.Linear(8, 2),
        ),
        "1 0",
        sample=(6, 4),
    ),
    *a("GeM pooling", GeMNet, "pool"),
    *a("attention pooling", QueryNet, "pool"),
    *unheld("frozen LSTM", Recurrent, "memory"),
    *a("FiLM", FiLM, "body condition neck"),
    *a("LSTM tail", Recurrent, "body"),
]
