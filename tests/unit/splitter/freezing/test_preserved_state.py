"""A model and all random states are as before, whatever ran."""

import copy
import functools
import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from hapi_splitter.freezing.preserved_state import preserved_state


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
