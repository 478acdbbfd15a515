"""The tail runs the user's own forward and leaves the model as it is."""

import copy
import pickle
import random
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.model_checks import SplitWarning
from hapi_splitter.freezing.split_model import split
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.named_arrays import NamedArrays

SHAPE = (6,)


class Net(nn.Module):
    """Two frozen layers, a statement between them, and a head."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.shift = nn.Parameter(torch.randn(6))
        self.body = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)
        self.teacher = nn.Linear(6, 2)
        self.head = nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.temperature = 1.0
        self.steps = 0

    def forward(self, x):
        x = self.first(x)
        x += self.shift
        x = self.body(x)
        self.steps += 1
        with torch.no_grad():
            target = self.teacher(x)
        x = self.drop(x) * random.choice([1.0, 2.0]) + torch.randn(6)
        result = self.head(x) / self.temperature + target
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * result.detach().mean(0)
        return result


def parts_of(model, freeze="body"):
    return split(model, freeze, sample_shape=SHAPE)


def seeded(call, *args):
    torch.manual_seed(1)
    random.seed(1)
    return call(*args)


def test_every_call_runs_the_code_and_the_attributes_of_that_moment():
    model = Net()
    parts = parts_of(model)
    parts.tail.train()
    samples = torch.randn(8, 6)
    features = parts.frozen.suffix(0)(samples)
    for step in range(3):
        model.temperature = 1.0 + step
        before = model.mean.clone()
        expected = seeded(model, samples)
        changed, model.mean = model.mean, before
        actual = seeded(parts.tail, features)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(model.mean, changed)
        assert torch.equal(parts.tail.state_dict()["mean"], model.mean)
    assert model.steps == 6
    actual.sum().backward()
    assert model.teacher.weight.grad is None
    assert model.head.weight.grad is not None
    frozen = (model.first, model.body)
    assert model.shift.grad is None
    assert model.shift.requires_grad
    assert all(p.grad is None for m in frozen for p in m.parameters())


def test_tail_shows_the_models_own_entries():
    model = Net()
    tail = parts_of(model).tail
    names = {"teacher.weight", "teacher.bias", "head.weight", "head.bias"}
    assert dict(tail.named_parameters()).keys() == names
    assert tail.state_dict().keys() == names | {"mean"}
    assert tail.head is model.head
    model.head = nn.Linear(6, 3)
    assert tail.head is model.head
    tail.eval()
    assert not model.training
    assert not model.head.training
    tail.double()
    assert model.shift.dtype == model.mean.dtype == torch.float64
    assert model.body.weight.dtype == torch.float32


@pytest.mark.parametrize("copied", [copy.deepcopy, "pickle"])
def test_copies_compute_the_same_with_weights_of_their_own(copied):
    model = Net().eval()
    tail = parts_of(model).tail
    if copied == "pickle":
        other = pickle.loads(pickle.dumps(tail))
    else:
        other = copied(tail)
    features = torch.randn(3, 6)
    assert torch.equal(seeded(other, features), seeded(tail, features))
    with torch.no_grad():
        other.head.weight.zero_()
    assert model.head.weight.any()


def test_calls_and_errors_leave_the_model_as_it_was():
    model = Net()
    model.body.register_forward_hook(lambda *_: pytest.fail("a frozen hook"))
    model.body._forward_hooks.clear()
    hooks = []
    model.first.register_forward_hook(lambda *_: hooks.append("first"))
    with pytest.warns(
        SplitWarning, match="hooks of the frozen module 'first'"
    ):
        parts = parts_of(model)
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    hooks.clear()
    parts.tail(torch.randn(2, 6))
    with pytest.raises(RuntimeError):
        parts.tail(torch.randn(2, 6).double())
    assert hooks == []
    for name, module in model.named_modules():
        now = dict(vars(module))
        assert now.keys() == before[name].keys()
        for key, value in now.items():
            assert value is before[name][key] or key in ("steps", "training")
    model(torch.randn(2, 6))
    assert hooks == ["first"]


def test_threads_take_turns():
    model = Net().eval()
    model.forward = lambda x: model.head(model.body(model.first(x)))
    tail = parts_of(model).tail
    inputs = [torch.randn(4, 6) for _ in range(8)]
    found = {}

    def run(index):
        for _ in range(20):
            found[index] = tail(inputs[index])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, features in enumerate(inputs):
        assert torch.equal(found[index], model.head(features))


class Layers(nn.Module):
    """Layers of which training skips some, in groups that may repeat."""

    def __init__(self, skipped=(), repeats=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 2)
        self.skipped = skipped
        self.repeats = repeats

    def run(self, x):
        for index, layer in enumerate(self.layers):
            if layer.training and index in self.skipped:
                continue
            x = layer(x)
        return x

    def forward(self, x):
        if self.repeats:
            x = checkpoint(self.run, x, use_reentrant=False)
        else:
            x = self.run(x)
        return self.head(x)


def test_frozen_layers_are_not_skipped():
    model = Layers(skipped=(0, 1, 2))
    parts = parts_of(model, "layers.1")
    parts.tail.train()
    features = torch.randn(3, 6)
    expected = model.head(model.layers[3](features))
    torch.testing.assert_close(parts.tail(features), expected)


def test_forward_that_does_not_use_the_features_is_refused():
    model = Layers()
    parts = parts_of(model, "layers.1")
    model.layers = nn.ModuleList([*model.layers[:1], *model.layers[2:]])
    model.forward = lambda x: model.head(torch.zeros(3, 6))
    with pytest.raises(FreezeError, match="did not run"):
        parts.tail(torch.randn(3, 6))
    model.forward = lambda x: model.head(x)
    with pytest.raises(FreezeError, match="reads the model's input"):
        parts.tail(torch.randn(3, 6))


def test_checkpointing_across_the_freeze_point_is_refused():
    model = Layers()
    parts = parts_of(model, "layers.1")
    model.repeats = True
    with pytest.raises(FreezeError, match="gradient checkpointing"):
        parts.tail(torch.randn(3, 6))
    with pytest.raises(FreezeError, match="gradient checkpointing"):
        parts_of(model, "layers.1")


def test_compiled_tail_computes_the_same():
    model = Layers()
    parts = parts_of(model, "layers.1")
    compiled = torch.compile(parts.tail, backend="eager")
    for count in (2, 5):
        features = torch.randn(count, 6)
        expected = parts.tail(features)
        torch.testing.assert_close(compiled(features), expected)


class Aux(Layers):
    """A model with an auxiliary result in training mode."""

    def forward(self, x):
        first = self.layers[0](x)
        x = self.layers[2](self.layers[1](first))
        if self.training:
            return self.head(x), self.head(first)
        return self.head(x)


class Automatic(nn.Module):
    def __init__(self, trained):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(trained))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    ("model", "freeze", "message"),
    [
        (Aux(), "layers.1", "reads the result of 'layers.0' by 'linear'"),
        (
            Automatic(("layers.0", "layers.3")),
            "layers.2",
            r"2 trainable parameters .*'layers.0.weight', 'layers.0.bias'\)"
            r"; freeze nothing, or set requires_grad_\(False\)",
        ),
        (
            Automatic(("layers.1", "layers.3")),
            "layers.2",
            "freeze 'layers.0', the last module before it",
        ),
        (Automatic(()), "auto", "nothing to train"),
        (Automatic(("layers.0",)), "auto", "no module of Automatic ends"),
    ],
)
def test_silently_different_trainings_are_refused(model, freeze, message):
    with pytest.raises(FreezeError, match=message) as caught:
        parts_of(model, freeze)
    assert caught.value.code == "cannot_freeze"


def test_layers_in_a_row_are_called_directly():
    model = nn.Sequential(
        nn.Linear(6, 6),
        nn.Sequential(nn.Linear(6, 6), nn.ReLU()),
        nn.Linear(6, 2),
    )
    parts = parts_of(model, "1.0")
    features = torch.randn(3, 6)
    calls = []
    model.forward = lambda x: (
        calls.append(x) or nn.Sequential.forward(model, x)
    )
    expected = model[2](features)
    assert torch.equal(parts.tail(features), expected)
    assert len(calls) == 1  # the user's own forward is not bypassed
    del model.forward
    model.append(nn.Tanh())
    assert torch.equal(parts.tail(features), expected.tanh())


class Masked(nn.Module):
    """A model whose head reads integers of its input again."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, values, mask):
        return self.head(self.body(values) * mask)


def test_integers_that_travel_are_exact_or_refused():
    values = NamedArrays.of(
        values=ArrayTransform(SHAPE), mask=ArrayTransform(SHAPE, "int64")
    )
    model = Masked().eval()
    parts = split(model, "body", transform=values)
    assert parts.sends_integers
    arrays = {
        "values": torch.randn(3, 6),
        "mask": torch.tensor([[0, 1, -5, 300, 70_000, 2**24 - 1]] * 3),
    }
    features = parts.frozen.suffix(0)(values.join(arrays))
    torch.testing.assert_close(parts.tail(features), model(**arrays))
    features[:, 0] = 2**24
    features[:, -1] = 2**24
    with pytest.raises(FreezeError, match="an integer of 16777216"):
        parts.tail(features)


class FailsInTraining(Layers):
    """A model that trains with targets only."""

    def forward(self, x, y=None):
        first = self.layers[0](x)
        x = self.layers[1](first)
        if self.training and y is None:
            raise ValueError("no targets")
        return self.head(x)


class FailsOnFeatures(FailsInTraining):
    """A model whose failure depends on what is not sent."""

    def forward(self, x, y=None):
        first = self.layers[0](x)
        x = self.layers[1](first)
        if self.training and first.isfinite().all():
            raise ValueError("no targets")
        return self.head(x)


def test_model_that_cannot_train_on_samples_must_fail_alike():
    parts_of(FailsInTraining(), "layers.1")
    with pytest.raises(FreezeError, match="by 'isfinite'"):
        parts_of(FailsOnFeatures(), "layers.1")


class Skip(nn.Module):
    """Its body changes in place the tensor that goes around it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.body = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.body(x)) + x.sum()


def test_tensor_that_is_written_to_before_it_is_sent_has_its_last_value():
    model = Skip().eval()
    parts = parts_of(model)
    samples = torch.randn(3, 6)
    with torch.no_grad():
        actual = parts.tail(parts.frozen.suffix(0)(samples))
        torch.testing.assert_close(actual, model(samples))
