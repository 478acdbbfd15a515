"""Records the allocations of torch's CPU allocator during a call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.profiler import profile


def allocated_peak(
    module: Callable[[torch.Tensor], object], samples: torch.Tensor
) -> int:
    """Largest sum of live allocations, by torch's profiler."""
    with torch.inference_mode(), profile(profile_memory=True) as run:
        module(samples)
    assert run.kineto_results is not None
    live = peak = 0
    for event in run.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
