"""Random small models whose forwards do what users' forwards do."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

WIDTH = 8
MODULES = 5
KINDS = ("linear", "chain", "norm", "noisy", "numbers", "pairs")


class Noisy(nn.Module):
    """Adds noise in training."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.inner(x)
        return x + 0.1 * torch.randn_like(x) if self.training else x


class Numbers(nn.Module):
    """Returns a number and a tensor."""

    def __init__(self, number):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.number = number

    def forward(self, x):
        return self.inner(x), self.number(x.shape[0])


class Pairs(nn.Module):
    """Returns a second tensor, whose length is that of half of the batch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.inner(x)
        return x, x[: x.shape[0] // 2]


class Counting(nn.Module):
    """Has state in attributes, a class attribute and a buffer."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros(()))
        self.seen = []

    def forward(self, x):
        type(self).calls += 1
        self.seen.append(x.shape[0])
        self.steps += 1
        return self.inner(x) * (1 + 0.01 * self.steps)


NUMBERS = (
    lambda batch: 3,
    lambda batch: batch,
    lambda batch: 2 * batch + 1,
    lambda batch: batch // 2,
    lambda batch: min(batch, 3),
    lambda batch: batch % 3,
)


def module(draw: random.Random, kind: str) -> nn.Module:
    return {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "chain": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
        "norm": lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        ),
        "noisy": Noisy,
        "drop": lambda: nn.Dropout(0.3),
        "numbers": lambda: Numbers(draw.choice(NUMBERS)),
        "pairs": Pairs,
        "counting": Counting,
    }[kind]()


class RandomModel(nn.Module):
    """A forward of module calls with statements between them.

    Args:
        seed: of everything.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        kinds = (*KINDS, "linear", "chain") * 3 + ("drop", "counting")
        for index in range(MODULES):
            setattr(self, f"m{index}", module(draw, draw.choice(kinds)))
        self.head = nn.Linear(WIDTH, 3)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)
        self.generator = torch.Generator().manual_seed(seed)
        self.epoch = 0
        self.early: Any = None
        last = draw.randint(0, MODULES - 2)
        self.freeze = f"m{last}"
        self.statements = [
            [
                statement(draw, index <= last)
                for _ in range(
                    draw.choice(
                        (0, 0, 0, 1) if index <= last else (0, 1, 1, 2)
                    )
                )
            ]
            for index in range(MODULES + 1)
        ]
        self.last = [late_statement(draw)] * draw.choice((0, 0, 1))

    def forward(self, x):
        self.numbers, self.tensors, self.steps = [2], [x], []
        for index, statements in enumerate(self.statements):
            for each in statements:
                x = self.run(each, x)
            if index < MODULES:
                result = getattr(self, f"m{index}")(x)
                x, *others = result if isinstance(result, tuple) else (result,)
                for other in others:
                    is_tensor = isinstance(other, torch.Tensor)
                    (self.tensors if is_tensor else self.numbers).append(other)
                self.tensors.append(x)
        for each in self.last:
            x = self.run(each, x)
        result = self.head(x)
        self.numbers, self.tensors = [], []
        return result

    def run(self, each, x):
        name, when, number = each
        is_on = {
            "always": lambda: True,
            "training": lambda: self.training,
            "eval": lambda: not self.training,
            "epoch": lambda: self.training and self.epoch >= 2,
            "coin": lambda: self.training and random.random() < 0.5,
            "large": lambda: x.shape[0] > 4,
        }[when]()
        return STATEMENTS[name](self, x, number) if is_on else x


def early(model, x, number):
    """Reads a tensor of before."""
    found = model.tensors[int(number * len(model.tensors))]
    return x + 0.1 * found.mean(0)


def early_rows(model, x, number):
    found = model.tensors[int(number * len(model.tensors))]
    return x + 0.1 * found if found.shape == x.shape else x


def compared(model, x, number):
    found = model.tensors[int(number * len(model.tensors))]
    return x * (1 + (found.mean() > 0).float())


def by_number(model, x, number):
    """Uses a number that a module has returned."""
    return x * (1 + 0.1 * model.numbers[-1])


def by_rows(model, x, number):
    count = max(1, min(x.shape[0], model.numbers[-1]))
    return torch.cat([x[:count] * 2, x[count:]])


def in_place(model, x, number):
    x = x * 1
    x += model.shift
    return x


def written(model, x, number):
    x = x.clone()
    x[:, 0] = number
    return x


def kept(model, x, number):
    """Adds what another forward has left in an attribute."""
    before, model.early = model.early, x.detach().mean(0)
    return x if before is None else x + 0.01 * before


def checked(model, x, number):
    return x * 2 if bool(x.sum() > 1e9) else x


STATEMENTS = {
    "relu": lambda model, x, number: torch.relu(x),
    "double": lambda model, x, number: x * 2,
    "flip": lambda model, x, number: x.flip(-1),
    "shift": lambda model, x, number: x + model.shift,
    "scale": lambda model, x, number: x * model.scale,
    "reshape": lambda model, x, number: x.reshape(x.shape[0], 2, -1).flatten(
        1
    ),
    "noise": lambda model, x, number: x + 0.1 * torch.randn_like(x),
    "constant": lambda model, x, number: x + torch.full((WIDTH,), number),
    "jitter": lambda model, x, number: x + 0.1 * torch.randn(WIDTH),
    "own": lambda model, x, number: (
        x + 0.1 * torch.randn(WIDTH, generator=model.generator)
    ),
    "mixup": lambda model, x, number: (
        0.7 * x + 0.3 * x[torch.randperm(x.shape[0])]
    ),
    "drop": lambda model, x, number: nn.functional.dropout(
        x, 0.3, model.training
    ),
    "off": lambda model, x, number: nn.functional.dropout(
        x, 0.0, model.training
    ),
    "per sample": lambda model, x, number: x / x.shape[0],
    "first half": lambda model, x, number: torch.cat(
        [x[: x.shape[0] // 2] * 2, x[x.shape[0] // 2 :]]
    ),
    "count": lambda model, x, number: model.steps.append(x.shape[0]) or x,
    "temperature": lambda model, x, number: x * (1 + 0.1 * model.epoch),
    "early": early,
    "early rows": early_rows,
    "compared": compared,
    "by number": by_number,
    "by rows": by_rows,
    "in place": in_place,
    "written": written,
    "kept": kept,
    "checked": checked,
}
COMMON = ("relu", "double", "flip", "reshape", "early rows", "off", "count")


def statement(draw, is_frozen):
    is_common = draw.random() < (0.7 if is_frozen else 0.3)
    name = draw.choice(COMMON if is_common else list(STATEMENTS))
    when = draw.choices(
        ("always", "training", "epoch", "coin", "large", "eval"),
        (12, 2, 1, 1, 0.3, 0.3) if is_frozen else (8, 3, 3, 3, 0.5, 0.5),
    )[0]
    return name, when, draw.random()


def late_statement(draw):
    name = draw.choice(("early", "early rows", "compared", "kept"))
    when = draw.choice(("always", "training", "epoch", "epoch", "coin"))
    return name, when, draw.random()
