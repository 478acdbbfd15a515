"""Cases of tensors and modules on both sides of the freeze point."""

from __future__ import annotations

import functools
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from model_cases.case import a
from model_cases.nets import WIDTH, Net, Tokens, block


class RootResidual(Net):
    def forward(self, x):
        x = self.stem(x)
        x = x + self.body(x)
        return self.logits(x)


class LateSkip(Net):
    def forward(self, x):
        x = self.stem(x)
        return self.logits(self.body(x) * 0.5) + self.head(x.amax((2, 3)))


class InputSkip(Net):
    def forward(self, x):
        y = self.neck(self.features(x))
        return self.head(y.mean((2, 3))) + x.mean((1, 2, 3))[:, None]


class DeepSupervision(Net):
    def __init__(self):
        super().__init__()
        self.aux = nn.Linear(WIDTH, 5)

    def forward(self, x):
        first = self.stem(x)
        second = self.body(first)
        aux = self.aux(first.mean((2, 3)))
        return {"out": self.logits(second), "aux": aux}


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Conv2d(i, o, 3, stride=2, padding=1)
            for i, o in ((3, 4), (4, 8), (8, 8))
        )
        self.lateral = nn.ModuleList(nn.Conv2d(i, 8, 1) for i in (4, 8, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        maps = []
        for stage in self.stages:
            x = torch.relu(stage(x))
            maps.append(x)
        top = None
        for lateral, features in zip(
            self.lateral[::-1], maps[::-1], strict=True
        ):
            here = lateral(features)
            if top is not None:
                here = here + F.interpolate(top, here.shape[-2:])
            top = here
        return self.head(top.mean((2, 3)))


class LastLayers(Tokens):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2 * WIDTH, 5)

    def forward(self, x):
        x, seen = self.embedded(x), []
        for layer in self.blocks:
            x = layer(x)
            seen.append(x[:, 0])
        return self.head(torch.cat(seen[-2:], 1))


class ScalarMix(Tokens):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x, total = self.embedded(x), 0
        for layer, weight in zip(
            self.blocks, self.weights.softmax(0), strict=True
        ):
            x = layer(x)
            total = total + weight * x
        return self.head(total.mean(1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, padding=1)
        self.deep = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.bottom = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        skip = torch.relu(self.down(x))
        deep = self.bottom(self.deep(skip))
        return self.out(torch.cat([skip, self.up(deep)], 1))


class SharedActivation(Net):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.act = nn.GELU()

    def forward(self, x):
        x = self.act(self.drop(self.features(x)))
        x = self.neck(x).mean((2, 3))
        return self.head(self.drop(self.act(x)))


class SharedLayer(Net):
    """A layer that runs before and after ``body``."""

    def __init__(self, is_trained):
        super().__init__()
        self.mix = nn.Conv2d(WIDTH, WIDTH, 1)
        for module in (self.mix, self.stem, self.body):
            module.requires_grad_(is_trained)

    def forward(self, x):
        return self.logits(self.mix(self.body(self.mix(self.stem(x)))))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3)
        self.steps = nn.ModuleList(block() for _ in range(3))
        self.heads = nn.ModuleDict(
            {name: nn.Linear(WIDTH, 2) for name in ("kind", "colour")}
        )

    def forward(self, x):
        x = functools.reduce(lambda y, step: step(y), self.steps, self.stem(x))
        x = x.mean((2, 3))
        return {name: head(x) for name, head in self.heads.items()}


class MadeInForward(Net):
    def forward(self, x):
        x = x - torch.tensor([0.4, 0.5, 0.6])[None, :, None, None]
        x = nn.ReLU()(self.features(x))
        ramp = torch.arange(x.shape[-1], dtype=x.dtype) / 10
        x = nn.MaxPool2d(2)(x + ramp)
        return self.head(nn.Dropout(0.2).train(self.training)(x.mean((2, 3))))


class ReadsInput(Net):
    def forward(self, x):
        batch, _, height, width = x.shape
        y = self.features(x)
        y = F.interpolate(self.neck(y), (height, width), mode="bilinear")
        y = y.reshape(x.shape[0], WIDTH, -1).mean(-1).to(x.dtype)
        bias = torch.zeros(batch, WIDTH, dtype=x.dtype, device=x.device)
        if x.dim() == 4 and x.is_floating_point():
            bias = bias + x.new_ones(batch, 1) + torch.ones_like(y)
        return self.head(y + bias)


LIVE = [
    *a("plain", Net, "default stem body body.1 neck stem+body"),
    *a(
        "plain, function",
        Net,
        lambda name, module: name.startswith(("stem", "body")),
    ),
    *a("residual in the root", RootResidual, "stem body body.0"),
    *a("late skip", LateSkip, "stem body neck default"),
    *a("skip from the input", InputSkip, "neck"),
    *a("deep supervision", DeepSupervision, "stem body stem+body"),
    *a("pyramid", Pyramid, "stages.0 stages stages.1"),
    *a("last n layers", LastLayers, "blocks.0 blocks.1 blocks"),
    *a("mix of all layers", ScalarMix, "blocks.0 embed"),
    *a("U-Net", UNet, "down deep bottom up"),
    *a(
        "tokens",
        Tokens,
        "default blocks.0 blocks.1 blocks norm embed embed+token+position",
    ),
    *a("shared activation", SharedActivation, "body neck"),
    *a("shared frozen layer", partial(SharedLayer, False), "body"),
    *a("module list and dictionary", Listed, "steps steps.1 stem default"),
    *a("made in forward", MadeInForward, "stem body default"),
    *a("reads the input", ReadsInput, "stem body neck"),
]
