"""Small models written as users write them, one for each habit."""

from __future__ import annotations

import functools
import random
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

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


# --- tensors that live across the freeze point


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


class AuxiliaryInTraining(DeepSupervision):
    def forward(self, x):
        first = self.stem(x)
        out = self.logits(self.body(first))
        if self.training:
            return out, self.aux(first.mean((2, 3)))
        return out


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
        for lateral, each in zip(self.lateral[::-1], maps[::-1], strict=True):
            here = lateral(each)
            if top is not None:
                here = here + F.interpolate(top, here.shape[-2:])
            top = here
        return self.head(top.mean((2, 3)))


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
        for each in self.blocks:
            x = each(x)
        return self.head(self.norm(x)[:, 0])


class LastLayers(Tokens):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2 * WIDTH, 5)

    def forward(self, x):
        x, seen = self.embedded(x), []
        for each in self.blocks:
            x = each(x)
            seen.append(x[:, 0])
        return self.head(torch.cat(seen[-2:], 1))


class NormedLayers(Tokens):
    """Averages the class tokens of all layers after one shared norm."""

    def forward(self, x):
        x, seen = self.embedded(x), []
        for each in self.blocks:
            x = each(x)
            seen.append(self.norm(x)[:, 0])
        return self.head(torch.stack(seen).mean(0))


class ScalarMix(Tokens):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x, total = self.embedded(x), 0
        for each, weight in zip(
            self.blocks, self.weights.softmax(0), strict=True
        ):
            x = each(x)
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


# --- modules that are shared, listed, or made on the way


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
        x = functools.reduce(lambda y, each: each(y), self.steps, self.stem(x))
        x = x.mean((2, 3))
        return {name: head(x) for name, head in self.heads.items()}


class Named(Net):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"one": block(), "two": block()})

    def forward(self, x):
        x = self.stem(x)
        for name in ("one", "two"):
            x = self.parts[name](x)
        return self.logits(x)


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


# --- layers


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


# --- results


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


# --- calls


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


def set_items(x):
    x[:, 0] = 0.25
    x[:, 1:3] *= 2
    return x


def relu_in_place(x):
    return F.relu(x.mul_(2), inplace=True)


def copy_into(x):
    out = torch.empty_like(x)
    out.copy_(x)
    return out.add_(1)


# --- parameters


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
        each = model.blocks[number]
        # Not the layer's own linear: PyTorch's fast path reads its weight.
        model.blocks[number] = nn.Sequential(each, LoRA(nn.Linear(8, 8)))
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
        for number, each in enumerate(self.blocks):
            if number == self.at:
                prompt = self.prompt.expand(x.shape[0], -1, -1)
                x = torch.cat([prompt, x], 1)
            x = each(x)
        return self.head(self.norm(x).mean(1))


# --- gradients, randomness and state in the tail


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
        for each in self.blocks:
            if self.training and random.random() < 0.5:
                continue
            x = each(x)
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


# --- precision


class Island(Net):
    """Runs its head in float32 and the rest in autocast."""

    def forward(self, x):
        x = self.features(x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.neck(x).mean((2, 3))
            with torch.autocast("cpu", enabled=False):
                return self.head(x.float())


class AutocastInside(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.logits(self.features(x)).float()


# --- what happens around a forward


def hooked(register):
    model = Net()
    register(model)
    return model


def replaced(replace):
    """A model whose instance has another forward."""
    model = Net()
    model.forward = replace(model)
    return model


class Flagged(Net):
    def forward(self, x, scale=1.0, tuple_result=False):
        out = self.logits(self.features(x)) * scale
        return (out,) if tuple_result else out


class Checkpointed(Tokens):
    def forward(self, x):
        x = self.embedded(x)
        for each in self.blocks:
            x = checkpoint(each, x, use_reentrant=False)
        return self.head(self.norm(x).mean(1))


# --- control flow


class DependsBefore(Net):
    def forward(self, x):
        x = self.stem(x)
        if x.mean() > 0:
            x = x * 2
        return self.logits(self.body(x))


class DependsAfter(Net):
    def forward(self, x):
        x = self.features(x)
        out = self.logits(x)
        if out.mean() > 0:
            out = out * 2
        return out[out.argmax(1) >= 0]


class NeverRuns(Net):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


class Twice(Net):
    def forward(self, x):
        return self.logits(self.body(self.body(self.stem(x))))


class Fails(Net):
    def forward(self, x):
        if x.shape[-1] != 32:
            raise ValueError("images must have 32 pixels")
        return self.logits(self.features(x))


class AcrossBatch(Net):
    def forward(self, x):
        x = self.stem(x)
        return self.logits(self.body(x - x.mean(0, keepdim=True)))


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


class TwoInputs(Net):
    def forward(self, x, mask):
        return self.logits(self.features(x)) * mask
