"""A split model trains as the whole one does, or is refused, in that step.

Each row is code of users for which an earlier design trained something else
without a word.
"""

import copy
import functools
import random
import subprocess
import sys
import threading
import warnings
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.model_checks import SplitWarning
from hapi_splitter.freezing.split_model import split

SIZES = (4, 6, 5, 4, 8)
KEPT = {}


class Net(nn.Module):
    """Frozen layers, a mean, and two layers to train."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.body = nn.Sequential(
            nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()
        )
        self.mid, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.epoch = 0

    def forward(self, x):
        early = self.stem(self.before(x))
        f = self.pooled(self.between(self.body(early)))
        return self.after(self.tail(f), early)

    def before(self, x):
        return x

    def between(self, x):
        return x

    def pooled(self, x):
        return x.mean((2, 3))

    def tail(self, f):
        return self.head(torch.relu(self.mid(f)))

    def after(self, out, early):
        return out

    @property
    def is_late(self):
        return self.training and self.epoch >= 2


def net(**functions):
    """Returns a builder of a model with other functions."""

    def build():
        torch.manual_seed(0)
        return type("Changed", (Net,), functions)()

    return build


def losses(model, forward, inputs):
    """Trains with the frozen layers in eval mode; an error ends it."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    trained = [*model.mid.parameters(), *model.head.parameters()]
    optimizer = torch.optim.SGD(trained, 0.05)
    found = []
    for model.epoch, x in enumerate(inputs):
        model.train()
        model.stem.eval()
        model.body.eval()
        try:
            loss = forward(x.clone()).pow(2).mean()
        except Exception as error:  # also of the plain model
            return found, error
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, None


def parts_of(model, freeze="body"):
    return split(model, freeze, sample_shape=(3, 16, 16), cache_directory="")


def check_training(build, refused_in_step=None, message=""):
    model, plain = build(), build()
    parts = parts_of(model)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, 3, 16, 16, generator=generator) for n in SIZES]
    features = [parts.frozen.suffix(0)(x).clone().detach() for x in inputs]
    expected, _ = losses(plain, plain, inputs)
    actual, error = losses(model, parts.tail, features)
    assert actual
    assert actual == pytest.approx(expected[: len(actual)], rel=1e-4)
    if refused_in_step is None:
        assert error is None
        return
    assert len(actual) == refused_in_step
    assert isinstance(error, FreezeError)
    assert message in error.message
    assert "test_no_silent_difference.py, line" in error.message


def half(self, x):
    return x + 0.1 * torch.randn_like(x) if self.is_late else x


def mixed(self, x):
    order = torch.randperm(x.shape[0])
    return 0.7 * x + 0.3 * x[order] if self.training else x


def coin(self, x):
    return x.flip(1) if self.training and random.random() < 0.5 else x


def pooled_then(function):
    return net(pooled=lambda self, x: function(self, x.mean((2, 3))))


def other_noise(self, x):
    noise = torch.randn(8) if self.training else torch.zeros(8)
    return x + noise


def scaled(self, x):
    return x * (random.random() if self.training else 1.0)


def offset(self, x):
    return x + (random.random() if self.training else 1.0)


@pytest.mark.parametrize(
    "function", [half, mixed, coin, other_noise, scaled, offset]
)
def test_training_code_after_a_movable_operation_runs(function):
    check_training(pooled_then(function))


TRAINING_CODE = [
    (mixed, "mul"),
    (coin, "flip"),
    (lambda self, x: x * (2.0 if self.training else 1.0), "mul"),
    (lambda self, x: x + torch.full((1,), float(self.training)), "add"),
    (lambda self, x: nn.functional.dropout(x, 0.2, self.training), "dropout"),
    (lambda self, x: x[:, :, 1:] if self.training else x[:, :, 2:], "getitem"),
]


@pytest.mark.parametrize(("function", "_"), TRAINING_CODE)
def test_training_code_before_a_movable_operation_runs(function, _):
    check_training(net(between=function))


@pytest.mark.parametrize(("function", "operation"), TRAINING_CODE)
def test_training_code_before_the_frozen_layers_is_refused(
    function, operation
):
    with pytest.raises(FreezeError, match=operation) as caught:
        parts_of(net(before=function)())
    assert "test_no_silent_difference.py, line" in caught.value.message


@pytest.mark.parametrize(
    ("where", "source"),
    [("before", "the model's input"), ("between", "the result of 'body'")],
)
def test_code_that_is_switched_on_later_is_refused_then(where, source):
    check_training(net(**{where: half}), 2, f"reads {source}")


def test_dropout_without_effect_is_no_difference():
    check_training(
        net(
            before=lambda self, x: nn.functional.dropout(x, 0.0, self.training)
        )
    )


def test_frozen_module_that_gets_another_tensor_is_refused():
    def forward(self, x):
        a, b = self.stem(x), self.stem(x.flip(-1))
        chosen = b if self.is_late else a
        return self.tail(self.body(chosen).mean((2, 3)))

    check_training(net(forward=forward), 2, "frozen module 'body'")


@pytest.mark.parametrize("is_late", [False, True])
def test_functions_as_arguments_of_frozen_modules_are_compared(is_late):
    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv2d(8, 8, 3, 2, 1)

        def forward(self, x, function):
            return function(self.inner(x))

    def chosen(self):
        # Equal code each time, with code of another function inside.
        if self.is_late and is_late:
            return lambda x: (lambda y: y * 2)(x)
        return lambda x: (lambda y: y * 1)(x)

    def forward(self, x):
        f = self.body(self.stem(x), chosen(self))
        return self.tail(f.mean((2, 3)))

    def build():
        model = net(forward=forward)()
        torch.manual_seed(0)
        model.body = Body()
        return model

    check_training(build, 2 if is_late else None, "frozen module 'body'")


def test_code_of_arguments_is_the_same_in_other_processes():
    code = (
        "from hapi_splitter.freezing.stand_ins import comparable\n"
        "pad = [object() for _ in range({})]\n"
        "print(comparable(lambda x: (lambda y: y)(x)).text)"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code.format(number)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for number in (1, 99_999)
    }
    assert len(texts) == 1


def test_frozen_module_that_runs_again_is_refused():
    def after(self, out, early):
        return out + self.body(early).mean() if self.is_late else out

    check_training(net(after=after), 2, "frozen module 'body'")


def more(function):
    def after(self, out, early):
        return function(self, out, early) if self.is_late else out

    return net(after=after)


LATE = {
    "sum": lambda self, out, early: out + early.sum(),
    "comparison": lambda self, out, early: out * (early.mean() > 0),
    "equality": lambda self, out, early: out * (early == 0).any(),
    "index": lambda self, out, early: out + early[:, 0, 0, :1],
    "as an index": lambda self, out, early: out[
        early.mean((1, 2, 3)).argmax()
    ],
    "integers": lambda self, out, early: out * early.argmax(1).sum(),
    "item": lambda self, out, early: out * early.max().item(),
    "item of itself": lambda self, out, early: out * early.item(),
    "branch": lambda self, out, early: -out if early.sum() else out,
    "truth": lambda self, out, early: -out if early else out,
    "numpy": lambda self, out, early: out * float(early.numpy().mean()),
    "array": lambda self, out, early: out * float(np.asarray(early).mean()),
    "list": lambda self, out, early: out * early.tolist()[0][0][0][0],
    "iteration": lambda self, out, early: out + next(iter(early)).sum(),
    "print": lambda self, out, early: print(early) or out,
    "text": lambda self, out, early: out * len(f"{early}"),
    "copy": lambda self, out, early: out + torch.tensor(early).sum(),
    "pointer": lambda self, out, early: out * early.data_ptr(),
    "written": lambda self, out, early: (
        out + torch.zeros_like(early).copy_(early).sum()
    ),
    "assigned": lambda self, out, early: assigned(out, early),
    "vmap": lambda self, out, early: (
        out + torch.vmap(torch.sum)(early)[:, None]
    ),
    "jit": lambda self, out, early: (
        out + torch.jit.script(torch.nn.functional.relu)(early).sum()
    ),
    "gradient": lambda self, out, early: (
        out + torch.autograd.grad(out.sum(), early, allow_unused=True)[0]
    ),
    "a caught error": lambda self, out, early: caught(out, early),
}


def assigned(out, early):
    table = torch.zeros(2)
    table[0] = early[0, 0, 0, 0]
    return out + table.sum()


def caught(out, early):
    try:
        return out + early.sum()
    except Exception:
        return out


@pytest.mark.parametrize("name", LATE)
@pytest.mark.filterwarnings("ignore")
def test_frozen_result_that_is_read_later_is_refused_then(name):
    check_training(more(LATE[name]), 2, "the result of 'stem'")


def test_shapes_of_frozen_results_can_be_read():
    check_training(
        net(after=lambda self, out, early: out * early.shape[0] / len(early))
    )


NUMBERS = {
    "half": lambda n: n // 2,
    "limited": lambda n: min(n, 3),
    "remainder": lambda n: n % 2 + 1,
    "square": lambda n: n * n,
    "all": lambda n: n,
    "constant": lambda n: 3,
    "none": lambda n: None,
    "a fraction": lambda n: n / 4,
    "a flag": lambda n: n == 6,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_frozen_modules_return(name):
    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv2d(8, 8, 3, 2, 1)

        def forward(self, x):
            return self.inner(x), NUMBERS[name](x.shape[0])

    class Numbered(Net):
        def __init__(self):
            super().__init__()
            self.body = Body()

        def forward(self, x):
            f, number = self.body(self.stem(x))
            out = self.tail(f.mean((2, 3)))
            if number is None:
                return out
            return out[: max(1, int(number))] * float(number)

    def build():
        torch.manual_seed(0)
        return Numbered()

    check_training(build)


def test_result_whose_length_is_half_of_the_batch_is_refused():
    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv2d(8, 8, 3, 2, 1)

        def forward(self, x):
            x = self.inner(x)
            return x, x[: x.shape[0] // 2]

    class Halved(Net):
        def __init__(self):
            super().__init__()
            self.body = Body()

        def forward(self, x):
            f, half = self.body(self.stem(x))
            return self.tail(f.mean((2, 3))) * half.shape[0]

    with pytest.raises(FreezeError, match="the number of samples in a batch"):
        parts_of(Halved())


def optimised(model):
    model.eval()(torch.randn(4, 3, 16, 16)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()


WRITES = {
    "checkpoint": lambda model: model.load_state_dict(
        {
            k: v + 1 if v.is_floating_point() else v
            for k, v in model.state_dict().items()
        }
    ),
    "assigned checkpoint": lambda model: model.load_state_dict(
        {k: v * 2 for k, v in model.state_dict().items()}, assign=True
    ),
    "in place": lambda model: nn.init.zeros_(model.stem.weight),
    "data": lambda model: setattr(
        model.stem.weight, "data", torch.zeros_like(model.stem.weight)
    ),
    "parameter": lambda model: setattr(
        model.stem, "weight", nn.Parameter(model.stem.weight * 2)
    ),
    "statistics": lambda model: model.train()(torch.randn(4, 3, 16, 16)),
    "buffer": lambda model: model.body[0].running_mean.add_(1),
    "optimizer": optimised,
}


@pytest.mark.parametrize("name", WRITES)
def test_weights_that_change_after_the_split_are_named(name):
    model = net()()
    tail = parts_of(model).tail
    tail(torch.randn(4, 8))
    WRITES[name](model)
    with pytest.raises(FreezeError, match=r"'(stem|body)\..*after the split"):
        tail(torch.randn(4, 8))


def test_layers_that_are_unfrozen_after_the_split_are_named():
    model = net()()
    model.stem.requires_grad_(False)
    model.body.requires_grad_(False)
    tail = parts_of(model).tail
    model.body[2].requires_grad_(True)
    with pytest.raises(
        FreezeError, match=r"'body\.2\..*would not be trained; split the"
    ):
        tail(torch.randn(4, 8))


def test_weights_may_move_and_the_tail_may_load_its_own():
    model = net()().eval()
    parts = parts_of(model)
    features = torch.randn(4, 8)
    expected = parts.tail(features)
    model.to(memory_format=torch.channels_last)
    model.stem.weight.data = model.stem.weight.data.clone()
    parts.tail.load_state_dict(parts.tail.state_dict())
    torch.testing.assert_close(parts.tail(features), expected)


SCALES = {"body": 1.0}
OFFSET = 0.0


def with_closure():
    inside = 1.0

    def closed(factors=[]):  # noqa: B006 (a mistake of users)
        return inside * sum((1.0, *factors))

    def change():
        nonlocal inside
        inside = 2.0

    return closed, change


closed, change_closed = with_closure()


class Options:
    factor = 1.0


@dataclass(slots=True)
class Slotted:
    factor: float = 1.0


class Scaled(nn.Module):
    """Reads all kinds of attributes and variables."""

    common = 1.0

    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(8, 8, 3, 2, 1)
        self.norm = nn.BatchNorm2d(8)
        self.number, self.factors = 1.0, [1.0, {"x": 1.0}]
        self.options = SimpleNamespace(power=1)
        self.table, self.array = torch.ones(8, 1, 1), np.ones(1)
        self.held, self.slotted = Options, Slotted()
        self.partial = functools.partial(dict, factor=1.0)
        self.register_buffer("missing", None)
        self.function, self.layers = (
            torch.relu,
            nn.Sequential(nn.Identity(), nn.Flatten(1, 1)),
        )

    def forward(self, x):
        x = self.norm(self.inner(x * self.table)) * self.number * self.common
        x = x * self.factors[0] * self.factors[1]["x"] ** self.options.power
        x = x * float(self.array[0]) * closed()
        x = x * SCALES["body"] + OFFSET + getattr(self, "extra", 0.0)
        x = x * self.held.factor * self.slotted.factor
        x = self.scaled(x * self.partial()["factor"])
        return self.layers(self.function(x))

    def scaled(self, x):
        return x if self.missing is None else x * self.missing


class Rescaled(Scaled):
    def scaled(self, x):
        return 2 * x


def build_scaled(**functions):
    def build():
        model = net(**functions)()
        model.body = Scaled()
        return model.eval()

    return build


FUNCTIONS = Scaled.forward, Scaled.scaled
ATTRIBUTES = {
    "number": lambda body: setattr(body, "number", 2.0),
    "class": lambda body: setattr(type(body), "common", 2.0),
    "shadowed": lambda body: setattr(body, "common", 2.0),
    "added": lambda body: setattr(body, "extra", 2.0),
    "deleted": lambda body: delattr(body, "number"),
    "list": lambda body: body.factors.__setitem__(0, 2.0),
    "longer list": lambda body: body.factors.append(2.0),
    "dict": lambda body: body.factors[1].update(x=2.0),
    "object": lambda body: setattr(body.options, "power", 2),
    "table": lambda body: body.table.mul_(2),
    "other table": lambda body: setattr(body, "table", body.table * 2),
    "function": lambda body: setattr(body, "function", torch.sigmoid),
    "epsilon": lambda body: setattr(body.norm, "eps", 1.0),
    "layer": lambda body: setattr(body, "inner", nn.Conv2d(8, 8, 1, 4)),
    "forward": lambda body: setattr(body, "forward", body.inner.forward),
    "inner forward": lambda body: setattr(
        body.inner, "forward", body.norm.forward
    ),
    "forward of the class": lambda body: setattr(
        type(body), "forward", lambda self, x: x
    ),
    "method": lambda body: setattr(type(body), "scaled", lambda self, x: x),
    "type": lambda body: setattr(body, "__class__", Rescaled),
    "held class": lambda body: setattr(Options, "factor", 2.0),
    "slots": lambda body: setattr(body.slotted, "factor", 2.0),
    "default": lambda body: closed.__defaults__[0].append(1.0),
    "partial": lambda body: body.partial.keywords.update(factor=2.0),
    "missing buffer": lambda body: setattr(body, "missing", torch.ones(1)),
    "order": lambda body: body.layers._modules.update(
        {"0": body.layers._modules.pop("0")}
    ),
    "item": lambda body: body.factors[1].update(y=2.0),
    "more layers": lambda body: body.layers.append(nn.ReLU()),
    "container": lambda body: SCALES.update(body=2.0),
    "array": lambda body: body.array.fill(2),
    "closure": lambda body: change_closed(),
    "variable": lambda body: globals().update(OFFSET=2.0),
}


@pytest.fixture(autouse=True)
def unchanged_variables():
    yield
    SCALES["body"], Scaled.common, Options.factor = 1.0, 1.0, 1.0
    Scaled.forward, Scaled.scaled = FUNCTIONS
    closed.__defaults__[0].clear()
    globals()["OFFSET"] = 0.0
    closed.__closure__[0].cell_contents = 1.0


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_that_change_after_the_split_are_named(name):
    model = build_scaled()()
    tail = parts_of(model).tail
    features = torch.randn(4, 8)
    tail(features)
    ATTRIBUTES[name](model.body)
    with pytest.raises(FreezeError, match="split the model again"):
        tail(features)


def test_attribute_for_the_time_of_a_frozen_call_is_named():
    def between(self, x):
        self.body.number = 1.0
        return x

    def before(self, x):
        self.body.number = 2.0 if self.is_late else 1.0
        return x

    model = build_scaled(before=before, between=between)()
    tail = parts_of(model).tail.train()
    tail(torch.randn(4, 8))
    model.epoch = 2
    with pytest.raises(FreezeError, match=r"'body\.number'.* from 1.0 to 2.0"):
        tail(torch.randn(4, 8))


def test_attributes_that_every_forward_sets_are_no_change():
    def before(self, x):
        self.body.number, self.body.note = 2.0, "seen"
        return x

    model = build_scaled(before=before)()
    tail = parts_of(model).tail.train()
    for _ in range(3):
        tail(torch.randn(4, 8))
    model.body.note = "nothing reads it"
    tail(torch.randn(4, 8))


def test_hooks_that_are_added_after_the_split_are_warned_of():
    model = net()()
    tail = parts_of(model).tail
    model.body.register_forward_hook(keep_clone)
    with pytest.warns(SplitWarning, match="'body' has hooks that were added"):
        tail(torch.randn(4, 8))


@pytest.mark.parametrize("reads", ["training", "gradients"])
def test_frozen_module_that_reads_what_the_tail_changes_is_refused(reads):
    model = net()()
    owner = [model]

    class Body(nn.Module):
        def forward(self, x):
            is_on = (
                owner[0].training
                if reads == "training"
                else torch.is_grad_enabled()
            )
            return x * 2 if is_on else x

    model.body = Body()
    with pytest.raises(FreezeError, match="reads another module's 'training'"):
        parts_of(model)


NOTES = {
    "an attribute": lambda body: setattr(body, "epoch", 3),
    "a new one": lambda body: setattr(body, "name", "body"),
    "dropout": lambda body: setattr(body.dropout, "p", 0.5),
    "momentum": lambda body: setattr(body.norm, "momentum", 0.5),
    "the same code": lambda body: setattr(
        Scaled, "scaled", eval_copy(Scaled.scaled)
    ),
    "a cache": lambda body: body(torch.zeros(1, 8, 4, 4)),
    "a cleared cache": lambda body: setattr(body, "cache", {}),
    "checkpointing": lambda body: setattr(
        body, "gradient_checkpointing", True
    ),
}


def eval_copy(function):
    return FunctionType(function.__code__, function.__globals__)


@pytest.mark.parametrize("name", NOTES)
def test_what_has_no_effect_may_change(name):
    class Noted(Scaled):
        def __init__(self):
            super().__init__()
            self.epoch, self.cache, self.dropout = 0, {}, nn.Dropout(0.1)

        def forward(self, x):
            self.cache[len(x.shape), x.shape[-1]] = "seen"
            return self.dropout(super().forward(x))

    model = net()()
    model.body = Noted()
    tail = parts_of(model.eval()).tail
    features = torch.randn(4, 8)
    tail(features)
    NOTES[name](model.body)
    tail(features)


def test_frozen_module_that_counts_its_calls_is_refused():
    class Warm(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = 0.0

        def forward(self, x):
            self.factor = min(1.0, self.factor + 0.1)
            return x * self.factor

    model = net()()
    model.body = Warm()
    with pytest.raises(FreezeError, match="in their second call"):
        parts_of(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.insert(1, nn.Tanh()),
        lambda model: model.pop(2),
        lambda model: model.__setitem__(0, nn.Flatten(1, -1)),
    ],
)
def test_layers_of_a_sequence_that_change_are_named(change):
    layers = [nn.Flatten(), *(nn.Linear(n, 8) for n in (12, 8, 8))]
    model = nn.Sequential(*layers)
    tail = split(model, "2", sample_shape=(3, 2, 2), cache_directory="").tail
    tail(torch.zeros(2, 8))
    change(model)
    with pytest.raises(FreezeError, match="layers before the freeze point"):
        tail(torch.zeros(2, 8))


@pytest.mark.parametrize("is_late", [False, True])
def test_features_that_the_model_writes_to_can_be_given_again(is_late):
    def tail(self, f):
        if self.is_late or not is_late:
            f += 1.0
        return self.head(torch.relu(self.mid(f)))

    model = net(tail=tail)()
    parts = parts_of(model)
    features = torch.randn(4, 8)
    first = parts.tail.train()(features)
    torch.testing.assert_close(parts.tail(features), first)
    if is_late:
        model.epoch = 2
        parts.tail(features)
        with pytest.raises(ValueError, match="compute them again"):
            parts.tail(features)
        again = torch.randn(4, 8)
        torch.testing.assert_close(parts.tail(again), parts.tail(again))


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (None, TypeError, "not a NoneType"),
        (np.zeros((4, 8), np.float32), TypeError, "not a ndarray"),
        (torch.zeros(4, 3, 16, 16), ValueError, r"\['B', 8\], not \[4, 3, 16"),
    ],
)
def test_other_things_than_features_are_refused(given, kind, message):
    with pytest.raises(kind, match=message):
        parts_of(net()()).tail(given)


def keep_clone(module, args, out):
    KEPT["early"] = out.detach().clone()


def keep_result(module, args, out):
    KEPT["early"] = out


def keep_argument(module, args):
    KEPT["early"] = args[0] * 2


def keep_in_list(module, args, out):
    KEPT.setdefault("list", []).append(out.pow(2).mean())


@pytest.mark.parametrize(
    ("path", "kind", "hook"),
    [
        ("body.2", "forward_hook", keep_clone),
        ("body", "forward_hook", keep_result),
        ("body.0", "forward_pre_hook", keep_argument),
        ("stem", "forward_hook", keep_in_list),
    ],
)
def test_hook_on_a_frozen_layer_that_keeps_a_tensor_is_refused(
    path, kind, hook
):
    model = net()()
    getattr(model.get_submodule(path), f"register_{kind}")(hook)
    with pytest.raises(FreezeError, match=r"is kept after the forward, by"):
        parts_of(model)
    KEPT.clear()


def test_frozen_layer_that_keeps_a_tensor_is_refused():
    class Keeping(nn.Conv2d):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last * 2

    model = net()()
    model.stem = Keeping(3, 8, 3, 2, 1)
    with pytest.raises(FreezeError, match="'stem' computes is kept"):
        parts_of(model)


def test_tensor_that_the_models_own_code_keeps_is_that_of_the_step():
    def tail(self, f):
        self.last = f
        return Net.tail(self, f)

    model = net(tail=tail)()
    tail = parts_of(model).tail
    features = torch.randn(4, 8)
    tail(features)
    assert model.last is features


def test_threads_that_call_the_model_meanwhile_get_the_model():
    started, go_on = threading.Event(), threading.Event()

    def tail(self, f):
        if threading.current_thread() is not threading.main_thread():
            started.set()
            go_on.wait(60)
        return Net.tail(self, f)

    model = net(tail=tail)().eval()
    calls = []
    model.stem.register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(SplitWarning, match="hooks of the frozen module 'stem'"):
        parts = parts_of(model)
    calls.clear()
    x = torch.randn(2, 3, 16, 16)
    features = parts.frozen.suffix(0)(x)
    expected = model(x)
    thread = threading.Thread(target=parts.tail, args=(features,))
    thread.start()
    assert started.wait(300)
    assert torch.equal(model(x), expected)  # while the tail runs
    other = copy.deepcopy(model)
    go_on.set()
    thread.join()
    assert torch.equal(model(x), expected)
    assert torch.equal(other(x), expected)
    assert len(calls) == 4


@pytest.mark.parametrize("as_two_modules", [False, True])
def test_autocast_around_the_split_is_that_of_the_frozen_layers(
    as_two_modules,
):
    model = net()()
    frozen = nn.Sequential(model.stem, model.body).eval()
    samples = torch.randn(4, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = frozen(samples)
        if as_two_modules:
            parts = split(
                (frozen, nn.Flatten()),
                sample_shape=(3, 16, 16),
                cache_directory="",
            )
        else:
            parts = parts_of(model)
            expected = expected.mean((2, 3))
    features = parts.frozen.suffix(0)(samples)
    assert features.dtype == torch.bfloat16
    torch.testing.assert_close(features, expected)


def test_autocast_of_the_loop_alone_is_warned_of_once():
    tail = parts_of(net()()).tail
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(SplitWarning, match="precision=.bfloat16."):
            tail(torch.randn(4, 8))
        tail(torch.randn(4, 8))


class Jitter(nn.Module):
    """Moves its input at random in training, as positions are augmented."""

    def __init__(self, draw):
        super().__init__()
        self.conv, self.draw = nn.Conv2d(3, 8, 3, 2, 1), draw

    def forward(self, x):
        return self.draw(self.conv(x)) if self.training else self.conv(x)


@pytest.mark.parametrize(
    ("draw", "is_told"),
    [
        (lambda x: x + torch.randn(8, 1, 1), True),
        (lambda x: x * torch.empty(1).uniform_(0.5, 2), True),
        (lambda x: x[torch.randperm(x.shape[0])], True),
        (lambda x: nn.functional.dropout(x, 0.5), False),
        (lambda x: x if torch.rand([]) < 0.5 else x * 1, False),
    ],
)
def test_augmentation_inside_frozen_layers_is_told(draw, is_told, tmp_path):
    for _ in range(2):  # also if the split is cached
        model = net()()
        model.stem = Jitter(draw)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            split(
                model,
                "body",
                sample_shape=(3, 16, 16),
                cache_directory=tmp_path,
            )
        told = [
            str(each.message)
            for each in caught
            if each.category is SplitWarning
        ]
        assert len(told) == is_told
        assert all("'stem' changes what it computes" in each for each in told)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointing_that_begins_at_the_features_trains(is_reentrant):
    def tail(self, f):
        return checkpoint(
            lambda x: Net.tail(self, x), f, use_reentrant=is_reentrant
        )

    if is_reentrant:
        with pytest.raises(FreezeError, match="use use_reentrant=False"):
            parts_of(net(tail=tail)())
    else:
        check_training(net(tail=tail))
