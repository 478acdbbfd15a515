"""Splitting of models at their freeze point."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchvision import models

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.split_model import default_freeze, split
from hapi_splitter.freezing.tail import Tail
from reference_models import BranchedNet

SHAPE = (3, 16, 16)


class SkipConnection(nn.Module):
    """A model whose tail also reads an earlier activation."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        early = self.first(x)
        return self.head(torch.cat([early, self.second(early)], 1))


class Tied(nn.Module):
    """A model that calls one layer on both sides of ``middle``."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)
        self.middle = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.layer(self.middle(self.layer(x)))


class Branching(nn.Module):
    """A model whose control flow depends on values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x


class Unpackable(nn.Module):
    """A model that sorts, which is not in the table of operators."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)
        self.head = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.head(self.layer(torch.sort(x, dim=1)[0]))


class TwoInputs(nn.Module):
    def forward(self, x, y):
        return x + y


@pytest.mark.parametrize("freeze", ["layer4", "avgpool"])
def test_freeze_moves_over_pooling_and_flatten(freeze):
    model = models.resnet18(weights=None)
    parts = split(model, freeze, sample_shape=(3, 32, 32))
    assert parts.frozen.cuts[-1].shape == (512,)
    assert set(parts.tail.state_dict()) == {"fc.weight", "fc.bias"}
    assert parts.tail.get_submodule("fc") is model.fc


def test_freeze_stops_before_dropout_and_batch_norm():
    parts = split(BranchedNet(), "mix", sample_shape=SHAPE)
    assert parts.frozen.cuts[-1].shape == (48,)
    assert parts.last == "view"
    assert isinstance(parts.tail.get_submodule("norm"), nn.BatchNorm1d)


def test_split_does_not_change_the_model_or_its_modes():
    model = BranchedNet().train()
    model.right.eval()
    modes = {name: m.training for name, m in model.named_modules()}
    state = {k: v.clone() for k, v in model.state_dict().items()}
    split(model, "mix", sample_shape=SHAPE)
    assert modes == {name: m.training for name, m in model.named_modules()}
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])


@pytest.mark.parametrize(
    ("model", "freeze", "code", "message"),
    [
        (BranchedNet(), "mxi", "unknown_freeze", r"'mxi'.*not in.*mix"),
        (BranchedNet(), "left", "cannot_freeze", r"2 tensors.*\[8, 16, 16\]"),
        (
            SkipConnection(),
            "second",
            "cannot_freeze",
            r"first \[4, 16, 16\], second",
        ),
        (Tied(), "middle", "cannot_freeze", r"parameter 'layer\.\w+'"),
        (Branching(), "layer", "cannot_trace", "cannot trace Branching"),
        (TwoInputs(), "x", "cannot_trace", "takes 2 tensors"),
        (Unpackable(), "layer", "unknown_op", "aten.sort"),
        (nn.Sequential(nn.Linear(7, 2)), "0", "cannot_trace", "does not run"),
    ],
    ids=lambda value: (
        type(value).__name__ if isinstance(value, nn.Module) else None
    ),
)
def test_model_that_cannot_be_split_is_refused_with_a_reason(
    model, freeze, code, message
):
    with pytest.raises(FreezeError, match=message) as caught:
        split(model, freeze, sample_shape=SHAPE)
    assert caught.value.code == code


def test_model_can_be_frozen_before_a_skip_connection():
    model = SkipConnection()
    parts = split(model, "first", sample_shape=SHAPE)
    samples = torch.randn(2, *SHAPE)
    features = parts.frozen.suffix(0)(samples)
    torch.testing.assert_close(parts.tail(features), model(samples))


@pytest.mark.parametrize(
    ("constructor", "expected"),
    [
        (models.resnet18, "layer4"),
        (models.alexnet, "classifier.4"),
        (models.mobilenet_v3_small, "classifier.0"),
        (models.squeezenet1_1, "features"),
    ],
)
def test_default_freeze_leaves_the_last_linear(constructor, expected):
    model = constructor(weights=None)  # type: ignore[operator]
    assert default_freeze(model, sample_shape=(3, 64, 64)) == expected


def test_default_freeze_of_a_single_layer_is_refused():
    with pytest.raises(FreezeError, match="no freeze point before"):
        default_freeze(nn.Linear(4, 2), sample_shape=(4,))


def test_tail_can_be_copied():
    parts = split(BranchedNet().eval(), "mix", sample_shape=SHAPE)
    features = torch.randn(3, 48)
    other = copy.deepcopy(parts.tail)
    assert isinstance(other, Tail)
    torch.testing.assert_close(other(features), parts.tail(features))


def test_tail_recomputes_sizes_from_before_the_freeze_point():
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Conv2d(3, 4, 3)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x):
            batch, height = x.shape[0], x.size(2)
            return self.norm(self.body(x)).view(batch * 2, -1) * height

    model = Sized().eval()
    parts = split(model, "body", sample_shape=SHAPE)
    for count in (1, 5):
        samples = torch.randn(count, *SHAPE)
        features = parts.frozen.suffix(0)(samples)
        torch.testing.assert_close(parts.tail(features), model(samples))


@pytest.mark.parametrize("as_two_modules", [False, True])
def test_split_does_not_change_the_random_state(as_two_modules):
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
    head = nn.Sequential(nn.Dropout(), nn.Linear(4 * 6 * 6, 2))
    model = (body, head) if as_two_modules else nn.Sequential(body, head)
    before = torch.get_rng_state()
    split(model, None if as_two_modules else "0", sample_shape=(3, 8, 8))
    assert torch.equal(before, torch.get_rng_state())
