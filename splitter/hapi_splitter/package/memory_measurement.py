"""Measures the working memory of each call of a region on a CPU.

torch's profiler reports every allocation of its CPU allocator on the calling
thread, the scratch memory of oneDNN included. One pass gives the peak at each
call; passes with several batch sizes give a linear function of the batch.

Memory was found to be exactly linear unless torch chooses another kernel. It
does so between batches of 1 and 2, and at 16 (``ConvParams::use_mkldnn`` of
its ``Convolution.cpp``), so slopes are taken between batches of 2 and 3 and,
if that is affordable, of 16 and 17.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.autograd.profiler import profile, record_function

from hapi_splitter.cuts import CallMemory, FrozenGraph, LinearBytes
from hapi_splitter.graph.lowering import META_CALL
from hapi_splitter.graph.program import INPUT

LARGE_BATCHES = (16, 17)
"""Batch sizes for which torch uses its kernels for large batches."""
MAX_LARGE_SECONDS = 1.0
"""CPU time that the passes of large batches may take."""
MAX_LARGE_BYTES = 1 << 30
"""Working memory that a pass of a large batch may take."""
MAX_PACKED_BYTES = 16 << 20
"""Most bytes of packed weights that are added to a call's peak. Kernels of
larger batches may pack weights, and MKL allocates without torch."""

_MARK = "hapi:"
_MEMORY = "[memory]"

_Bytes = Mapping[int, tuple[int, int]]
"""Peak and remaining bytes of one pass, by the id of the call."""


class MemoryMeter:
    """Runs a region on a CPU and measures what each call allocates.

    Args:
        frozen: the region, its weights on a CPU.
    """

    def __init__(self, frozen: FrozenGraph) -> None:
        self._known = frozen.known
        self._program = frozen.program_from(INPUT)
        self._module = frozen.prefix(frozen.num_cuts)
        self._passes: dict[int, _Bytes] = {}
        self._seconds: dict[int, float] = {}
        self._is_complete = True

    def run(self, samples: torch.Tensor) -> torch.Tensor:
        """Returns the features of ``[batch, *input_shape]``.

        The last pass of each batch size counts: the first one may allocate
        what stays.
        """
        started = time.process_time()
        # A walk keeps tensors; they must not be freed in the next profile.
        walk = _MarkedWalk(self._module)
        with profile(profile_memory=True) as run:
            features: torch.Tensor = walk.run(samples)
        assert run.kineto_results is not None
        events = run.kineto_results.events()
        batch = len(samples)
        self._passes[batch] = _bytes_by_call(events, samples.nbytes)
        peak = max(peak for peak, _ in self._passes[batch].values())
        self._is_complete &= peak >= _held_bytes(samples, features)
        self._seconds[batch] = time.process_time() - started
        return features

    def large_batches(self) -> tuple[int, ...]:
        """:data:`LARGE_BATCHES`, or none if they are not affordable."""
        last = max(self._passes)
        seconds = self._seconds[last] * sum(LARGE_BATCHES) / last
        peak = max(
            constant + max(LARGE_BATCHES) * per_sample
            for (constant, per_sample), _ in self._fitted().values()
        )
        is_affordable = seconds <= MAX_LARGE_SECONDS and (
            peak <= MAX_LARGE_BYTES
        )
        return LARGE_BATCHES if is_affordable else ()

    def calls(self) -> dict[int, CallMemory]:
        """Memory at each call, by id in order of execution.

        Empty if torch has not reported the allocation of the features.
        """
        return self._fitted() if self._is_complete else {}

    def _fitted(self) -> dict[int, CallMemory]:
        passes = sorted(self._passes.items())
        fitted = {}
        for call in passes[0][1]:
            (constant, per_sample), after = (
                fit_line((batch, run[call][kind]) for batch, run in passes)
                for kind in (0, 1)
            )
            constant += min(self._weight_bytes(call), MAX_PACKED_BYTES)
            fitted[call] = CallMemory((constant, per_sample), after)
        return fitted

    def _weight_bytes(self, node: int) -> int:
        if node == INPUT:
            return 0
        return sum(
            self._known[read].num_bytes
            for read in self._program.call(node).refs()
            if read != INPUT and read < self._program.first_call
        )


def fit_line(points: Iterable[tuple[int, int]]) -> LinearBytes:
    """Fits a line that is nowhere below the measurements.

    Args:
        points: batch size and bytes, by ascending batch size.

    Returns:
        The steepest slope between consecutive batch sizes, 1 excluded, and
        the constant for it.
    """
    known = list(points)
    slopes = [
        more - fewer
        for (batch, fewer), (following, more) in pairwise(known)
        if batch > 1 and following == batch + 1
    ]
    slope = max([0, *slopes])
    return max([0, *(size - batch * slope for batch, size in known)]), slope


class _MarkedWalk(fx.Interpreter):
    """Runs a module call by call and marks each start in the profile.

    Nodes that are no calls of the program belong to the call after them.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._marks: dict[fx.Node, int | None] = {}
        call: int | None = None
        for node in reversed(module.graph.nodes):
            call = node.meta.get(META_CALL, call)
            self._marks[node] = call

    def run_node(self, n: fx.Node) -> Any:
        call = self._marks[n]
        if call is None or n.op == "placeholder":
            return super().run_node(n)
        with record_function(f"{_MARK}{call}"):
            return super().run_node(n)


def _held_bytes(samples: torch.Tensor, features: torch.Tensor) -> int:
    storage = features.untyped_storage()
    is_view = storage.data_ptr() == samples.untyped_storage().data_ptr()
    return samples.nbytes + (0 if is_view else storage.nbytes())


def _bytes_by_call(events: Iterable[Any], input_bytes: int) -> _Bytes:
    call, live = INPUT, input_bytes
    peaks, after = {INPUT: live}, {}
    for name, num_bytes in _in_order(events):
        if name == _MEMORY:
            live += num_bytes
        else:
            following = int(name.removeprefix(_MARK))
            if following != call:
                after[call] = live
            call = following
        peaks[call] = max(peaks.get(call, 0), live)
    after[call] = live
    return {call: (peak, after[call]) for call, peak in peaks.items()}


def _in_order(events: Iterable[Any]) -> Iterator[tuple[str, int]]:
    for event in sorted(events, key=lambda event: event.start_ns()):
        name = event.name()
        if name == _MEMORY or name.startswith(_MARK):
            yield name, event.nbytes()
