"""Measured memory is never below what the allocator hands out."""

import math

import pytest
import torch
from torchvision import models

from allocations import allocated_peak
from hapi_splitter.freezing.split_model import split
from hapi_splitter.graph.program import INPUT, Affine, Call, Ref
from hapi_splitter.package import memory_measurement
from hapi_splitter.package.memory_measurement import (
    LARGE_BATCHES,
    MAX_PACKED_BYTES,
    MemoryMeter,
    fit_line,
)
from hapi_splitter.package.subprocess_validation import probe_batchwise
from hapi_splitter.profiling.memory_model import memory_requirement
from regions import region_of

SIGMOID = Call("aten.sigmoid.default", (Ref(INPUT),))


def measured(frozen):
    """The fast region with its measured memory, as a worker has it."""
    fast = frozen.to("cpu", fast=True)
    fast.measured_memory = probe_batchwise(fast)
    return fast


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1, 10), (2, 20), (3, 30)], (0, 10)),
        ([(1, 110), (2, 120), (3, 130)], (100, 10)),
        ([(1, 500), (2, 120), (3, 130)], (490, 10)),
        ([(1, 10), (2, 300), (3, 310)], (280, 10)),
        ([(1, 7), (2, 7), (3, 7)], (7, 0)),
        ([(1, 9), (2, 4), (3, 2)], (9, 0)),
        ([(2, 20), (3, 30), (16, 100), (17, 105)], (0, 10)),
        ([(2, 20), (3, 30), (16, 400), (17, 420)], (80, 20)),
    ],
)
def test_line_is_nowhere_below_the_points(points, line):
    constant, slope = fit_line(points)
    assert (constant, slope) == line
    assert all(constant + batch * slope >= size for batch, size in points)


def test_peak_and_rest_of_each_call_are_exact():
    calls = [
        Call("aten.cat.default", ((Ref(INPUT), Ref(INPUT), Ref(INPUT)), 1)),
        Call("aten.slice.Tensor", (Ref(1), 1, 0, 4, 1)),
        Call("aten.sigmoid.default", (Ref(2),)),
    ]
    size = 4 * 64 * 64
    assert probe_batchwise(region_of((4, 64, 64), calls)) == {
        INPUT: ((0, 4 * size), (0, 4 * size)),
        1: ((0, 16 * size), (0, 16 * size)),
        2: ((0, 16 * size), (0, 16 * size)),
        3: ((0, 20 * size), (0, 8 * size)),
    }


def test_nothing_is_measured_if_torch_reports_no_allocations(monkeypatch):
    monkeypatch.setattr(memory_measurement, "_MEMORY", "[renamed]")
    assert probe_batchwise(region_of((8,), [SIGMOID])) == {}
    view = [Call("aten.unsqueeze.default", (Ref(INPUT), 1))]
    assert probe_batchwise(region_of((8,), view)) != {}


@pytest.mark.parametrize(
    "limit", ["MAX_LARGE_SECONDS", "MAX_LARGE_BYTES", None]
)
def test_large_batches_are_run_if_they_are_affordable(limit, monkeypatch):
    if limit is not None:
        monkeypatch.setattr(memory_measurement, limit, 0)
    meter = MemoryMeter(region_of((8,), [SIGMOID]))
    for batch in (1, 2, 3):
        meter.run(torch.zeros(batch, 8))
    expected = LARGE_BATCHES if limit is None else ()
    assert meter.large_batches() == expected


def calls_of(*calls):
    return [Call(f"aten.{op}", arguments) for op, arguments in calls]


def convolution(kernel, padding, groups=1):
    sides = ((1, 1), (padding, padding), (1, 1))
    arguments = (Ref(INPUT), Ref(1), None, *sides, groups)
    return ("conv2d.default", arguments), {1: torch.randn(kernel)}


def pooled_convolution(kernel, groups, padding):
    call, weights = convolution(kernel, padding, groups)
    pool = ((3, 3), (2, 2), (1, 1), (1, 1), False)
    calls = calls_of(call, ("max_pool2d.default", (Ref(2), *pool)))
    return (kernel[1] * groups, 28, 28), calls, weights


def single_convolution(shape, kernel, padding):
    call, weights = convolution(kernel, padding)
    return shape, calls_of(call), weights


def broadcast_attention(is_causal):
    rest = (None, 0.0, is_causal, None)
    calls = calls_of(
        ("unsqueeze.default", (Ref(INPUT), 2)),
        ("unsqueeze.default", (Ref(INPUT), 1)),
        (ATTENTION, (Ref(1), Ref(2), Ref(2), *rest)),
    )
    return (8, 64, 32), calls


ATTENTION = "scaled_dot_product_attention.default"
BATCH = Affine(1)
MASK = torch.ones(64, 64, dtype=torch.bool).tril()
WINDOW = ((5, 5), (1, 1), (2, 2), (1, 1))
TURNED = ("transpose.int", (Ref(INPUT), 2, 3))

REGIONS = {
    "3x3": pooled_convolution((64, 16, 3, 3), 1, 1),
    "depthwise": pooled_convolution((72, 1, 5, 5), 72, 2),
    "1x1 of groups": pooled_convolution((144, 64, 1, 1), 3, 0),
    "7x7 of groups": pooled_convolution((144, 1, 7, 7), 72, 3),
    "1x1 with padding": pooled_convolution((144, 16, 1, 1), 1, 3),
    "grey": pooled_convolution((64, 1, 5, 5), 1, 2),
    "channelwise": pooled_convolution((64, 1, 1, 1), 64, 0),
    "matmul": (
        (64, 256),
        calls_of(
            ("reshape.default", (Ref(INPUT), (BATCH, 64, 1, 1, 256))),
            ("reshape.default", (Ref(INPUT), (BATCH, 1, 64, 256, 1))),
            ("matmul.default", (Ref(1), Ref(2))),
        ),
    ),
    "strided matmul": (
        (7, 64, 256),
        calls_of(
            ("transpose.int", (Ref(INPUT), 1, 2)),
            ("matmul.default", (Ref(2), Ref(1))),
        ),
        {1: torch.randn(256, 32)},
    ),
    "attention": broadcast_attention(False),
    "causal attention": broadcast_attention(True),
    "few keys": (
        (8, 64, 32),
        calls_of(
            ("slice.Tensor", (Ref(INPUT), 3, 0, 2, 1)),
            ("unsqueeze.default", (Ref(INPUT), 1)),
            ("slice.Tensor", (Ref(2), 3, 0, 2, 1)),
            (ATTENTION, (Ref(2), Ref(3), Ref(3), None, 0.0, False, None)),
        ),
    ),
    "small convolution": single_convolution((1280, 2, 2), (1, 1280, 3, 3), 20),
    "low and wide convolution": single_convolution(
        (6, 56, 56), (2, 6, 1, 7), 0
    ),
    "pixels with padding": single_convolution((96, 14, 14), (2, 96, 1, 1), 9),
    "sum of bytes": (
        (64, 256),
        calls_of(
            ("_to_copy.default", (Ref(INPUT), torch.uint8)),
            ("sum.dim_IntList", (Ref(1), (2,), True, None)),
            ("_to_copy.default", (Ref(2), torch.float32)),
        ),
    ),
    "bicubic": (
        (16, 32, 24),
        calls_of(
            TURNED,
            (
                "upsample_bicubic2d.default",
                (Ref(1), (48, 40), False, None, None),
            ),
        ),
    ),
    "nearest": (
        (16, 32, 24),
        calls_of(
            ("upsample_nearest2d.default", (Ref(INPUT), (48, 40), None, None))
        ),
    ),
    # The statistics are as large as the activations.
    "short rows": (
        (64, 40, 1),
        calls_of(
            ("layer_norm.default", (Ref(INPUT), (1,), None, None, 1e-5, False))
        ),
    ),
    "groups of columns": (
        (16, 32, 24),
        calls_of(
            TURNED,
            ("group_norm.default", (Ref(1), 16, None, None, 1e-5, False)),
        ),
    ),
    # Of matrices with strided rows.
    "product of parts": (
        (16, 32, 33),
        calls_of(
            ("slice.Tensor", (Ref(INPUT), 3, 0, 30, 1)),
            ("transpose.int", (Ref(1), 2, 3)),
            ("matmul.default", (Ref(2), Ref(1))),
        ),
    ),
    "masked attention": (
        (4, 64, 32),
        calls_of((ATTENTION, (*[Ref(INPUT)] * 3, Ref(1), 0.0, False, None))),
        {1: MASK},
    ),
    "im2col": (
        (3, 16, 16),
        calls_of(TURNED, ("im2col.default", (Ref(1), *WINDOW))),
    ),
    "col2im": (
        (256, 75),
        calls_of(
            ("transpose.int", (Ref(INPUT), 1, 2)),
            ("col2im.default", (Ref(1), (16, 16), *WINDOW)),
        ),
    ),
}


HOLES = 2.0
"""Most memory of a pass over that of its tensors, as predictions assume."""
CHANGING = {"small convolution", "strided matmul", "pixels with padding"}
"""Regions whose kernels need more memory for some batches than for larger
ones."""


@pytest.mark.parametrize("name", REGIONS)
def test_peak_bounds_what_a_package_may_ask_for(name):
    fast = measured(region_of(*REGIONS[name]))
    packed = sum(weight.nbytes for weight in fast.weights.values())
    for cut in range(1, fast.num_cuts + 1):
        for batch in (1, 3, 15, 16, 40):
            samples = torch.randn(batch, *fast.input_shape)
            found = allocated_peak(fast.prefix(cut), samples) + samples.nbytes
            needs = memory_requirement(fast, cut)
            peak = needs.peak_bytes(batch) - fast.parameter_bytes
            spare = min(packed, MAX_PACKED_BYTES) + (1 << 19)
            assert HOLES * found <= peak, (cut, batch)
            most = HOLES * (2 * found + spare)
            assert peak <= most or name in CHANGING, (cut, batch)


MODELS = {
    "resnet18": (models.resnet18, "layer4"),
    "mobilenet_v3_small": (models.mobilenet_v3_small, "avgpool"),
    "shufflenet": (models.shufflenet_v2_x0_5, "conv5"),
}


@pytest.mark.parametrize("name", MODELS)
def test_peak_of_models_is_near_the_allocations(name, monkeypatch):
    build, freeze = MODELS[name]
    shape = (3, 128, 128)
    model = build(weights=None).eval()
    frozen = split(model, freeze, sample_shape=shape).frozen
    samples = torch.randn(24, *shape)
    for large_seconds in (None, 0.0, 60.0):
        if large_seconds is None:
            fast, factor = frozen.to("cpu", fast=True), math.inf
        else:
            monkeypatch.setattr(
                memory_measurement, "MAX_LARGE_SECONDS", large_seconds
            )
            fast, factor = measured(frozen), 1.5 * HOLES
        for cut in (1, fast.num_cuts // 2, fast.num_cuts):
            found = allocated_peak(fast.prefix(cut), samples) + samples.nbytes
            needs = memory_requirement(fast, cut)
            peak = needs.peak_bytes(24) - fast.parameter_bytes
            assert HOLES * found <= peak < factor * found
