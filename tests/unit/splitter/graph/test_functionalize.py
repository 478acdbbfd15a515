"""Removal of in-place operators, without a retrace if that is sound."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.split_model import split
from hapi_splitter.graph.functionalize import _InPlaceRewriter
from support.networks import small_network, small_transform

SHAPE = (4, 8, 8)


class Block(nn.Module):
    """Applies a function that may overwrite its argument."""

    def __init__(self, function):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.function = function

    def forward(self, x):
        return self.function(self.norm(self.conv(x)))


def build(function):
    torch.manual_seed(0)
    model = Block(function)
    model(torch.randn(8, *SHAPE))  # statistics other than 0 and 1
    return model.eval()


def read_by_a_view(x):
    flat = x.flatten(1)
    x.relu_()
    return flat * 2


def read_by_a_part(x):
    first = x[:, :2]
    x.add_(1)
    return first.sigmoid()


def read_after_a_part_is_written(x):
    x[:, 0].relu_()
    return x * 2


def read_through_dropout_and_contiguous(x):
    dropped, same = F.dropout(x, 0.5, training=False), x.contiguous()
    x.mul_(2)
    return dropped + same


def read_by_its_source(x):
    y = x * 2
    torch.relu_(y)
    return y + x


def of_another_dtype(x):
    y = x + 0
    y += torch.ones(8, dtype=torch.int64)
    return y.flatten(1)


def written_weight(x):
    ones = torch.ones(8)
    once = x + ones
    ones.add_(1)
    return once + ones


def residual(x):
    y = F.hardswish(x, inplace=True)
    z = F.relu(y * 3, inplace=True)
    z += y
    return F.dropout(F.silu(z, inplace=True), training=False, inplace=True)


def copied(x):
    turned = x.transpose(1, 2).contiguous().contiguous()
    turned.add_(1)
    return turned.permute(0, 2, 3, 1).flatten(1).unflatten(1, (4, -1))


def written_view(x):
    return x.flatten(1).relu_() * 2


def written_copy(x):
    copy = x.transpose(1, 2).reshape(-1, 8, 32)
    return copy.relu_() + x.reshape(-1, 8, 32)


REWRITTEN = [
    *(residual, copied, read_by_its_source),
    read_through_dropout_and_contiguous,
]
RETRACED = [
    read_by_a_view,
    read_by_a_part,
    written_view,
    written_copy,
    written_weight,
    of_another_dtype,
    lambda x: x.copy_(x.flip(1)) + 1,
    lambda x: torch.einsum("bchw,bcHw->bchH", x, x),
    lambda x: x.float() + 1,
]


@pytest.mark.parametrize("function", [*REWRITTEN, *RETRACED])
def test_frozen_region_equals_the_module(function):
    model = build(function)
    frozen = split((model, nn.Identity()), sample_shape=SHAPE).frozen
    for batch in (1, 3):
        x = torch.randn(batch, *SHAPE)
        with torch.no_grad():
            features = frozen.prefix(frozen.num_cuts)(x)
            torch.testing.assert_close(features, model(x))


@pytest.mark.parametrize("function", REWRITTEN)
def test_rewritten_package_equals_the_retraced_one(function, monkeypatch):
    modules = (build(function), nn.Identity())
    with monkeypatch.context() as patch:
        patch.delattr(torch.export.ExportedProgram, "run_decompositions")
        rewritten = split(modules, sample_shape=SHAPE).frozen
        split(small_network(), "pool", transform=small_transform())
    monkeypatch.setattr(_InPlaceRewriter, "is_sound", lambda _: False)
    retraced = split(modules, sample_shape=SHAPE).frozen
    assert rewritten.program == retraced.program
    assert rewritten.names == retraced.names
    assert rewritten.digest == retraced.digest


@pytest.mark.parametrize("function", [*RETRACED, read_after_a_part_is_written])
def test_observable_write_needs_a_retrace(function):
    batch = torch.export.Dim("batch", min=1, max=65536)
    samples = (torch.randn(2, *SHAPE),)
    exported = torch.export.export(
        build(function), samples, dynamic_shapes=({0: batch},)
    )
    assert not _InPlaceRewriter(exported.graph).is_sound()


class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(256, 2)
        self.register_buffer("count", torch.ones(1))

    def forward(self, x):
        return self.head(self.conv(self.relu(x)).flatten(1))


def test_model_that_overwrites_its_input_is_split():
    model = Overwriting().eval()
    parts = split(model, "conv", sample_shape=SHAPE)
    x = torch.randn(3, *SHAPE)
    features = parts.frozen.prefix(parts.frozen.num_cuts)(x.clone())
    torch.testing.assert_close(parts.tail(features), model(x))


class Counting(Overwriting):
    def forward(self, x):
        return self.conv(x) * self.count.add_(1)


def test_module_that_changes_a_buffer_is_refused():
    with pytest.raises(FreezeError, match="'count'") as caught:
        split((Counting().eval(), nn.Identity()), sample_shape=SHAPE)
    assert caught.value.code == "cannot_freeze"
