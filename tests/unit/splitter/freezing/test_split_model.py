"""Splitting of models at their freeze point."""

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


def test_model_can_be_frozen_before_its_branches():
    model = BranchedNet().eval()
    parts = split(model, "stem", sample_shape=SHAPE)
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
    model = constructor(weights=None)
    assert default_freeze(model, sample_shape=(3, 64, 64)) == expected
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
