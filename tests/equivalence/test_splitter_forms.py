"""Equivalence of a model that branches on sizes with its two modules."""

import pytest
import torch
from torch import nn

from hapi_splitter.freezing.split_model import split
from hapi_splitter.package.reader import load_package
from hapi_splitter.package.writer import package_bytes

SHAPE = (3, 16, 16)


class Output(dict[str, torch.Tensor | None]):
    """A library's result with several fields, some of them None."""

    @property
    def last(self):
        return self["last"]

    @property
    def hidden(self):
        return self["hidden"]


class Branching(nn.Module):
    """A module that branches on a size."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        if x.shape[-1] % 2 == 0:
            x = nn.functional.avg_pool2d(x, int(x.shape[-1]) // 4)
        return Output(last=x, hidden=None)


class BranchingTail(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(128)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        if x.shape[1] != 128:
            raise ValueError("not its features")
        return self.drop(self.norm(x))


class Net(nn.Module):
    """A model with branching ``body`` and ``neck``."""

    def __init__(self):
        super().__init__()
        self.body = Branching()
        self.neck = BranchingTail()
        self.head = nn.Linear(128, 4)

    def forward(self, x, labels=None):
        output = self.body(x)
        logits = self.head(self.neck(torch.flatten(output.last, 1)))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits, labels)
        return {"logits": logits, "hidden": output.hidden, "loss": loss}


class Head(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.neck, self.head = net.neck, net.head

    def forward(self, x):
        return {"logits": self.head(self.neck(torch.flatten(x, 1)))}


class Body(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.body = net.body

    def forward(self, x):
        return self.body(x).last


def network():
    torch.manual_seed(0)
    net = Net()
    net.body.norm.running_mean.uniform_(-0.2, 0.2)
    return net


def parts_of(net):
    return split((Body(net), Head(net)), sample_shape=SHAPE)


def gradients(net):
    """Returns gradients of all parameters outside the frozen body."""
    return {
        name: parameter.grad.clone()
        for name, parameter in net.named_parameters()
        if parameter.grad is not None and not name.startswith("body.")
    }


def test_branching_model_is_equivalent_at_every_cut():
    net = network().eval()
    parts = parts_of(net)
    loaded = load_package(package_bytes(parts.frozen))
    samples = torch.randn(5, *SHAPE)
    with torch.inference_mode():
        expected = net(samples)["logits"]
        assert loaded.num_cuts > 3
        for cut in loaded.cuts:
            crossing = loaded.prefix(cut.index)(samples)
            features = parts.frozen.suffix(cut.index)(crossing)
            torch.testing.assert_close(
                parts.tail(features)["logits"], expected
            )


@pytest.mark.parametrize("training", [True, False])
def test_tail_of_a_branching_model_has_the_models_gradients(training):
    net = network()
    parts = parts_of(net)
    net.train(training)
    net.body.eval()  # the frozen region stays in eval mode
    parts.tail.train(training)
    samples, labels = torch.randn(6, *SHAPE), torch.arange(6) % 4
    features = parts.frozen.suffix(0)(samples)

    def trained(model, inputs):
        net.zero_grad()
        torch.manual_seed(1)
        loss = nn.functional.cross_entropy(model(inputs)["logits"], labels)
        loss.backward()
        return loss, gradients(net)

    expected_loss, expected = trained(net, samples)
    actual_loss, actual = trained(parts.tail, features)

    torch.testing.assert_close(actual_loss, expected_loss)
    assert actual.keys() == expected.keys() != set()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient)
