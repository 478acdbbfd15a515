"""The memory model is never below what the allocator hands out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torchvision import models

from hapi_protocol.encodings import DTYPES
from hapi_splitter import encodings as encodings_module
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.encodings import CHUNK_BYTES, encode
from hapi_splitter.freezing.split_model import split
from hapi_splitter.graph.batch_independence import Value
from hapi_splitter.graph.program import INPUT, Affine, Call, Ref
from hapi_splitter.profiling.memory_model import (
    batch_for,
    needs_of,
    peak_bytes,
    steps,
)
from reference_models import REFERENCE_MODELS, BranchedNet
from regions import region_of

SCRATCH_BYTES = 1 << 18
"""That is added to each peak."""


def allocated_peak(
    module: Callable[[torch.Tensor], object], samples: torch.Tensor
) -> int:
    """Largest sum of live allocations during a call, by torch's profiler."""
    with (
        torch.inference_mode(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run,
    ):
        module(samples)
    live = peak = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.fixture(
    scope="module",
    params=["resnet18", "densenet121", "vit_b_16", "mobilenet_v3_small"],
)
def region(request: pytest.FixtureRequest) -> FrozenGraph:
    reference = REFERENCE_MODELS[request.param]
    return split(
        reference.build(),
        reference.freeze,
        sample_shape=reference.sample_shape,
    ).frozen


@pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast"])
def test_peak_is_an_upper_bound_of_allocations(
    region: FrozenGraph, fast: bool
) -> None:
    frozen = region.to("cpu", fast=True) if fast else region
    samples = torch.randn(8, *region.input_shape)
    for cut in (1, frozen.num_cuts // 2, frozen.num_cuts):
        peak = peak_bytes(frozen, cut, 8)
        found = allocated_peak(frozen.prefix(cut), samples)
        assert found > 0
        assert peak >= found + frozen.parameter_bytes + samples.nbytes
        assert peak - frozen.parameter_bytes < 12 * (found + samples.nbytes)


LARGE: dict[str, tuple[Callable[..., nn.Module], str, int]] = {
    "resnet18": (models.resnet18, "layer4", 16),
    "vgg11": (models.vgg11, "features", 4),
    "densenet121": (models.densenet121, "features", 8),
    "vit_b_16": (models.vit_b_16, "encoder", 16),
    "convnext_tiny": (models.convnext_tiny, "features", 10),
    "swin_t": (models.swin_t, "features", 8),
}


@pytest.mark.parametrize("name", LARGE)
def test_peak_of_large_activations_is_near_the_allocations(name: str) -> None:
    build, freeze, batch = LARGE[name]
    shape = (3, 224, 224)
    model = build(weights=None).eval()
    frozen = split(model, freeze, sample_shape=shape).frozen
    fast = frozen.to("cpu", fast=True)
    samples = torch.randn(batch, *shape)
    cut = next(
        cut.index
        for cut in frozen.cuts
        if peak_bytes(fast, cut.index, batch)
        == peak_bytes(fast, fast.num_cuts, batch)
    )
    found = allocated_peak(fast.prefix(cut), samples) + samples.nbytes
    assert found > 64 << 20
    working = peak_bytes(fast, cut, batch) - fast.parameter_bytes
    assert found <= working < 1.5 * found
    # What is saved by the order of the channels is known to be.
    plain = peak_bytes(frozen, cut, batch) - frozen.parameter_bytes
    assert working < plain or name in ("vit_b_16", "swin_t")


def strided() -> FrozenGraph:
    """Of features that are a view, and do not lie in one piece."""
    calls = [
        Call("aten.sigmoid.default", (Ref(INPUT),)),
        Call("aten.transpose.int", (Ref(1), 1, 2)),
        Call("aten.slice.Tensor", (Ref(2), 1, 0, 40, 1)),
    ]
    return region_of((64, 50), calls)


def channels() -> FrozenGraph:
    return region_of(
        (16, 48, 48), [Call("aten.sigmoid.default", (Ref(INPUT),))]
    )


def few_values() -> FrozenGraph:
    return region_of((3,), [Call("aten.sigmoid.default", (Ref(INPUT),))])


@pytest.mark.parametrize("special", [0.5, math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("build", [strided, channels, few_values])
def test_peak_with_encoding_is_an_upper_bound_of_allocations(
    build: Callable[[], FrozenGraph],
    dtype: str,
    special: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen = build()
    prefix = frozen.prefix(frozen.num_cuts)
    samples = torch.randn(8, *frozen.input_shape)

    def encoded(samples: torch.Tensor) -> None:
        features = prefix(samples)
        if special != 0.5:
            # In place, so that it costs nothing.
            features[0] = special
        encode(features, dtype)

    for chunk_bytes in (CHUNK_BYTES, 3 * 4 * 16 * 48 * 48, 1):
        monkeypatch.setattr(encodings_module, "CHUNK_BYTES", chunk_bytes)
        found = allocated_peak(encoded, samples)
        needs = needs_of(frozen, frozen.num_cuts, dtype)
        wanted = found + samples.nbytes + frozen.parameter_bytes
        # Of a chunk that the batch does not fill, and scratch memory.
        spare = 2 * chunk_bytes + 2 * 4096 + SCRATCH_BYTES
        assert wanted <= needs.peak_bytes(8) < 3 * wanted + spare
        alone = needs_of(frozen, frozen.num_cuts).peak_bytes(8)
        assert needs.peak_bytes(8) >= alone


def broadcast_matmul() -> FrozenGraph:
    batch = Affine(1)
    reshape = "aten.reshape.default"
    calls = [
        Call(reshape, (Ref(INPUT), (batch, 64, 1, 1, 256))),
        Call(reshape, (Ref(INPUT), (batch, 1, 64, 256, 1))),
        Call("aten.matmul.default", (Ref(1), Ref(2))),
    ]
    return region_of((64, 256), calls)


def matmul_of_strided_rows() -> FrozenGraph:
    calls = [
        Call("aten.transpose.int", (Ref(INPUT), 1, 2)),
        Call("aten.matmul.default", (Ref(2), Ref(1))),
    ]
    return region_of((7, 64, 256), calls, {1: torch.randn(256, 32)})


def broadcast_attention(is_causal: bool) -> FrozenGraph:
    attention = "aten.scaled_dot_product_attention.default"
    rest = (None, 0.0, is_causal, None)
    calls = [
        Call("aten.unsqueeze.default", (Ref(INPUT), 2)),
        Call("aten.unsqueeze.default", (Ref(INPUT), 1)),
        Call(attention, (Ref(1), Ref(2), Ref(2), *rest)),
    ]
    return region_of((8, 64, 32), calls)


def attention_to_few_keys() -> FrozenGraph:
    attention = "aten.scaled_dot_product_attention.default"
    rest = (None, 0.0, False, None)
    calls = [
        Call("aten.slice.Tensor", (Ref(INPUT), 3, 0, 2, 1)),
        Call("aten.unsqueeze.default", (Ref(INPUT), 1)),
        Call("aten.slice.Tensor", (Ref(2), 3, 0, 2, 1)),
        Call(attention, (Ref(2), Ref(3), Ref(3), *rest)),
    ]
    return region_of((8, 64, 32), calls)


def small_convolution() -> FrozenGraph:
    convolution = (Ref(INPUT), Ref(1), None, (1, 1), (20, 20), (1, 1), 1)
    calls = [Call("aten.conv2d.default", convolution)]
    return region_of((1280, 2, 2), calls, {1: torch.randn(1, 1280, 3, 3)})


def convolution_of(
    kernel: tuple[int, ...], groups: int, padding: int
) -> FrozenGraph:
    image = (kernel[1] * groups, 28, 28)
    sides = ((1, 1), (padding, padding), (1, 1))
    arguments = (Ref(INPUT), Ref(1), None, *sides, groups)
    calls = [
        Call("aten.conv2d.default", arguments),
        Call("aten.max_pool2d.default", (Ref(2), *POOL)),
    ]
    return region_of(image, calls, {1: torch.randn(kernel)})


POOL = ((3, 3), (2, 2), (1, 1), (1, 1), False)


@pytest.mark.parametrize(
    "frozen",
    [
        convolution_of((64, 16, 3, 3), 1, 1),
        convolution_of((72, 1, 5, 5), 72, 2),
        convolution_of((144, 64, 1, 1), 3, 0),
        convolution_of((144, 1, 7, 7), 72, 3),
        convolution_of((144, 16, 1, 1), 1, 3),
        convolution_of((64, 1, 5, 5), 1, 2),
        convolution_of((64, 1, 1, 1), 64, 0),
    ],
    ids=[
        "3x3",
        "depthwise",
        "1x1 of groups",
        "7x7 of groups",
        "1x1 of a margin",
        "grey",
        "channelwise",
    ],
)
@pytest.mark.parametrize("batch", [1, 20])
def test_workspace_of_convolutions_with_channels_last_is_counted(
    frozen: FrozenGraph, batch: int
) -> None:
    fast = frozen.to("cpu", fast=True)
    samples = torch.randn(batch, *fast.input_shape)
    for cut in (1, 2):
        found = allocated_peak(fast.prefix(cut), samples)
        wanted = found + samples.nbytes + fast.parameter_bytes
        assert wanted <= peak_bytes(fast, cut, batch) < 6 * wanted


def low_and_wide_convolution() -> FrozenGraph:
    convolution = (Ref(INPUT), Ref(1), None, (1, 1), (0, 0), (1, 1), 1)
    calls = [Call("aten.conv2d.default", convolution)]
    return region_of((6, 56, 56), calls, {1: torch.randn(2, 6, 1, 7)})


def pixels_with_a_margin() -> FrozenGraph:
    convolution = (Ref(INPUT), Ref(1), None, (1, 1), (9, 9), (1, 1), 1)
    calls = [Call("aten.conv2d.default", convolution)]
    return region_of((96, 14, 14), calls, {1: torch.randn(2, 96, 1, 1)})


def sum_of_bytes() -> FrozenGraph:
    calls = [
        Call("aten._to_copy.default", (Ref(INPUT), torch.uint8)),
        Call("aten.sum.dim_IntList", (Ref(1), (2,), True, None)),
        Call("aten._to_copy.default", (Ref(2), torch.float32)),
    ]
    return region_of((64, 256), calls)


def resized_by_bicubic() -> FrozenGraph:
    calls = [
        Call("aten.transpose.int", (Ref(INPUT), 2, 3)),
        Call(
            "aten.upsample_bicubic2d.default",
            (Ref(1), (48, 40), False, None, None),
        ),
    ]
    return region_of((16, 32, 24), calls)


def resized_by_pixels() -> FrozenGraph:
    resize = "aten.upsample_nearest2d.default"
    calls = [Call(resize, (Ref(INPUT), (48, 40), None, None))]
    return region_of((16, 32, 24), calls)


def short_rows() -> FrozenGraph:
    """Whose statistics are as large as they."""
    calls = [
        Call(
            "aten.layer_norm.default",
            (Ref(INPUT), (1,), None, None, 1e-5, False),
        )
    ]
    return region_of((64, 40, 1), calls)


def groups_of_columns() -> FrozenGraph:
    calls = [
        Call("aten.transpose.int", (Ref(INPUT), 2, 3)),
        Call(
            "aten.group_norm.default",
            (Ref(1), 16, None, None, 1e-5, False),
        ),
    ]
    return region_of((16, 32, 24), calls)


def product_of_parts() -> FrozenGraph:
    """Of matrices whose rows lie apart."""
    calls = [
        Call("aten.slice.Tensor", (Ref(INPUT), 3, 0, 30, 1)),
        Call("aten.transpose.int", (Ref(1), 2, 3)),
        Call("aten.matmul.default", (Ref(2), Ref(1))),
    ]
    return region_of((16, 32, 33), calls)


def masked_attention() -> FrozenGraph:
    attention = "aten.scaled_dot_product_attention.default"
    operands = (Ref(INPUT), Ref(INPUT), Ref(INPUT), Ref(1))
    calls = [Call(attention, (*operands, 0.0, False, None))]
    mask = torch.ones(64, 64, dtype=torch.bool).tril()
    return region_of((4, 64, 32), calls, {1: mask})


WINDOW = ((5, 5), (1, 1), (2, 2), (1, 1))


def windows_of_images() -> FrozenGraph:
    calls = [
        Call("aten.transpose.int", (Ref(INPUT), 2, 3)),
        Call("aten.im2col.default", (Ref(1), *WINDOW)),
    ]
    return region_of((3, 16, 16), calls)


def images_of_windows() -> FrozenGraph:
    calls = [
        Call("aten.transpose.int", (Ref(INPUT), 1, 2)),
        Call("aten.col2im.default", (Ref(1), (16, 16), *WINDOW)),
    ]
    return region_of((256, 75), calls)


@pytest.mark.parametrize(
    ("frozen", "batch"),
    [
        (broadcast_matmul(), 8),
        (matmul_of_strided_rows(), 8),
        (broadcast_attention(False), 8),
        (broadcast_attention(True), 8),
        (attention_to_few_keys(), 8),
        (small_convolution(), 1),
        (low_and_wide_convolution(), 1),
        (pixels_with_a_margin(), 8),
        (sum_of_bytes(), 8),
        (resized_by_bicubic(), 8),
        (resized_by_pixels(), 8),
        (short_rows(), 8),
        (groups_of_columns(), 8),
        (product_of_parts(), 8),
        (masked_attention(), 8),
        (windows_of_images(), 8),
        (images_of_windows(), 8),
    ],
    ids=[
        "matmul",
        "strided matmul",
        "attention",
        "causal attention",
        "few keys",
        "small convolution",
        "low and wide convolution",
        "pixels with a margin",
        "sum of bytes",
        "bicubic",
        "nearest",
        "short rows",
        "groups of columns",
        "product of parts",
        "masked attention",
        "im2col",
        "col2im",
    ],
)
def test_workspace_that_a_package_may_ask_for_is_counted(
    frozen: FrozenGraph, batch: int
) -> None:
    samples = torch.randn(batch, *frozen.input_shape)
    found = allocated_peak(frozen.prefix(frozen.num_cuts), samples)
    peak = peak_bytes(frozen, frozen.num_cuts, batch) - SCRATCH_BYTES
    wanted = found + samples.nbytes + frozen.parameter_bytes
    assert wanted <= peak < 6 * wanted


def test_needs_are_counted_in_one_walk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    width = 400
    calls = [Call("aten.sigmoid.default", (Ref(INPUT),))] * width
    together = tuple(Ref(node) for node in range(1, width + 1))
    frozen = region_of(
        (1, 8), [*calls, Call("aten.cat.default", (together, 1))]
    )
    sizes = Value.num_bytes.fget  # type: ignore[attr-defined]
    asked: list[Value] = []

    def num_bytes(value: Value) -> int:
        asked.append(value)
        return int(sizes(value))

    monkeypatch.setattr(Value, "num_bytes", property(num_bytes))
    needs = needs_of(frozen, frozen.num_cuts)
    largest = 4 * 8 * (1 + 2 * width)
    assert needs.peak_bytes(1) == largest + largest // 64 + SCRATCH_BYTES
    assert len(asked) < 10 * width


def test_needs_keep_the_steps_that_can_be_the_largest() -> None:
    frozen = split(BranchedNet(), "mix", sample_shape=(3, 16, 16)).frozen
    every = list(steps(frozen, frozen.num_cuts))
    needs = needs_of(frozen, frozen.num_cuts)
    assert len(needs.steps) < len(every)
    for batch in (0, 1, 7, 1000):
        largest = max(c + batch * s for c, s in every)
        assert needs.peak_bytes(batch) == largest + frozen.parameter_bytes


def test_batch_for_is_the_largest_that_fits() -> None:
    frozen = split(BranchedNet(), "mix", sample_shape=(3, 16, 16)).frozen
    for cut in range(1, frozen.num_cuts + 1):
        available = peak_bytes(frozen, cut, 17) + 5
        batch = batch_for(frozen, cut, available, 1000)
        assert peak_bytes(frozen, cut, batch) <= available
        assert peak_bytes(frozen, cut, batch + 1) > available


def test_batch_for_keeps_the_maximum() -> None:
    frozen = split(BranchedNet(), "mix", sample_shape=(3, 16, 16)).frozen
    assert batch_for(frozen, 1, 1 << 40, 64) == 64


def test_batch_for_is_zero_when_not_one_sample_fits() -> None:
    frozen = split(BranchedNet(), "mix", sample_shape=(3, 16, 16)).frozen
    assert batch_for(frozen, 1, frozen.parameter_bytes, 64) == 0
    assert batch_for(frozen, 1, 10, 64) == 0
