"""Cases of single layers and functions in the frozen part."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from model_cases.call_forms import set_items
from model_cases.case import IDS, ModelCase, a, r, unheld
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


class Squeeze(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(WIDTH, 2, 1), nn.Conv2d(2, WIDTH, 1)

    def forward(self, x):
        scale = self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1))))
        return x * scale.sigmoid()


class SqueezeNet(Net):
    def __init__(self):
        super().__init__()
        self.excite = Squeeze()

    def forward(self, x):
        return self.logits(self.excite(self.features(x)))


class FiLM(Net):
    def __init__(self):
        super().__init__()
        self.condition = nn.Linear(3, 2 * WIDTH)

    def forward(self, x):
        scale, shift = self.condition(x.mean((2, 3))).chunk(2, -1)
        y = self.features(x)
        return self.logits(y * scale[..., None, None] + shift[..., None, None])


class Recurrent(Net):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.memory = kind(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 5)

    def forward(self, x):
        x = self.features(x).flatten(2).transpose(1, 2)
        return self.head(self.memory(x)[0][:, -1])


class Layers(nn.Module):
    """A chain of one layer kind between two convolutions."""

    def __init__(self, layer, width=WIDTH):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.layer = layer
        self.head = nn.Linear(width, 5)

    @classmethod
    def of(cls, function):
        return cls(Function(function))

    def forward(self, x):
        return self.head(self.layer(self.stem(x)).flatten(2).mean(-1))


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("order", torch.randperm(WIDTH))

    def forward(self, x):
        return self.function(self, x)


def chain(*modules: Any) -> Any:
    return lambda: Layers(nn.Sequential(*(m() for m in modules)))


LAYER_KINDS: dict[str, Any] = {
    "conv1d": chain(lambda: nn.Flatten(2), lambda: nn.Conv1d(WIDTH, WIDTH, 3)),
    "max_pool1d": chain(lambda: nn.Flatten(2), lambda: nn.MaxPool1d(2)),
    "group norm": chain(lambda: nn.GroupNorm(2, WIDTH)),
    "instance norm": chain(lambda: nn.InstanceNorm2d(WIDTH, affine=True)),
    "rms norm": chain(lambda: nn.RMSNorm(8)),
    "local response norm": chain(lambda: nn.LocalResponseNorm(3)),
    "transposed convolution": chain(
        lambda: nn.ConvTranspose2d(WIDTH, WIDTH, 2, 2)
    ),
    "pixel shuffle": chain(
        lambda: nn.PixelShuffle(2), lambda: nn.PixelUnshuffle(2)
    ),
    "upsample": chain(lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
    "adaptive max pool": chain(lambda: nn.AdaptiveMaxPool2d(2)),
    "lp pool": chain(lambda: nn.LPPool2d(2, 2)),
    "channel shuffle": chain(lambda: nn.ChannelShuffle(2)),
    "fold": chain(
        lambda: nn.Unfold(2, stride=2), lambda: nn.Fold((8, 8), 2, stride=2)
    ),
    "prelu, selu, hardshrink": chain(
        lambda: nn.PReLU(WIDTH), nn.SELU, nn.Hardshrink
    ),
    "celu, softsign, tanhshrink": chain(nn.CELU, nn.Softsign, nn.Tanhshrink),
    "threshold": chain(lambda: nn.Threshold(0.1, 0.0)),
    "reflection pad": chain(
        lambda: nn.ReflectionPad2d(1), lambda: nn.ZeroPad2d(1)
    ),
    "squeeze-excite": chain(Squeeze),
    "alpha dropout": chain(nn.AlphaDropout, nn.FeatureAlphaDropout),
}


FUNCTIONS: dict[str, Any] = {
    "glu": lambda m, x: torch.cat([F.glu(x, 1)] * 2, 1),
    "masked_fill": lambda m, x: x.masked_fill(torch.arange(8) > 5, -1.0),
    "where": lambda m, x: torch.where(x > 0, x, 0.1 * x),
    "index by a buffer": lambda m, x: x[:, m.order],
    "einsum": lambda m, x: torch.einsum("bchw,bcvw->bchv", x, x),
    "top-k": lambda m, x: x.topk(4, 1).values.repeat(1, 2, 1, 1),
    "sort": lambda m, x: x.sort(1).values,
    "norm": lambda m, x: F.normalize(x, dim=1),
    "variance": lambda m, x: x - x.var(1, keepdim=True),
    "power of a tensor": lambda m, x: (
        x.clamp(min=0.1) ** x.abs().mean(1, True)
    ),
    "logsumexp": lambda m, x: x - x.logsumexp(1, keepdim=True),
    "outer product": lambda m, x: x * x.flatten(2).mean(2)[:, :, None, None],
    "round, sign, floor": lambda m, x: x.round() + x.sign() + x.floor(),
    "sin, cos": lambda m, x: x.sin() + x.cos(),
    "matrix product": lambda m, x: x @ x.mT,
    "gather": lambda m, x: x.gather(1, m.order.view(1, -1, 1, 1).expand_as(x)),
    "grid_sample": lambda m, x: F.grid_sample(
        x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False
    ),
    "antialiased resize": lambda m, x: F.interpolate(
        x, (4, 4), mode="bilinear", antialias=True
    ),
    "attention": lambda m, x: F.scaled_dot_product_attention(
        x, x, x, is_causal=True
    ),
    "in-place slices": lambda m, x: set_items(x.clone()),
}


UNHELD = {
    "max_pool1d",
    "instance norm",
    "rms norm",
    "local response norm",
    "pixel shuffle",
    "lp pool",
    "prelu, selu, hardshrink",
    "celu, softsign, tanhshrink",
    "threshold",
    "reflection pad",
    "glu",
    "masked_fill",
    "where",
    "index by a buffer",
    "top-k",
    "sort",
    "variance",
    "power of a tensor",
    "logsumexp",
    "round, sign, floor",
    "sin, cos",
    "gather",
    "grid_sample",
    "antialiased resize",
    "in-place slices",
}
"Cases with operators that packages may not hold."


def held(kind: str, name: str, build: Any, **options: Any) -> list[ModelCase]:
    """Returns a case that may end in ``unknown_op``."""
    if name in UNHELD:
        return unheld(f"{kind}: {name}", build, "layer", **options)
    return a(f"{kind}: {name}", build, "layer", **options)


KINDS = [
    *r(
        "function: vmap",
        partial(Layers.of, lambda m, x: torch.vmap(lambda y: y * 2)(x)),
        "layer",
        "cannot_freeze",
        "cannot be sent",
        later=True,
    ),
    *(
        case
        for name, build in LAYER_KINDS.items()
        for case in held("layer", name, build)
    ),
    *(
        case
        for name, function in FUNCTIONS.items()
        for case in held("function", name, partial(Layers.of, function))
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
    *a(
        "layer: unflatten",
        lambda: nn.Sequential(
            nn.Linear(4, 8),
            nn.Unflatten(1, (2, 4)),
            nn.Softmax(-1),
            nn.Flatten(),
            nn.Linear(8, 2),
        ),
        "2",
        sample=(4,),
    ),
    *unheld(
        "layer: embedding bag",
        lambda: nn.Sequential(
            nn.EmbeddingBag(64, 8), nn.ReLU(), nn.Linear(8, 2)
        ),
        "0",
        sample=IDS,
    ),
    *unheld("GeM pooling", GeMNet, "pool"),
    *unheld("attention pooling", QueryNet, "pool"),
    *unheld("attention pooling", QueryNet, "default"),
    *unheld("frozen LSTM", Recurrent, "memory"),
    *a("GeM pooling", GeMNet, "body neck"),
    *a("attention pooling", QueryNet, "body"),
    *a("squeeze-excite", SqueezeNet, "body excite"),
    *a("FiLM", FiLM, "body condition neck"),
    *a("LSTM tail", Recurrent, "body"),
    *a("GRU tail", partial(Recurrent, nn.GRU), "body"),
]
