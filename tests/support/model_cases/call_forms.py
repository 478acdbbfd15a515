"""Cases of results, arguments and writes in place."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from model_cases.case import a, r, unheld
from model_cases.nets import WIDTH, Net, block


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    name: str = "net"


Pair = namedtuple("Pair", "logits hidden")


class Results(Net):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        hidden = self.features(x)
        return self.kind(self.logits(hidden), hidden.mean((2, 3)))


class Encoder(nn.Module):
    """A module of a tuple, a dataclass or a dictionary."""

    def __init__(self, kind):
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, WIDTH, 3, padding=1), block()
        self.kind = kind

    def forward(self, x):
        hidden = self.body(self.stem(x))
        return self.kind(hidden, hidden.mean((2, 3)))


class Encoded(nn.Module):
    def __init__(self, kind, take):
        super().__init__()
        self.encoder, self.neck = Encoder(kind), block()
        self.take = take
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        hidden, pooled = self.take(self.encoder(x))
        if pooled is None:
            return self.head(self.neck(hidden).mean((2, 3)))
        return self.head(self.neck(hidden).mean((2, 3)) + pooled)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x, *, scale=1.0, skip=None, **others):
        x = self.conv(x) * scale
        return x if skip is None else x + skip


class Keywords(Net):
    def __init__(self):
        super().__init__()
        self.body, self.neck = Scaled(), Scaled()

    def forward(self, x, mask=None, *, return_dict=True, **options):
        x = self.stem(x)
        x = self.body(x=x, scale=2.0, skip=x, unused=None)
        x = self.neck(x, skip=x).mean((2, 3))
        if mask is not None:
            x = x * mask
        return {"logits": self.head(x)} if return_dict else self.head(x)


def set_items(x):
    x[:, 0] = 0.25
    x[:, 1:3] *= 2
    return x


class InPlace(Net):
    def __init__(self, write):
        super().__init__()
        # An activation's result, which it needs for gradients, cannot be
        # written.
        self.body, self.neck = self.body[:2], self.neck[:2]
        self.write = write

    def forward(self, x):
        x = self.stem(x)
        x = self.write(x)
        x = self.body(x)
        x = self.write(x)
        return self.logits(x)


def add_in_place(x):
    x += 0.5
    return x


def relu_in_place(x):
    return F.relu(x.mul_(2), inplace=True)


def copy_into(x):
    out = torch.empty_like(x)
    out.copy_(x)
    return out.add_(1)


RESULTS = [
    *unheld("items in place", partial(InPlace, set_items), "body"),
    *a(
        "dictionary",
        partial(Results, lambda x, y: {"a": x, "b": y}),
        "body",
    ),
    *a("dataclass", partial(Results, Output), "body neck"),
    *a("named tuple", partial(Results, Pair), "body"),
    *a(
        "list in a tuple",
        partial(Results, lambda x, y: (x, [y, {"y": y}])),
        "body",
    ),
    *a(
        "encoder of a tuple",
        partial(Encoded, lambda x, y: (x, y), lambda o: (o[0], None)),
        "encoder encoder.stem",
    ),
    *a(
        "encoder of two tensors",
        partial(Encoded, lambda x, y: (x, y), lambda o: o),
        "encoder",
    ),
    *a(
        "encoder of a dictionary",
        partial(
            Encoded,
            lambda x, y: {"x": x, "y": y},
            lambda o: (o["x"], o["y"]),
        ),
        "encoder",
    ),
    *a(
        "encoder of a dataclass",
        partial(Encoded, Output, lambda o: (o.logits, None)),
        "encoder encoder.body",
    ),
    *a(
        "encoder of a dataclass, two used",
        partial(Encoded, Output, lambda o: (o.logits, o.hidden)),
        "encoder",
    ),
    *a("keyword arguments", Keywords, "stem body neck"),
    *a("addition in place", partial(InPlace, add_in_place), "stem body"),
    *a("items in place", partial(InPlace, set_items), "stem"),
    *a("relu in place", partial(InPlace, relu_in_place), "stem body"),
    *a("copy into", partial(InPlace, copy_into), "stem"),
    *r(
        "copy into, frozen",
        partial(InPlace, copy_into),
        "body",
        "cannot_freeze",
        "reads the result of 'stem' by 'copy_'",
    ),
]
