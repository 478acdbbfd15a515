"""Predictions of memory: estimates, encodings, and the batch that fits."""

import math

import pytest
import torch

from allocations import allocated_peak
from hapi_protocol.encodings import DTYPES
from hapi_splitter import encodings as encodings_module
from hapi_splitter.cuts import CallMemory
from hapi_splitter.encodings import CHUNK_BYTES, encode
from hapi_splitter.freezing.split_model import split
from hapi_splitter.graph.batch_independence import Value
from hapi_splitter.graph.program import INPUT, Call, Ref
from hapi_splitter.profiling.memory_model import (
    memory_by_call,
    memory_requirement,
)
from reference_models import BranchedNet
from regions import region_of

SCRATCH_BYTES = 1 << 18
"""Added to each peak."""
MARGIN = 2 * (1 + 1 / 64)
"""A prediction over the bytes of tensors, on a CPU."""


@pytest.fixture(scope="module")
def branched():
    return split(BranchedNet(), "mix", sample_shape=(3, 16, 16)).frozen


def test_measurement_holds_for_the_fast_region_on_a_cpu_only(branched):
    estimated = memory_by_call(branched)
    branched.measured_memory = dict.fromkeys(
        estimated, CallMemory((1 << 30, 0), (1 << 30, 0))
    )
    try:
        fast = branched.to("cpu", fast=True)
        assert memory_by_call(fast) is branched.measured_memory
        assert memory_requirement(fast, 1).peak_bytes(1) > 1 << 30
        for other in (branched, fast.to("meta")):
            assert memory_requirement(other, 1).peak_bytes(1) < 1 << 30
    finally:
        branched.measured_memory = {}


SIGMOID = Call("aten.sigmoid.default", (Ref(INPUT),))
STRIDED = [
    SIGMOID,
    Call("aten.transpose.int", (Ref(1), 1, 2)),
    Call("aten.slice.Tensor", (Ref(2), 1, 0, 40, 1)),
]
"""Features that are a view and not contiguous."""


@pytest.mark.parametrize("special", [0.5, math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "calls"),
    [((64, 50), STRIDED), ((16, 48, 48), [SIGMOID]), ((3,), [SIGMOID])],
    ids=["strided", "channels", "few values"],
)
def test_peak_with_encoding_is_an_upper_bound_of_allocations(
    shape, calls, dtype, special, monkeypatch
):
    frozen = region_of(shape, calls)
    prefix = frozen.prefix(frozen.num_cuts)
    samples = torch.randn(8, *frozen.input_shape)

    def encoded(samples):
        features = prefix(samples)
        if special != 0.5:
            # In place, so that it costs nothing.
            features[0] = special
        encode(features, dtype)

    for chunk_bytes in (CHUNK_BYTES, 3 * 4 * 16 * 48 * 48, 1):
        monkeypatch.setattr(encodings_module, "CHUNK_BYTES", chunk_bytes)
        found = allocated_peak(encoded, samples)
        needs = memory_requirement(frozen, frozen.num_cuts, dtype)
        wanted = found + samples.nbytes + frozen.parameter_bytes
        # Of a chunk that the batch does not fill, and scratch memory.
        spare = 2 * chunk_bytes + 2 * 4096 + SCRATCH_BYTES
        assert wanted <= needs.peak_bytes(8) < 3 * wanted + spare
        alone = memory_requirement(frozen, frozen.num_cuts).peak_bytes(8)
        assert needs.peak_bytes(8) >= alone


def test_needs_are_counted_in_one_walk(monkeypatch):
    width = 400
    together = tuple(Ref(node) for node in range(1, width + 1))
    calls = [*[SIGMOID] * width, Call("aten.cat.default", (together, 1))]
    frozen = region_of((1, 8), calls)
    sizes = Value.num_bytes.fget
    asked = []

    def num_bytes(value):
        asked.append(value)
        return int(sizes(value))

    monkeypatch.setattr(Value, "num_bytes", property(num_bytes))
    needs = memory_requirement(frozen, frozen.num_cuts)
    largest = 4 * 8 * (1 + 2 * width)
    assert needs.peak_bytes(1) == 2 * (largest + largest // 64) + SCRATCH_BYTES
    assert len(asked) < 10 * width


def test_needs_keep_the_steps_that_can_be_the_largest(branched):
    every = [call.peak for call in memory_by_call(branched).values()]
    needs = memory_requirement(branched, branched.num_cuts)
    assert len(needs.steps) < len(every)
    for batch in (0, 1, 7, 1000):
        largest = max(c + batch * s for c, s in every)
        peak = needs.peak_bytes(batch) - branched.parameter_bytes
        assert largest < peak <= largest * MARGIN + SCRATCH_BYTES


def test_batch_for_is_the_largest_that_fits(branched):
    for cut in range(1, branched.num_cuts + 1):
        needs = memory_requirement(branched, cut)
        available = needs.peak_bytes(17) + 5
        batch = needs.batch_for(available, 1000)
        assert needs.peak_bytes(batch) <= available
        assert needs.peak_bytes(batch + 1) > available
        assert needs.batch_for(1 << 40, 64) == 64
        for too_few in (branched.parameter_bytes, 10):
            assert needs.batch_for(too_few, 64) == 0
