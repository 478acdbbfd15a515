"""The forms of ``freeze``, two modules, and refused freeze points."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.split_model import (
    default_freeze,
    split,
)
from reference_models import BranchedNet

SHAPE = (3, 16, 16)


class TokenNet(nn.Module):
    """A model with parameters of its own and blocks in a list."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 8, stride=8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        token = self.token.expand(x.shape[0], -1, -1)
        x = torch.cat([token, x], 1) + self.position
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x[:, 0])


class Residual(nn.Module):
    """A model that reads a layer's input again after the layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.after = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.after(self.body(x) * x)


class TiedWeights(nn.Module):
    """A model of two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.middle(self.layer(x)))


def assert_equivalent(model, parts):
    samples = torch.randn(3, *parts.frozen.input_shape)
    with torch.inference_mode():
        features = parts.frozen.suffix(0)(samples)
        torch.testing.assert_close(parts.tail(features), model(samples))


def trained(parts):
    return {name for name, _ in parts.tail.named_parameters()}


@pytest.mark.parametrize(
    "freeze",
    [
        "blocks.1",
        ["embed", "token", "position", "blocks.0", "blocks.1"],
        lambda name, module: name not in ("blocks.2", "head", "unused"),
    ],
    ids=["name", "list", "function"],
)
def test_equivalent_forms_of_freeze_give_the_same_split(
    freeze,
):
    model = TokenNet().eval()
    parts = split(model, freeze, sample_shape=SHAPE)
    assert parts.frozen.cuts[-1].shape == (5, 8)
    assert trained(parts) == {
        "blocks.2.weight",
        "blocks.2.bias",
        "head.weight",
        "head.bias",
    }
    assert_equivalent(model, parts)


def test_function_is_called_once_per_module_with_parameters():
    model = TokenNet().eval()
    calls: list[tuple[str, nn.Module]] = []

    def freeze(name, module):
        calls.append((name, module))
        return not name.startswith("head")

    parts = split(model, freeze, sample_shape=SHAPE)
    assert [name for name, _ in calls] == [
        "",
        "embed",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "unused",
        "head",
    ]
    assert all(model.get_submodule(n) is module for n, module in calls)
    assert parts.freeze == "token, position, embed, blocks and 1 more"
    assert trained(parts) == {"head.weight", "head.bias"}
    assert_equivalent(model, parts)


def test_module_list_ends_with_its_last_module():
    model = TokenNet().eval()
    parts = split(model, "blocks", sample_shape=SHAPE)
    assert trained(parts) == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("model", "freeze", "code", "message"),
    [
        (
            TokenNet(),
            ["embed", "blocks.0"],
            "cannot_freeze",
            r"'blocks.0' is frozen, but .* run before its end: 'token', "
            r"'position'; add them to the list",
        ),
        (
            TokenNet(),
            ["embed", "token", "position", "blocks.1"],
            "cannot_freeze",
            r"'blocks.1' is frozen, but .* end: 'blocks.0'; add",
        ),
        (
            BranchedNet(),
            ["stem", "mix"],
            "cannot_freeze",
            r"'mix' is frozen, but .* end: 'left', 'right'; add",
        ),
        (
            TokenNet(),
            lambda name, module: name in ("", "blocks.0"),
            "cannot_freeze",
            r"'token' is frozen, but .* end: 'embed'; freeze them too",
        ),
        (
            TokenNet(),
            lambda name, module: name in ("embed", "", "blocks.0", "head"),
            "cannot_freeze",
            r"'head' is frozen, but .* end: 'blocks.1', 'blocks.2'; freeze",
        ),
        (
            TokenNet(),
            lambda name, module: False,
            "cannot_freeze",
            "is true for none of the 7 modules of TokenNet",
        ),
        (TokenNet(), ["embed", "blokcs.0"], "unknown_freeze", "blocks.0"),
        (TokenNet(), ["unused"], "unknown_freeze", "'unused'.* never called"),
        (TokenNet(), [], "unknown_freeze", "at least one name"),
        (TokenNet(), ["embed", 3], "unknown_freeze", "at least one name"),
        (TokenNet(), nn.Linear(1, 1), "unknown_freeze", "a module's name"),
        (TokenNet(), 7, "unknown_freeze", "freeze 7: it must be"),
        (TokenNet(), None, "unknown_freeze", r"default_freeze\(model\)"),
        (
            BranchedNet(),
            ["stem.weight"],
            "unknown_freeze",
            "belongs to 'stem'; name 'stem'",
        ),
    ],
)  # fmt: skip
def test_invalid_freeze_is_refused_with_a_reason(model, freeze, code, message):
    with pytest.raises(FreezeError, match=message) as caught:
        split(model, freeze, sample_shape=SHAPE)
    assert caught.value.code == code


class UnscaledNorms(nn.Module):
    """A model with running statistics in a module without parameters."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, affine=False)
        self.body = nn.Conv2d(4, 4, 3)
        self.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))

    def forward(self, x):
        return self.head(self.body(self.norm(self.stem(x))))


def test_list_must_name_running_statistics():
    model = UnscaledNorms()
    model(torch.zeros(2, *SHAPE))
    with pytest.raises(FreezeError, match="run before its end: 'norm'"):
        split(model, ["stem", "body"], sample_shape=SHAPE)
    for freeze in (["stem", "norm", "body"], "body"):
        split(model, freeze, sample_shape=SHAPE)
    split(model, lambda name, _: name in ("stem", "body"), sample_shape=SHAPE)


def test_lazy_modules_are_refused_and_not_initialised():
    model = UnscaledNorms()
    with pytest.raises(FreezeError, match="no shape yet"):
        split(model, "body", sample_shape=SHAPE)
    with pytest.raises(FreezeError, match="no shape yet"):
        split((nn.Conv2d(3, 4, 3), model.head), sample_shape=SHAPE)
    with pytest.raises(FreezeError, match="no shape yet"):
        default_freeze(model, sample_shape=SHAPE)
    assert is_lazy(model.head[1].weight)


@pytest.mark.parametrize(
    ("model", "freeze", "message"),
    [
        (
            Residual(),
            "body.0",
            r"2 tensors are needed after it \(stem \[4, 16, 16\], body_0 "
            r"\[4, 16, 16\]\).*: 'stem' before it, 'after' after it",
        ),
        (BranchedNet(), "left", r"2 .* 'stem' before it, 'mix' after it"),
        (TiedWeights(), "first", r"'first\.weight' is used before and after"),
        (TiedWeights(), ["first"], r"'first\.weight' is used before and"),
        (CalledTwice(), "middle", r"'layer\.weight' is used before and after"),
    ],
)
def test_refusal_names_tensors_neighbours_or_shared_parameters(
    model, freeze, message
):
    is_image = isinstance(model, Residual | BranchedNet)
    with pytest.raises(FreezeError, match=message):
        split(model, freeze, sample_shape=SHAPE if is_image else (4,))


def test_compiled_model_is_split_like_its_original():
    model = TokenNet().eval()
    compiled = torch.compile(model)
    for freeze in ("blocks.1", "_orig_mod.blocks.1"):
        parts = split(compiled, freeze, sample_shape=SHAPE)
        assert parts.tail.get_submodule("head") is model.head
        assert_equivalent(model, parts)
    assert default_freeze(compiled, sample_shape=SHAPE) == "blocks"


def test_compiled_submodule_is_split_like_its_original():
    model = Residual().eval()
    expected = split(model, "after", sample_shape=SHAPE).frozen
    model.body = torch.compile(model.body)  # type: ignore[assignment]
    parts = split(model, "after", sample_shape=SHAPE)
    assert parts.frozen.program == expected.program


def test_residual_sum_is_frozen_with_its_block():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.body = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            x = self.stem(x)
            return self.head(x + self.body(x))

    model = Block().eval()
    parts = split(model, "body", sample_shape=(4,))
    assert parts.last == "add"
    assert_equivalent(model, parts)


@pytest.mark.parametrize(
    "wrapper",
    [nn.DataParallel, nn.parallel.DistributedDataParallel],
    ids=lambda wrapper: wrapper.__name__,
)
def test_model_wrapped_for_several_devices_is_refused(
    wrapper,
):
    wrapped = wrapper.__new__(wrapper)  # no devices, no process group
    nn.Module.__init__(wrapped)
    wrapped.module = TokenNet()
    remedy = rf"give its \.module, and wrap the tail: {wrapper.__name__}"
    with pytest.raises(FreezeError, match=remedy):
        split(wrapped, "module.embed", sample_shape=SHAPE)
    with pytest.raises(FreezeError, match=remedy):
        default_freeze(wrapped, sample_shape=SHAPE)


class TwoResults(nn.Module):
    def forward(self, x):
        return x * 2, x


def tied_modules():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first), nn.Sequential(nn.ReLU(), second)


@pytest.mark.parametrize(
    ("build", "freeze", "code", "message"),
    [
        (
            lambda: (nn.Linear(4, 4), nn.Linear(4, 2)),
            "0",
            "cannot_freeze",
            r"'0' cannot be combined with two modules \(frozen, tail\)",
        ),
        (
            tied_modules,
            None,
            "cannot_freeze",
            r"parameter '1\.weight' is the frozen module's '0\.weight'",
        ),
        (
            lambda: (nn.Linear(4, 4), nn.Linear(3, 2)),
            None,
            "cannot_freeze",
            r"tail Linear does not accept .* samples of shape \(4,\)",
        ),
        (
            lambda: (TwoResults(), nn.Linear(4, 2)),
            None,
            "cannot_freeze",
            "TwoResults returns a tuple, and only one tensor can be sent",
        ),
        (
            lambda: (nn.Linear(5, 4), nn.Linear(4, 2)),
            None,
            "cannot_trace",
            r"frozen module Linear does not run .* of shape \(4,\)",
        ),
        (lambda: (nn.Linear(4, 4),), None, "cannot_freeze", "two modules"),
        (lambda: "resnet18", None, "cannot_freeze", "model must be a module"),
    ],
)
def test_invalid_two_modules_are_refused_with_a_reason(
    build, freeze, code, message
):
    with pytest.raises(FreezeError, match=message) as caught:
        split(build(), freeze, sample_shape=(4,))
    assert caught.value.code == code


def test_tail_with_data_dependent_control_flow_is_accepted():
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    tail = Branching()
    parts = split((nn.Linear(4, 4), tail), sample_shape=(4,))
    assert parts.tail is tail
    assert parts.freeze == "(frozen, tail)"


def test_untraceable_model_is_refused_with_a_remedy():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else x

    with pytest.raises(
        FreezeError, match=r"or give two modules .*\(frozen, tail\)"
    ) as caught:
        split(Branching(), "layer", sample_shape=(4,))
    assert caught.value.code == "cannot_trace"
    # The reason is not repeated.
    assert caught.value.message.count("control flow") == 1
