"""Cases of tails that look like a chain of modules, and are more."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from model_cases.case import a
from model_cases.nets import WIDTH, Net


class Chain(Net):
    """Calls nothing but modules after ``body``."""

    def __init__(self):
        super().__init__()
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.settings = {"scale": 1.0}
        self.extra = nn.ModuleList()

    def tail(self, x):
        return self.head(self.pool(self.neck(x)))

    def forward(self, x):
        return self.tail(self.features(x))


class WithoutGradients(Chain):
    def tail(self, x):
        with torch.no_grad():
            x = self.neck(x)
        return self.head(self.pool(x))


class ReversedGradients(Chain):
    def tail(self, x):
        x = self.neck(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: -gradient)
        return self.head(self.pool(x))


class IfGradients(Chain):
    def tail(self, x):
        x = self.neck(x)
        if torch.is_grad_enabled():
            x = x * 2
        return self.head(self.pool(x))


class LargeBatch(Chain):
    def tail(self, x):
        if x.shape[0] > 3:
            x = x * 2
        return super().tail(x)


class Setting(Chain):
    def tail(self, x):
        if self.settings["scale"] != 1:
            x = x * self.settings["scale"]
        return super().tail(x)


class Extra(Chain):
    def tail(self, x):
        x = self.pool(self.neck(x))
        for layer in self.extra:
            x = layer(x)
        return self.head(x)


class Cast(Chain):
    def tail(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().tail(x)


class OtherNeck(Chain):
    """Uses another module after some steps."""

    def tail(self, x):
        neck = self.settings.get("neck", self.neck)
        return self.head(self.pool(neck(x)))


def set_scale(model: Any) -> None:
    model.settings["scale"] = 2.0


def add_layer(model: Any) -> None:
    torch.manual_seed(7)
    model.extra.append(nn.Linear(WIDTH, WIDTH))


def append(model: Any) -> None:
    torch.manual_seed(7)
    model.append(nn.Linear(2, 2))


def replace_forward(model: Any) -> None:
    model.forward = lambda x: 2 * Chain.forward(model, x)


def hook_root(model: Any) -> None:
    model.register_forward_hook(lambda module, args, result: 2 * result)


def use_pool(model: Any) -> None:
    model.settings["neck"] = nn.Identity()


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
    )


CHAINS = [
    *a("chain", Chain, "body neck pool"),
    *a("chain without gradients", WithoutGradients, "body"),
    *a("chain with reversed gradients", ReversedGradients, "body"),
    *a("chain unless gradients are computed", IfGradients, "body"),
    *a("chain unless batches are large", LargeBatch, "body"),
    *a("chain with a setting", Setting, "body", change=set_scale),
    *a("chain with layers added later", Extra, "body", change=add_layer),
    *a("chain in autocast", Cast, "body"),
    *a("chain with another module later", OtherNeck, "body", change=use_pool),
    *a("chain with another forward", Chain, "body", change=replace_forward),
    *a("chain with a hook added later", Chain, "body", change=hook_root),
    *a("sequential that grows", sequential, "0", change=append),
]
