"""Profiles the cost of a frozen region on one device, cut by cut.

One instrumented pass measures all cuts: the prefix of the last cut is run node
by node, and each node is timed.  Timing has a cost of its own, so the seconds
are scaled to the duration of an ordinary forward pass.

A budget limits the duration.  A short one means fewer passes, then fewer batch
sizes; the smallest batch always has one pass.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from hapi_protocol.profiles import BatchProfile, ModelProfile
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.inputs.reference_image import reference_seconds
from hapi_splitter.numerics import numerics_tag
from hapi_splitter.profiling.memory_model import sample_bytes_by_cut
from hapi_splitter.profiling.node_timer import (
    Clock,
    TimedWalk,
    ready_to_run,
    timer_for,
)

LARGEST_BATCH: Mapping[str, int] = MappingProxyType({"cpu": 16, "cuda": 64})
"""Largest batch of a forward pass, by kind of device.

Measured on one core of an EPYC (family 26), batches of 16 against 8: a sample
of mobilenet_v3, shufflenet_v2, densenet121 or resnet50 takes 27 to 35 % less
time, one of vgg11 or convnext_tiny 5 % more.  With 32 most take longer again,
because the kernel maps the memory of their activations each time.
"""
DEFAULT_BATCHES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "cpu": (1, LARGEST_BATCH["cpu"]),
        "cuda": (1, 8, 32, LARGEST_BATCH["cuda"]),
    }
)
"""Batch sizes that are measured, by kind of device."""
DEFAULT_BUDGET_SECONDS = 10.0
"""Chosen, not measured: jobs wait for a profile, or stream meanwhile, and
clients and workers give budgets of their own."""
MAX_PASSES = 7
"""Maximum passes of one batch size.  Chosen, not measured: a median of seven
ignores three disturbed passes; the budget mostly ends before."""
_NEXT_BATCH_COST = 1.5
"""Cost of a new batch size in passes, each of which runs the region twice: a
warm-up runs it once, and a pass follows."""


def profile_model(
    frozen: FrozenGraph,
    device: torch.device,
    *,
    cores: float,
    memory_limit_bytes: int,
    num_devices: int = 1,
    digest: str | None = None,
    batches: Sequence[int] | None = None,
    budget_seconds: float = DEFAULT_BUDGET_SECONDS,
    load_seconds: float = 0.0,
) -> ModelProfile:
    """Measures all that the planner needs of one tier, in this thread.

    Args:
        frozen: the region, with its weights on ``device``.
        device: device that runs it; here one forward pass at a time.
        cores: number of cores of this tier.
        memory_limit_bytes: limit of weights and passes on the device.
        num_devices: number of forward passes that this tier runs at a time.
        digest: digest of the package; None for the region's own.
        batches: as for :func:`profile_region`.
        budget_seconds: as for :func:`profile_region`.
        load_seconds: time to check and load the package, 0 if unknown.

    Raises:
        OutOfMemoryError: as :func:`profile_region`.
    """
    on_cpu = device.type == "cpu"
    return ModelProfile(
        digest=frozen.digest if digest is None else digest,
        numerics_tag=numerics_tag(str(device)),
        device=device.type,
        device_name=_device_name(device),
        num_devices=num_devices,
        cores=cores,
        forward_threads=torch.get_num_threads() if on_cpu else 0,
        batches=profile_region(
            frozen,
            device,
            batches=batches,
            budget_seconds=budget_seconds,
        ),
        reference_seconds=reference_seconds(frozen.transform),
        load_seconds=load_seconds,
        parameter_bytes=frozen.parameter_bytes,
        memory_limit_bytes=memory_limit_bytes,
        peak_bytes=peak_bytes_by_cut(frozen, device),
    )


def profile_region(
    frozen: FrozenGraph,
    device: torch.device,
    *,
    batches: Sequence[int] | None = None,
    budget_seconds: float = DEFAULT_BUDGET_SECONDS,
    clock: Clock = time.perf_counter,
) -> tuple[BatchProfile, ...]:
    """Measures a forward pass to each cut, for several batch sizes.

    Results are medians over passes with exact numerics and an input that is
    on the device already; by CUDA events on a GPU, by ``clock`` on a CPU.

    Args:
        frozen: the region, with its weights on ``device``.
        device: device that runs it.
        batches: batch sizes; None for the defaults of the kind of device.
        budget_seconds: time after which no further pass begins.
        clock: seconds; used for the budget, and on a CPU for the passes.

    Returns:
        At least one, ascending by batch; each with ascending cumulative
        seconds for cut 0 to ``num_cuts``.

    Raises:
        OutOfMemoryError: the smallest batch does not fit on the device.
        ValueError: one of ``batches`` is below 1.
    """
    sizes = sorted(set(batches or DEFAULT_BATCHES[device.type]))
    if sizes[0] < 1:
        raise ValueError(f"batches are {batches}; they must be from 1 on")
    deadline = clock() + budget_seconds
    with ready_to_run(device):
        region = _Region(frozen, device, clock)
        runs = _first_passes(region, sizes, deadline, clock)
        _further_passes(runs, deadline, clock)
    return tuple(run.profile() for run in runs)


def peak_bytes_by_cut(
    frozen: FrozenGraph, device: torch.device
) -> tuple[int, ...]:
    """Returns peak bytes of a pass of one sample, weights included.

    On a CPU they are those of :mod:`hapi_splitter.profiling.memory_model`.  On
    CUDA the estimate is raised to the bytes that the device's allocator has
    handed out, if these are more.  It is never lowered, because a worker
    admits jobs by it.

    Returns:
        ``[num_cuts + 1]``, ascending.
    """
    working = sample_bytes_by_cut(frozen)
    factor = 1.0
    if device.type == "cuda":
        factor = max(1.0, _allocated_bytes(frozen, device) / working[-1])
    return tuple(frozen.parameter_bytes + round(factor * w) for w in working)


def _allocated_bytes(frozen: FrozenGraph, device: torch.device) -> int:
    """Measures the peak of a pass of one sample, without the weights."""
    module = frozen.prefix(frozen.num_cuts)
    with ready_to_run(device):
        samples = _samples(frozen, 1, device)
        # Libraries allocate workspaces at their first use and keep them.
        module(samples)
        before = torch.cuda.memory_allocated(device) - samples.nbytes
        torch.cuda.reset_peak_memory_stats(device)
        module(samples)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before


def _first_passes(
    region: _Region, sizes: Sequence[int], deadline: float, clock: Clock
) -> list[_BatchRun]:
    runs: list[_BatchRun] = []
    for size in sizes:
        if runs:
            scale = _NEXT_BATCH_COST * size / runs[-1].batch
            if clock() + scale * runs[-1].pass_seconds > deadline:
                break
        try:
            run = _BatchRun(region, size)
            run.warm_up()
            run.measure()
        except torch.OutOfMemoryError:
            if not runs:
                raise
            torch.cuda.empty_cache()
            break
        runs.append(run)
    return runs


def _further_passes(
    runs: Sequence[_BatchRun], deadline: float, clock: Clock
) -> None:
    for number, run in enumerate(runs):
        now = clock()
        share = now + (deadline - now) / (len(runs) - number)
        while run.num_passes < MAX_PASSES and (
            clock() + run.pass_seconds <= share
        ):
            run.measure()


class _Region:
    """The module, its timed walk, and the calls of its cuts."""

    def __init__(
        self, frozen: FrozenGraph, device: torch.device, clock: Clock
    ) -> None:
        self.frozen = frozen
        self.device = device
        self.clock = clock
        self.timer = timer_for(device, clock)
        self.module = frozen.prefix(frozen.num_cuts)
        self.walk = TimedWalk(self.module, self.timer)
        self.places = [
            self.walk.positions[frozen.fused_into(cut.node)]
            for cut in frozen.cuts
        ]
        """Position of the call whose result is each cut's tensor."""


class _BatchRun:
    """The passes of one batch size."""

    def __init__(self, region: _Region, batch: int) -> None:
        self.batch = batch
        self.pass_seconds = 0.0
        """Seconds of the budget that the last pass took."""
        self._region = region
        self._samples = _samples(region.frozen, batch, region.device)
        self._whole: list[float] = []
        self._calls: list[list[float]] = []

    @property
    def num_passes(self) -> int:
        return len(self._whole)

    def warm_up(self) -> None:
        self._region.module(self._samples)
        self._region.timer.settle()

    def measure(self) -> None:
        """Times one ordinary pass, and one node by node."""
        started = self._region.clock()
        timer = self._region.timer
        span = timer.mark()
        self._region.module(self._samples)
        end = timer.mark()
        timer.settle()
        self._whole.append(timer.seconds(span, end))
        self._calls.append(self._region.walk.seconds(self._samples))
        self.pass_seconds = self._region.clock() - started

    def profile(self) -> BatchProfile:
        whole = statistics.median(self._whole)
        calls = [
            statistics.median(seconds)
            for seconds in zip(*self._calls, strict=True)
        ]
        reached = list(itertools.accumulate(calls))
        # With a coarse clock all calls may take 0 s: the last gets it all.
        factor = whole / reached[-1] if reached[-1] > 0 else 0.0
        *earlier, _last = [
            min(factor * reached[place], whole)
            for place in self._region.places
        ]
        return BatchProfile(self.batch, (0.0, *earlier, whole))


def _samples(
    frozen: FrozenGraph, batch: int, device: torch.device
) -> torch.Tensor:
    """``[batch, *input_shape]`` on the device, the same each time."""
    return frozen.examples(batch).to(device)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line for line in file if line.startswith("model name")]
    except OSError:  # not Linux
        names = []
    name = names[0].partition(":")[2].strip() if names else ""
    return name or platform.machine() or "CPU"
