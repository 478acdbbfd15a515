"""Networks on which the cases of users' models build."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 8


def block(width=WIDTH):
    return nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    )


class Net(nn.Module):
    """Stem, two blocks, pooling and head; the base of the others."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1)
        self.body = block()
        self.neck = block()
        self.head = nn.Linear(WIDTH, 5)

    def features(self, x):
        return self.body(self.stem(x))

    def logits(self, x):
        return self.head(self.neck(x).mean((2, 3)))

    def forward(self, x):
        return self.logits(self.features(x))


class Tokens(nn.Module):
    """Embedding, class token, positions, blocks, head."""

    def __init__(self, depth=3):
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.position = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 2, 16, 0.1, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def embedded(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        token = self.token.expand(x.shape[0], -1, -1)
        return torch.cat([token, x], 1) + self.position

    def forward(self, x):
        x = self.embedded(x)
        for layer in self.blocks:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])
