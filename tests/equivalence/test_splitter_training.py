"""Equivalence of training the tail and training the partly frozen model."""

import pytest
import torch
from torch import nn

from hapi_splitter.freezing.split_model import split
from reference_models import REFERENCE_MODELS, BranchedNet

TRAINED = ["alexnet", "resnet18", "vit", "mobilenet_v3_small"]


def freeze_all_but(model, tail):
    trained = {id(parameter) for parameter in tail.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def gradients(model):
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("name", TRAINED)
def test_tail_has_the_models_gradients(name):
    reference = REFERENCE_MODELS[name]
    model = reference.build()
    parts = split(model, reference.freeze, sample_shape=reference.sample_shape)
    freeze_all_but(model, parts.tail)
    samples = torch.randn(4, *reference.sample_shape)
    labels = torch.arange(4)

    def trained(output):
        model.zero_grad()
        nn.functional.cross_entropy(output, labels).backward()
        return gradients(model)

    expected = trained(model(samples))
    with torch.inference_mode():
        features = parts.frozen.prefix(parts.frozen.num_cuts)(samples)
    actual = trained(parts.tail(features.clone()))

    assert actual.keys() == expected.keys() != set()
    for parameter, gradient in expected.items():
        atol = 1e-5 * gradient.abs().max().item()
        torch.testing.assert_close(
            actual[parameter], gradient, rtol=1e-4, atol=atol
        )


def test_tail_in_training_mode_draws_the_models_dropout():
    torch.manual_seed(0)
    model = BranchedNet().eval()
    parts = split(model, "mix", sample_shape=(3, 16, 16))
    samples = torch.randn(8, 3, 16, 16)
    features = parts.frozen.prefix(parts.frozen.num_cuts)(samples)
    parts.tail.train()
    model.train()
    model.right.eval()  # the frozen region's batch norm stays in eval mode
    torch.manual_seed(1)
    expected = model(samples)
    statistics = model.norm.running_mean.clone()
    torch.manual_seed(1)
    torch.testing.assert_close(parts.tail(features), expected)
    assert not torch.equal(model.norm.running_mean, statistics)
    parts.tail.eval()
    model.eval()
    torch.testing.assert_close(parts.tail(features), model(samples))


def test_optimiser_of_the_model_trains_the_tail():
    torch.manual_seed(0)
    model = BranchedNet()
    parts = split(model, "mix", sample_shape=(3, 16, 16))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    features = parts.frozen.suffix(0)(torch.randn(4, 3, 16, 16))
    parts.tail.train()
    parts.tail(features).sum().backward()
    optimiser.step()
    after = model.state_dict()
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert {"head.weight", "head.bias", "norm.running_mean"} <= changed
    assert all(key.startswith(("head", "norm")) for key in changed)
    assert set(parts.tail.state_dict()) == {
        key for key in after if key.startswith(("head", "norm"))
    }
