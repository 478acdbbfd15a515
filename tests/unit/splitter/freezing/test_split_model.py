"""Splitting of models, the forms of ``freeze``, and refused freeze points."""

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torchvision import models

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.split_model import default_freeze, split
from reference_models import BranchedNet

SHAPE = (3, 16, 16)


def test_freeze_stops_before_dropout_and_batch_norm():
    parts = split(BranchedNet(), "mix", sample_shape=SHAPE)
    assert parts.frozen.cuts[-1].shape == (48,)
    assert isinstance(parts.tail.get_submodule("norm"), nn.BatchNorm1d)


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


@pytest.mark.parametrize("as_two_modules", [False, True])
def test_split_does_not_change_the_random_state(as_two_modules):
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
    head = nn.Sequential(nn.Dropout(), nn.Linear(4 * 6 * 6, 2))
    model = (body, head) if as_two_modules else nn.Sequential(body, head)
    before = torch.get_rng_state()
    split(model, None if as_two_modules else "0", sample_shape=(3, 8, 8))
    assert torch.equal(before, torch.get_rng_state())


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


def tied_modules():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first), nn.Sequential(nn.ReLU(), second)


TIED = nn.Sequential(*(layer for part in tied_modules() for layer in part))


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.middle(self.layer(x)))


def those(*names):
    return lambda name, module: name in names


def assert_equivalent(model, parts):
    samples = torch.randn(3, *parts.frozen.input_shape)
    with torch.inference_mode():
        features = parts.frozen.suffix(0)(samples)
        torch.testing.assert_close(parts.tail(features), model(samples))


HEAD = {"head.weight", "head.bias"}
UNUSED = {"unused.weight", "unused.bias"}
"""Code in the tail may use them later."""


FIRST = ("embed", "", "blocks.0")
TOKENS = ["embed", "token", "position"]


def trained(parts):
    return {name for name, _ in parts.tail.named_parameters()}


@pytest.mark.parametrize(
    "freeze",
    [
        "blocks.1",
        [*TOKENS, "blocks.0", "blocks.1"],
        lambda name, module: name not in ("blocks.2", "head", "unused"),
    ],
    ids=["name", "list", "function"],
)
def test_equivalent_forms_of_freeze_give_the_same_split(freeze):
    model = TokenNet().eval()
    parts = split(model, freeze, sample_shape=SHAPE)
    assert parts.frozen.cuts[-1].shape == (5, 8)
    last = {"blocks.2.weight", "blocks.2.bias"}
    assert trained(parts) == HEAD | UNUSED | last
    assert_equivalent(model, parts)


def test_function_is_called_once_per_module_with_parameters():
    model = TokenNet().eval()
    calls = {}

    def freeze(name, module):
        assert name not in calls
        calls[name] = module
        return not name.startswith("head")

    parts = split(model, freeze, sample_shape=SHAPE)
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert list(calls) == ["", "embed", *blocks, "unused", "head"]
    assert all(model.get_submodule(n) is module for n, module in calls.items())
    assert parts.freeze == "token, position, embed, blocks and 1 more"
    assert trained(parts) == HEAD
    assert_equivalent(model, parts)


def test_module_list_ends_with_its_last_module():
    model = TokenNet().eval()
    parts = split(model, "blocks", sample_shape=SHAPE)
    assert trained(parts) == HEAD | UNUSED


@pytest.mark.parametrize(
    ("model", "freeze", "last", "message"),
    [
        (TokenNet, ["embed", "blocks.0"], "blocks.0", "'token', 'position'; "),
        (TokenNet, [*TOKENS, "blocks.1"], "blocks.1", "'blocks.0'; add"),
        (BranchedNet, ["stem", "mix"], "mix", "'left', 'right'; add them to"),
        (TokenNet, those("", "blocks.0"), "token", "'embed'; freeze them too"),
        (TokenNet, those(*FIRST, "head"), "head", "'blocks.1', 'blocks.2'; f"),
    ],
)
def test_modules_before_the_last_must_be_frozen(model, freeze, last, message):
    expected = rf"'{last}' is frozen, but .* run before its end: {message}"
    with pytest.raises(FreezeError, match=expected) as caught:
        split(model(), freeze, sample_shape=SHAPE)
    assert caught.value.code == "cannot_freeze"


TWO_INPUTS = nn.TransformerDecoderLayer(4, 1, 4)


@pytest.mark.parametrize(
    ("model", "freeze", "code", "message"),
    [
        (TokenNet(), those(), "cannot_freeze", "true for none of the 7 modul"),
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
            "belongs to 'stem'",
        ),
        (BranchedNet(), "mxi", "unknown_freeze", r"'mxi'.*not in.*mix"),
        (TWO_INPUTS, "linear1", "cannot_trace", "takes 2 tensors"),
        (nn.Sequential(nn.Linear(7, 2)), "0", "cannot_trace", "does not run"),
    ],
)
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
    for refused in (
        lambda: split(model, "body", sample_shape=SHAPE),
        lambda: split((nn.Conv2d(3, 4, 3), model.head), sample_shape=SHAPE),
        lambda: default_freeze(model, sample_shape=SHAPE),
    ):
        with pytest.raises(FreezeError, match="no shape yet"):
            refused()
    assert is_lazy(model.head[1].weight)


@pytest.mark.parametrize(
    ("model", "freeze", "message"),
    [
        (TIED, "0", r"'0\.weight' is used before and after"),
        (TIED, ["0"], r"'0\.weight' is used before and after"),
        (CalledTwice(), "middle", r"'layer\.weight' is used before and after"),
    ],
)
def test_parameters_on_both_sides_are_refused(model, freeze, message):
    with pytest.raises(FreezeError, match=message):
        split(model, freeze, sample_shape=(4,))


@pytest.mark.parametrize(
    ("model", "freeze", "shape"),
    [
        (Residual(), "body.0", (2 * 4 * 16 * 16,)),
        (Residual(), ["stem", "body.0"], (2 * 4 * 16 * 16,)),
        (BranchedNet(), "left", (2 * 8 * 16 * 16,)),
    ],
)
def test_all_tensors_that_the_tail_reads_are_sent(model, freeze, shape):
    parts = split(model.eval(), freeze, sample_shape=SHAPE)
    assert parts.frozen.cuts[-1].shape == shape
    assert_equivalent(model, parts)


def test_compiled_models_are_split_like_their_originals():
    model = TokenNet().eval()
    compiled = torch.compile(model)
    for freeze in ("blocks.1", "_orig_mod.blocks.1"):
        parts = split(compiled, freeze, sample_shape=SHAPE)
        assert parts.tail.get_submodule("head") is model.head
        assert_equivalent(model, parts)
    assert default_freeze(compiled, sample_shape=SHAPE) == "blocks"

    model = Residual().eval()
    expected = split(model, "after", sample_shape=SHAPE).frozen
    model.body = torch.compile(model.body)
    for each, freeze in ((model, "after"), ((model, nn.Flatten()), None)):
        parts = split(each, freeze, sample_shape=SHAPE)
        assert parts.frozen.program == expected.program


@pytest.mark.parametrize(
    "wrapper",
    [nn.DataParallel, nn.parallel.DistributedDataParallel],
    ids=lambda wrapper: wrapper.__name__,
)
def test_model_wrapped_for_several_devices_is_refused(wrapper):
    wrapped = wrapper.__new__(wrapper)  # no devices, no process group
    nn.Module.__init__(wrapped)
    wrapped.module = TokenNet()
    remedy = rf"give its \.module, and wrap the tail: {wrapper.__name__}"
    with pytest.raises(FreezeError, match=remedy):
        split(wrapped, "module.embed", sample_shape=SHAPE)
    with pytest.raises(FreezeError, match=remedy):
        default_freeze(wrapped, sample_shape=SHAPE)


TUPLE = nn.MaxPool1d(1, return_indices=True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (tied_modules(), r"'1\.weight' is the frozen module's '0\.weight'"),
        ((nn.Linear(4, 4), nn.Linear(3, 2)), "tail Linear does not accept"),
        ((TUPLE, nn.Linear(4, 2)), "MaxPool1d returns a tuple, and only one"),
        ((nn.Linear(5, 4), nn.Linear(4, 2)), "frozen module Linear does not"),
        ((nn.Linear(4, 4),), "two modules"),
        ("resnet18", "model must be a module"),
    ],
)
def test_invalid_two_modules_are_refused_with_a_reason(model, message):
    with pytest.raises(FreezeError, match=message) as caught:
        split(model, None, sample_shape=(4,))
    is_untraceable = "does not run" in caught.value.message
    code = "cannot_trace" if is_untraceable else "cannot_freeze"
    assert caught.value.code == code
    with pytest.raises(FreezeError, match="'0' cannot be combined with two"):
        split((nn.Linear(4, 4), nn.Linear(4, 2)), "0", sample_shape=(4,))


class Branching(nn.Module):
    """A model whose control flow depends on values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) if x.sum() > -1e9 else x


def test_data_dependent_control_flow_must_be_in_the_tail():
    tail = Branching()
    parts = split((nn.Linear(4, 4), tail), sample_shape=(4,))
    assert parts.tail is tail
    assert parts.freeze == "(frozen, tail)"
    model = nn.Sequential(nn.Linear(4, 4), Branching())
    parts = split(model, "0", sample_shape=(4,))
    assert_equivalent(model, parts)
    where = r"in module '1', in .*test_split_model.py, line \d+, in forward"
    with pytest.raises(FreezeError, match=where) as caught:
        split(model, "1", sample_shape=(4,))
    assert caught.value.code == "cannot_trace"
