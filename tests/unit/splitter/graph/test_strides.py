"""What is said of the order of tensors in memory is what kernels make."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchvision import models

from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.freezing.split_model import split
from hapi_splitter.graph.lowering import META_CALL
from hapi_splitter.graph.program import INPUT, Affine, Argument, Call, Ref
from hapi_splitter.graph.strides import attends_by_tiles
from reference_models import REFERENCE_MODELS
from regions import region_of

PIXELS = 64


class Strides(fx.Interpreter):
    """Shapes and strides of what calls yield, by id."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[int, tuple[torch.Size, tuple[int, ...]]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        call = n.meta.get(META_CALL)
        if call is not None:
            self.found[call] = result.shape, result.stride()
        return result


def strides_of(frozen: FrozenGraph) -> Strides:
    walk = Strides(frozen.prefix(frozen.num_cuts))
    with torch.inference_mode():
        walk.run(torch.randn(2, *frozen.input_shape))
    return walk


def assert_laid_out(frozen: FrozenGraph) -> tuple[int, int]:
    """Every tensor that is said to lie somehow does.

    Returns:
        How many are, and how many there are.
    """
    walk = strides_of(frozen)
    said = frozen.laid_out.keys() & walk.found.keys()
    for node in said:
        tensor = frozen.laid_out[node]
        shape, strides = walk.found[node]
        assert tensor.shape == shape
        for length, expected, found in zip(
            shape, strides, tensor.stride(), strict=True
        ):
            # Of one entry the distance to the next means nothing.
            assert length == 1 or expected == found, frozen.program.call(node)
    return len(said), len(walk.found)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "convnext_tiny": (lambda: models.convnext_tiny(weights=None), "features"),
    "swin_t": (lambda: models.swin_t(weights=None), "permute"),
    "shufflenet": (
        lambda: models.shufflenet_v2_x0_5(weights=None),
        "conv5",
    ),
}


@pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast"])
@pytest.mark.parametrize(
    "name",
    [*MODELS, "resnet18", "vit_b_16", "mobilenet_v3_small", "densenet121"],
)
def test_tensors_lie_as_is_said(name: str, fast: bool) -> None:
    if name in MODELS:
        build, freeze = MODELS[name]
        model, shape = build().eval(), (3, PIXELS, PIXELS)
    else:
        reference = REFERENCE_MODELS[name]
        freeze, shape = reference.freeze, reference.sample_shape
        model = reference.build()
    frozen = split(model, freeze, sample_shape=shape).frozen
    if fast:
        frozen = frozen.to("cpu", fast=True)
    sure, every = assert_laid_out(frozen)
    assert sure > (0.7 if fast else 0.05) * every


IMAGE = (8, 12, 20)
ORDERS: dict[str, list[Call]] = {
    "usual": [],
    "columns": [Call("aten.transpose.int", (Ref(INPUT), 2, 3))],
    "channels last": [
        Call("aten.permute.default", (Ref(INPUT), (0, 3, 1, 2)))
    ],
    "part": [Call("aten.slice.Tensor", (Ref(INPUT), 3, 2, 18, 1))],
}
FORMATS = [torch.contiguous_format, torch.channels_last]
OPERATORS: dict[str, tuple[Argument, ...]] = {
    "aten.relu.default": (),
    "aten.softmax.int": (1, None),
    "aten.roll.default": ((1, 2), (2, 3)),
    "aten.flip.default": ((2,),),
    "aten.pad.default": ((1, 2), 0.5),
    "aten.mean.dim": ((2,), True, None),
    "aten.amax.default": ((2,), True),
    "aten.max_pool2d.default": ((3, 3), (2, 2), (1, 1), (1, 1), False),
    "aten.adaptive_avg_pool2d.default": ((4, 4),),
    "aten.upsample_nearest2d.default": ((16, 16), None, None),
    "aten.upsample_bilinear2d.default": ((16, 16), False, None, None),
    "aten.pixel_shuffle.default": (2,),
    "aten.group_norm.default": (4, None, None, 1e-5, False),
    "aten.reshape.default": ((Affine(1), 4, -1),),
    "aten.contiguous.default": (),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("op", OPERATORS)
def test_operators_yield_the_order_that_is_said(op: str, order: str) -> None:
    sample = (12, 20, 8) if order == "channels last" else IMAGE
    calls = list(ORDERS[order])
    image = len(calls)
    calls.append(Call(op, (Ref(image), *OPERATORS[op])))
    calls.append(Call("aten.sigmoid.default", (Ref(image + 1),)))
    assert_laid_out(region_of(sample, calls))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("kernel", [(16, 8, 3, 3), (8, 1, 3, 3), (1, 8, 1, 1)])
def test_convolutions_yield_the_order_that_is_said(
    kernel: tuple[int, ...], memory_format: torch.memory_format, order: str
) -> None:
    sample = (12, 20, 8) if order == "channels last" else IMAGE
    weight = torch.randn(kernel).to(memory_format=memory_format)
    calls = list(ORDERS[order])
    image = 1 + len(calls) if calls else INPUT
    sides = ((1, 1), (1, 1), (1, 1))
    arguments = (Ref(image), Ref(1), None, *sides, 8 // kernel[1])
    calls.append(Call("aten.conv2d.default", arguments))
    calls.append(Call("aten.relu.default", (Ref(1 + len(calls)),)))
    assert_laid_out(region_of(sample, calls, {1: weight}))


@pytest.mark.parametrize("swapped", [False, True])
def test_order_of_a_sum_of_two_orders_is_not_said(swapped: bool) -> None:
    """Either may be overwritten."""
    terms = [Ref(2), Ref(3)]
    calls = [
        Call("aten.sigmoid.default", (Ref(INPUT),)),
        Call("aten.transpose.int", (Ref(1), 2, 3)),
        Call("aten.sigmoid.default", (Ref(INPUT),)),
        Call("aten.add.Tensor", (*(terms[::-1] if swapped else terms), 1)),
    ]
    frozen = region_of((4, 9, 9), calls)
    assert 3 in frozen.laid_out
    assert 4 not in frozen.laid_out
    assert_laid_out(frozen)


HEADS = {
    "usual": (2, 4, 33, 16),
    "other keys": (2, 4, 20, 16),
    "one key": (2, 4, 1, 16),
    "fewer heads": (2, 1, 33, 16),
    "other width": (2, 4, 33, 8),
    "one batch": (1, 4, 33, 16),
    "no keys": (2, 4, 0, 16),
    "three": (4, 33, 16),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(
    ("key", "value"), list(itertools.product(HEADS.values(), repeat=2))
)
def test_attention_works_by_tiles_only_where_torch_does(
    key: tuple[int, ...],
    value: tuple[int, ...],
    by_columns: bool,
    masked: bool,
) -> None:
    operands = [torch.randn(shape) for shape in (HEADS["usual"], key, value)]
    if by_columns:
        operands[1] = operands[1].mT.contiguous().mT
    mask = torch.zeros(33, key[-2]) if masked else None
    said = attends_by_tiles(*operands, mask)
    choice = torch._fused_sdp_choice(*operands, mask)
    by_tiles = choice == SDPBackend.FLASH_ATTENTION.value
    assert by_tiles or not said
    if key == value == HEADS["usual"]:
        assert said == (not by_columns)


def test_attention_does_not_work_by_tiles_where_that_is_forbidden() -> None:
    operands = [torch.randn(HEADS["usual"])] * 3
    assert attends_by_tiles(*operands)
    with sdpa_kernel(SDPBackend.MATH):
        assert not attends_by_tiles(*operands)


def test_nothing_is_said_of_other_devices() -> None:
    calls = [Call("aten.linear.default", (Ref(INPUT), Ref(1), None))]
    frozen = region_of((6,), calls, {1: torch.randn(3, 6)})
    assert frozen.laid_out
    assert not frozen.to("meta").laid_out
