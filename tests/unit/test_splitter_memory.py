"""The memory model is never below what the allocator hands out."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hapi_splitter.memory import batch_for, peak_bytes
from hapi_splitter.trace import split
from reference_models import REFERENCE_MODELS, BranchedNet


def allocated_peak(module: torch.nn.Module, samples: torch.Tensor) -> int:
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


@pytest.mark.parametrize(
    "name", ["resnet18", "densenet121", "vit_b_16", "mobilenet_v3_small"]
)
def test_peak_is_an_upper_bound_of_allocations(name: str) -> None:
    reference = REFERENCE_MODELS[name]
    frozen = split(
        reference.build(),
        reference.freeze,
        sample_shape=reference.sample_shape,
    ).frozen
    samples = torch.randn(8, *reference.sample_shape)
    for cut in (1, frozen.num_cuts // 2, frozen.num_cuts):
        peak = peak_bytes(frozen, cut, 8)
        found = allocated_peak(frozen.prefix(cut), samples)
        assert found > 0
        assert peak >= found + frozen.parameter_bytes + samples.nbytes
        assert peak - frozen.parameter_bytes < 12 * (found + samples.nbytes)


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
