"""A model and all random states are as before, whatever ran."""

import copy
import functools
import itertools
import random
from collections import deque
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.preserved_state import preserved_state
from hapi_splitter.freezing.split_model import split


class Cache:
    def __init__(self):
        self.keys = [torch.ones(2)]


class Stateful(nn.Module):
    """A module that keeps state wherever Python allows it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.teacher = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(3))
        self.cache = Cache()
        self.table = {"seen": [], "last": deque([1], maxlen=3)}
        self.names = {"a"}
        self.count = 0
        count = [0]

        def counted(module, args, extra):
            count[0] += 1
            self.hook_calls = count[0]

        self.calls = count
        self.norm.register_forward_pre_hook(
            functools.partial(counted, extra=1)
        )

    def forward(self, x):
        self.count += 1
        self.temporary = x
        self.cache.keys.append(x)
        self.cache.size = len(x)
        self.table["seen"].append(self.count)
        self.table["last"].append(self.count)
        self.names.add(str(self.count))
        self.steps[1] += 1
        self.steps.data.add_(1)
        with torch.no_grad():
            self.teacher.weight.mul_(0.5)
        self.teacher.bias.data = torch.full((2,), 7.0)
        self.scale = nn.Parameter(torch.ones(1))
        self.extra = nn.Linear(2, 2)
        return (
            self.norm(x) + torch.rand(()) + random.random() + np.random.rand()
        )


def contents(module):
    """Returns everything that the module keeps, as comparable values."""
    return {
        "attributes": {k: set(vars(m)) for k, m in module.named_modules()},
        "tensors": {k: v.tolist() for k, v in module.state_dict().items()},
        "plain": (module.count, copy.deepcopy(module.table), module.names),
        "cache": (len(module.cache.keys), set(vars(module.cache))),
        "hook": (module.calls[0], getattr(module, "hook_calls", None)),
        "modes": [m.training for m in module.modules()],
    }


def seed():
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def draw():
    return torch.rand(1).item(), random.random(), np.random.rand()


@pytest.mark.parametrize("fails", [False, True])
def test_everything_that_a_model_keeps_is_restored(fails):
    model = Stateful()
    model(torch.randn(4, 2))
    before = copy.deepcopy(contents(model))
    seed()
    objects = {k: id(v) for k, v in model.state_dict(keep_vars=True).items()}
    expected = draw()
    seed()

    def change():
        with preserved_state(model):
            model.eval()
            model.train()(torch.randn(4, 2))
            model.names.clear()
            if fails:
                raise KeyError("a failure in the block")

    if fails:
        with pytest.raises(KeyError):
            change()
    else:
        change()
    assert contents(model) == before
    kept = {k: id(v) for k, v in model.state_dict(keep_vars=True).items()}
    assert kept == objects
    assert draw() == expected


class Slots:
    __slots__ = ("extra", "n")

    def __init__(self):
        self.n = 0


class Held(nn.Module):
    """A model of which each forward changes what it holds."""

    calls = 0
    table: ClassVar = {"seen": []}

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.slots = Slots()
        self.generator = torch.Generator().manual_seed(3)
        self.numbers = np.random.default_rng(3)
        self.old_numbers = np.random.RandomState(3)
        self.python = random.Random(3)
        self.array = np.zeros(3)
        self.bytes = bytearray(b"abc")
        self.count = itertools.count()
        self.cycle = itertools.cycle([1, 2, 3])
        self.items = iter([1, 2, 3] * 100)
        self.register_buffer("steps", torch.zeros(()))
        self.view = self.steps.numpy()

    def forward(self, x):
        type(self).calls += 1
        Held.table["seen"].append(1)
        Held.other = 1
        self.slots.n += 1
        self.slots.extra = 1
        self.array += 1
        self.bytes[0] += 1
        self.view += 1
        drawn = (
            torch.randn(1, generator=self.generator)
            + self.numbers.normal()
            + self.old_numbers.normal()
            + self.python.random()
        )
        taken = next(self.count) + next(self.cycle) + next(self.items)
        return self.head(self.body(x)) + drawn + taken

    def held(self):
        return [
            (self.slots.n, hasattr(self.slots, "extra"), Held.calls),
            (Held.table, hasattr(Held, "other"), self.bytes),
            self.generator.get_state().tolist(),
            str(self.numbers.bit_generator.state),
            str(self.old_numbers.get_state()),
            self.python.getstate(),
            (self.array.tolist(), self.steps.item()),
            [next(copy.deepcopy(each)) for each in (self.count, self.cycle)],
            len([*copy.deepcopy(self.items)]),
        ]


@pytest.mark.parametrize("freeze", ["body", "head", "typo"])
def test_split_leaves_what_a_model_holds(freeze):
    model = Held()
    iterators = model.count, model.cycle, model.items
    before = copy.deepcopy(model.held()[:-2]), model.held()[-2:]
    try:
        split(model, freeze, sample_shape=(4,), cache_directory="")
    except FreezeError:
        assert freeze != "body"
    else:
        assert freeze != "typo"
    after = model.held()
    assert (after[:-2], after[-2:]) == before
    assert (model.count, model.cycle, model.items) == iterators


def test_generator_that_a_forward_reads_is_refused_and_not_advanced():
    class Reading(Held):
        def __init__(self):
            super().__init__()
            self.stream = (n for n in range(1000))

        def forward(self, x):
            return super().forward(x) * next(self.stream)

    model = Reading()
    with pytest.raises(FreezeError, match="generator 'stream' of the model"):
        split(model, "body", sample_shape=(4,), cache_directory="")
    assert next(model.stream) == 0


class Merging(nn.Linear):
    """Merges a second weight into its own in eval mode, as loralib does."""

    def __init__(self):
        super().__init__(8, 8)
        self.down = nn.Parameter(torch.randn(2, 8))
        self.up = nn.Parameter(torch.randn(8, 2))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            sign = -1 if mode else 1
            self.weight.data += sign * (self.up @ self.down)
            self.merged = not mode
        return self

    def forward(self, x):
        result = nn.functional.linear(x, self.weight, self.bias)
        if not self.merged:
            result = result + x @ self.down.T @ self.up.T
        return result


class WithMerging(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mid = nn.Linear(4, 8), Merging()
        self.last, self.head = Merging(), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.relu(self.last(torch.relu(self.mid(x)))))


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("freeze", ["body", "mid", "nothing"])
def test_weights_that_are_merged_in_eval_mode_are_left(freeze, times, mode):
    model = WithMerging()
    model.forward = lambda x: WithMerging.forward(model, model.body(x))
    model.train(mode)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(times):
        try:
            parts = split(model, freeze, sample_shape=(4,), cache_directory="")
        except FreezeError:
            assert freeze == "nothing"
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert model.mid.merged == (not mode)
    if freeze == "nothing":
        return
    plain = copy.deepcopy(model)
    samples = torch.randn(3, 4)
    features = parts.frozen.suffix(0)(samples).clone()
    for training in (True, False, True):
        parts.tail.train(training)
        plain.train(training)
        plain.get_submodule(freeze).eval()
        actual = parts.tail(features)
        torch.testing.assert_close(actual, plain(samples))
