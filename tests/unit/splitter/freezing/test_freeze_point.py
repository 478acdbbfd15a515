"""The forms of ``freeze``, and what is said where one cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.split_model import (
    SplitModel,
    default_freeze,
    split,
)
from reference_models import BranchedNet

SHAPE = (3, 16, 16)


class TokenNet(nn.Module):
    """Holds parameters itself, and its blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 8, stride=8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        token = self.token.expand(x.shape[0], -1, -1)
        x = torch.cat([token, x], 1) + self.position
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x[:, 0])


class Residual(nn.Module):
    """Its second layer's input is needed again behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.after = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.after(self.body(x) * x)


class TiedWeights(nn.Module):
    """Two layers, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.middle(self.layer(x)))


def check(model: nn.Module, parts: SplitModel) -> None:
    samples = torch.randn(3, *parts.frozen.input_shape)
    with torch.inference_mode():
        features = parts.frozen.suffix(0)(samples)
        torch.testing.assert_close(parts.tail(features), model(samples))


def trained(parts: SplitModel) -> set[str]:
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
def test_forms_of_freeze_that_say_the_same_give_the_same(
    freeze: Any,
) -> None:
    model = TokenNet().eval()
    parts = split(model, freeze, sample_shape=SHAPE)
    assert parts.frozen.cuts[-1].shape == (5, 8)
    assert trained(parts) == {
        "blocks.2.weight",
        "blocks.2.bias",
        "head.weight",
        "head.bias",
    }
    check(model, parts)


def test_function_is_asked_once_for_each_module_with_parameters() -> None:
    model = TokenNet().eval()
    asked: list[tuple[str, nn.Module]] = []

    def freeze(name: str, module: nn.Module) -> bool:
        asked.append((name, module))
        return not name.startswith("head")

    parts = split(model, freeze, sample_shape=SHAPE)
    assert [name for name, _ in asked] == [
        "",
        "embed",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "unused",
        "head",
    ]
    assert all(model.get_submodule(n) is module for n, module in asked)
    assert parts.freeze == "token, position, embed, blocks and 1 more"
    assert trained(parts) == {"head.weight", "head.bias"}
    check(model, parts)


def test_name_of_a_list_of_modules_ends_with_its_last() -> None:
    model = TokenNet().eval()
    parts = split(model, "blocks", sample_shape=SHAPE)
    assert trained(parts) == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("model", "freeze", "code", "said"),
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
            "'stem' takes that parameter with it; name 'stem'",
        ),
    ],
)  # fmt: skip
def test_freeze_that_cannot_be_had_is_an_error_naming_why(
    model: nn.Module, freeze: Any, code: str, said: str
) -> None:
    with pytest.raises(FreezeError, match=said) as caught:
        split(model, freeze, sample_shape=SHAPE)
    assert caught.value.code == code


class UnscaledNorms(nn.Module):
    """Statistics that training moves, in a module without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, affine=False)
        self.body = nn.Conv2d(4, 4, 3)
        self.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(self.norm(self.stem(x))))
        return found


def test_running_statistics_are_frozen_only_if_the_list_says_so() -> None:
    model = UnscaledNorms()
    model(torch.zeros(2, *SHAPE))
    with pytest.raises(FreezeError, match="run before its end: 'norm'"):
        split(model, ["stem", "body"], sample_shape=SHAPE)
    for freeze in (["stem", "norm", "body"], "body"):
        split(model, freeze, sample_shape=SHAPE)
    split(model, lambda name, _: name in ("stem", "body"), sample_shape=SHAPE)


def test_lazy_modules_are_refused_and_left_alone() -> None:
    model = UnscaledNorms()
    pair = nn.Conv2d(3, 4, 3), model.head
    with pytest.raises(FreezeError, match="no shape yet"):
        split(model, "body", sample_shape=SHAPE)
    with pytest.raises(FreezeError, match="no shape yet"):
        split(pair, sample_shape=SHAPE)
    with pytest.raises(FreezeError, match="no shape yet"):
        default_freeze(model, sample_shape=SHAPE)
    assert is_lazy(model.head[1].weight)


@pytest.mark.parametrize(
    ("model", "freeze", "said"),
    [
        (
            Residual(),
            "body.0",
            r"2 tensors are needed behind it \(stem \[4, 16, 16\], body_0 "
            r"\[4, 16, 16\]\).*: 'stem' before it, 'after' behind it",
        ),
        (
            BranchedNet(),
            "left",
            r"2 tensors .* 'stem' before it, 'mix' behind it",
        ),
    ],
)
def test_places_next_to_a_refused_one_are_named_by_position(
    model: nn.Module, freeze: str, said: str
) -> None:
    with pytest.raises(FreezeError, match=said):
        split(model, freeze, sample_shape=SHAPE)


@pytest.mark.parametrize(
    ("model", "freeze", "said"),
    [
        (TiedWeights(), "first", r"'first\.weight' is used before and after"),
        (TiedWeights(), ["first"], r"'first\.weight' is used before and"),
        (CalledTwice(), "middle", r"'layer\.weight' is used before and after"),
    ],
)
def test_parameter_shared_across_the_freeze_point_is_named(
    model: nn.Module, freeze: Any, said: str
) -> None:
    with pytest.raises(FreezeError, match=said):
        split(model, freeze, sample_shape=(4,))


def test_compiled_model_is_split_as_its_original() -> None:
    model = TokenNet().eval()
    compiled = torch.compile(model)
    for freeze in ("blocks.1", "_orig_mod.blocks.1"):
        parts = split(compiled, freeze, sample_shape=SHAPE)
        assert parts.tail.get_submodule("head") is model.head
        check(model, parts)
    assert default_freeze(compiled, sample_shape=SHAPE) == "blocks"


def test_submodule_that_is_compiled_is_split_as_its_original() -> None:
    model = Residual().eval()
    plain = split(model, "after", sample_shape=SHAPE).frozen
    model.body = torch.compile(model.body)  # type: ignore[assignment]
    parts = split(model, "after", sample_shape=SHAPE)
    assert parts.frozen.program == plain.program


def test_sum_of_a_residual_block_is_frozen_with_the_block() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.body = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return self.head(x + self.body(x))

    model = Block().eval()
    parts = split(model, "body", sample_shape=(4,))
    assert parts.last == "add"
    check(model, parts)


@pytest.mark.parametrize(
    "wrapper",
    [nn.DataParallel, nn.parallel.DistributedDataParallel],
    ids=lambda wrapper: wrapper.__name__,
)
def test_model_wrapped_for_several_devices_is_an_error_with_the_remedy(
    wrapper: type[nn.Module],
) -> None:
    wrapped = wrapper.__new__(wrapper)  # no devices, no process group
    nn.Module.__init__(wrapped)
    wrapped.module = TokenNet()
    remedy = rf"give its \.module, and wrap the tail: {wrapper.__name__}"
    with pytest.raises(FreezeError, match=remedy):
        split(wrapped, "module.embed", sample_shape=SHAPE)
    with pytest.raises(FreezeError, match=remedy):
        default_freeze(wrapped, sample_shape=SHAPE)


class Pair(nn.Module):
    """Returns something that is not one tensor."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x


def tied_pair() -> tuple[nn.Module, nn.Module]:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first), nn.Sequential(nn.ReLU(), second)


@pytest.mark.parametrize(
    ("build", "freeze", "code", "said"),
    [
        (
            lambda: (nn.Linear(4, 4), nn.Linear(4, 2)),
            "0",
            "cannot_freeze",
            r"'0' is given together with two modules \(frozen, tail\)",
        ),
        (
            tied_pair,
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
            lambda: (Pair(), nn.Linear(4, 2)),
            None,
            "cannot_freeze",
            "Pair returns a tuple, and only one tensor can travel",
        ),
        (
            lambda: (nn.Linear(5, 4), nn.Linear(4, 2)),
            None,
            "cannot_trace",
            r"frozen module Linear does not run .* of shape \(4,\)",
        ),
        (lambda: (nn.Linear(4, 4),), None, "cannot_freeze", "two modules"),
        (lambda: "resnet18", None, "cannot_freeze", "a model is needed"),
    ],
)
def test_two_modules_that_cannot_be_used_are_an_error_naming_why(
    build: Callable[[], Any], freeze: Any, code: str, said: str
) -> None:
    with pytest.raises(FreezeError, match=said) as caught:
        split(build(), freeze, sample_shape=(4,))
    assert caught.value.code == code


def test_tail_of_two_modules_that_depends_on_values_is_accepted() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    tail = Branching()
    parts = split((nn.Linear(4, 4), tail), sample_shape=(4,))
    assert parts.tail is tail
    assert parts.freeze == "(frozen, tail)"


def test_model_that_no_trace_can_follow_is_told_of_two_modules() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum() > 0 else x

    with pytest.raises(
        FreezeError, match=r"or give two modules .*\(frozen, tail\)"
    ) as e:
        split(Branching(), "layer", sample_shape=(4,))
    assert e.value.code == "cannot_trace"
    # What is wrong is said once.
    assert e.value.message.count("control flow") == 1
