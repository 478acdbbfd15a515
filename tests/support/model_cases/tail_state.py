"""Cases of gradients, randomness, state and values after the freeze point."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from model_cases.case import a, r
from model_cases.nets import WIDTH, Net, Tokens, block


class Teacher(Net):
    def __init__(self):
        super().__init__()
        self.teacher = block()

    def forward(self, x):
        x = self.features(x)
        with torch.no_grad():
            target = self.teacher(x)
        student = self.neck(x)
        return self.head(student.mean((2, 3))), (student - target).square()


class Ema(Net):
    def __init__(self):
        super().__init__()
        self.average = block().requires_grad_(False)

    def forward(self, x):
        x = self.features(x)
        if self.training:
            with torch.no_grad():
                for old, new in zip(
                    self.average.parameters(),
                    self.neck.parameters(),
                    strict=True,
                ):
                    old.lerp_(new, 0.5)
        return self.logits(x), self.average(x).detach()


class Gated(Net):
    """A tail that draws numbers from one of the generators."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        x = self.features(x)
        return self.logits(x * self.draw(x))


def torch_noise(x):
    return 1 + torch.randn(x.shape[0], 1, 1, 1)


def python_noise(x):
    return random.random()


def numpy_noise(x):
    return float(np.random.rand())


def like_noise(x):
    return F.dropout2d(torch.rand_like(x).bernoulli(), 0.5, True)


def gumbel(x):
    return F.gumbel_softmax(x, dim=1)


class LayerDrop(Tokens):
    def forward(self, x):
        x = self.embedded(x)
        for layer in self.blocks:
            if self.training and random.random() < 0.5:
                continue
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class StochasticDepth(Net):
    def forward(self, x):
        x = self.features(x)
        keep = torch.rand(x.shape[0], 1, 1, 1) < 0.5
        if not self.training:
            keep = torch.ones_like(keep)
        return self.logits(x + self.neck(x) * keep)


class Annealed(Net):
    def __init__(self):
        super().__init__()
        self.temperature = 1.0

    def forward(self, x):
        return self.logits(self.features(x)) / self.temperature


class Counted(Net):
    """Counts its calls in a buffer and in an attribute."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.steps += 1
        return self.logits(self.features(x)) * (self.calls + self.steps)


class Cached(Net):
    """Keeps masks by size, and the last features."""

    def __init__(self):
        super().__init__()
        self.masks = {}
        self.last = None

    def forward(self, x):
        x = self.features(x)
        size = x.shape[-1]
        if size not in self.masks:
            self.masks[size] = torch.linspace(0, 1, size)
        self.last = self.neck(x * self.masks[size])
        return self.head(self.last.mean((2, 3)))


class Stashed(Net):
    """Keeps a tensor in an attribute for later code."""

    def forward(self, x):
        self.early = self.stem(x)
        x = self.body(self.early)
        return self.logits(x) + self.head(self.early.amax((2, 3)))


class Moving(Net):
    """Centres features by a running mean that it updates itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(5))

    def forward(self, x):
        out = self.logits(self.features(x))
        if self.training:
            self.centre.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return out - self.centre


class Island(Net):
    """Runs its head in float32 and the rest in autocast."""

    def forward(self, x):
        x = self.features(x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.neck(x).mean((2, 3))
            with torch.autocast("cpu", enabled=False):
                return self.head(x.float())


class DependsAfter(Net):
    def forward(self, x):
        x = self.features(x)
        out = self.logits(x)
        if out.mean() > 0:
            out = out * 2
        return out[out.argmax(1) >= 0]


class Contrastive(Net):
    def forward(self, x):
        z = F.normalize(self.logits(self.features(x)), dim=1)
        return z @ z.T


class Experts(Net):
    """Routes each sample to one of two experts in the tail."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(2))

    def forward(self, x):
        x = self.features(x).mean((2, 3))
        scores = self.gate(x).softmax(1)
        out = torch.zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            chosen = scores.argmax(1) == number
            out[chosen] = expert(x[chosen]) * scores[chosen, number, None]
        return out


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


class Custom(Net):
    def __init__(self, is_early):
        super().__init__()
        self.is_early = is_early

    def forward(self, x):
        x = self.stem(x)
        x = Double.apply(x) if self.is_early else x
        x = self.body(x)
        return self.logits(x if self.is_early else Double.apply(x))


class Numpy(Net):
    def __init__(self, is_early):
        super().__init__()
        self.is_early = is_early

    def shifted(self, x):
        return x + torch.from_numpy(np.sort(x.detach().numpy(), axis=1))

    def forward(self, x):
        x = self.stem(x)
        x = self.shifted(x) if self.is_early else x
        x = self.body(x)
        return self.logits(x if self.is_early else self.shifted(x))


class Fourier(Net):
    def forward(self, x):
        x = self.features(x)
        spectrum = torch.fft.rfft2(x)
        return self.logits(torch.fft.irfft2(spectrum * 0.5, s=x.shape[-2:]))


def anneal(model: Any) -> None:
    model.temperature = 0.25


def replace_head(model: Any) -> None:
    torch.manual_seed(7)
    model.head = nn.Linear(WIDTH, 3)


def double(module: Any, args: Any, result: Any = None) -> Any:
    return 2 * result


def hook_neck(model: Any) -> None:
    model.neck.register_forward_hook(double)


def freeze_neck(model: Any) -> None:
    model.neck.requires_grad_(False)


STATE = [
    *a("teacher without gradients", Teacher, "body stem"),
    *a("EMA branch", Ema, "body"),
    *a("noise of torch", partial(Gated, torch_noise), "body"),
    *a("noise of Python", partial(Gated, python_noise), "body"),
    *a("noise of NumPy", partial(Gated, numpy_noise), "body"),
    *a("noise like a tensor", partial(Gated, like_noise), "body"),
    *a("Gumbel", partial(Gated, gumbel), "body"),
    *a("LayerDrop", LayerDrop, "embed"),
    *a("stochastic depth", StochasticDepth, "body"),
    *a("annealed attribute", Annealed, "body stem", change=anneal),
    *a("head replaced later", Net, "body", change=replace_head),
    *a("hook added later", Net, "body", change=hook_neck),
    *a("neck frozen later", Net, "body", change=freeze_neck),
    *a("counters", Counted, "body neck"),
    *a("caches", Cached, "body stem"),
    *a("stashed tensor", Stashed, "stem body"),
    *a("own running mean", Moving, "body neck"),
    *a("autocast tail with an island", Island, "body"),
    *a("contrastive tail", Contrastive, "body"),
    *a("experts in the tail", Experts, "body"),
    *a("autograd function in the tail", partial(Custom, False), "body"),
    *a("frozen autograd function", partial(Custom, True), "body"),
    *a("NumPy in the tail", partial(Numpy, False), "body"),
    *r(
        "frozen NumPy",
        partial(Numpy, True),
        "body",
        "cannot_trace",
        "numpy",
    ),
    *a("Fourier transform in the tail", Fourier, "body"),
    *a("branch on values after", DependsAfter, "body"),
]
