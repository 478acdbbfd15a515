"""Predicts the memory that a prefix needs for any batch.

``peak = parameters + constant + batch * per_sample``, for the call that needs
most.  A worker measures the calls of a package when it validates it
(:mod:`hapi_splitter.package.memory_measurement`).  Regions without such a
measurement (on the client, or on a GPU) have an estimate from shapes: live
tensors, with buffers reused as in :mod:`hapi_splitter.graph.lowering`, and a
copy of the inputs and the result of a call unless it is elementwise.

Predictions are raised by 1/64 and 256 KiB, because allocators round up.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from hapi_splitter.cuts import CallMemory, FrozenGraph, LinearBytes
from hapi_splitter.encodings import encoder_step
from hapi_splitter.graph import batch_independence as by
from hapi_splitter.graph.batch_independence import Value
from hapi_splitter.graph.buffer_reuse import BufferReuse
from hapi_splitter.graph.lowering import LINEAR, needed
from hapi_splitter.graph.operators import (
    DTYPE_NAMES,
    EMBEDDING,
    VIEWS,
    op_names,
    operators,
)
from hapi_splitter.graph.program import INPUT, Call

_MARGIN_DIVISOR = 64
"""1 / this is added to a prediction.  Chosen, not measured: allocators align
tensors to 64 bytes on a CPU and 512 on a GPU, which is less but for tiny ones;
see :data:`_MARGIN_BYTES`."""
_HEAP_FACTOR = 2
"""Raises predictions on a CPU, whose heap has holes: passes of seven models
took 0.98 to 1.79 times the memory of their tensors (``benchmarks memory``)."""
_MARGIN_BYTES = 1 << 18
"""Added for many tiny tensors: 512 bytes for each of 512."""
_MAY_COPY = op_names("reshape contiguous _to_copy")
"""Views that copy tensors in another memory format or dtype."""
_WITHOUT_COPIES = frozenset({by.elementwise, by.cat, by.stack})
"""Rules of operators that read tensors in any memory format."""
_WITHOUT_PACKING = frozenset({EMBEDDING, LINEAR})
"""Operators that do not copy their weights."""


@dataclass(frozen=True, slots=True)
class MemoryRequirement:
    """Memory that a prefix needs for any batch.

    Args:
        parameter_bytes: bytes of the weights of the whole region.
        steps: calls that can be the largest one for some batch.
    """

    parameter_bytes: int
    steps: tuple[LinearBytes, ...]

    def peak_bytes(self, batch: int) -> int:
        """Returns the bytes of a batch, with its input and the weights."""
        return self.parameter_bytes + max(
            constant + batch * per_sample
            for constant, per_sample in self.steps
        )

    def batch_for(self, available_bytes: int, maximum: int) -> int:
        """Returns the largest batch up to ``maximum`` that fits, or 0."""
        free = available_bytes - self.parameter_bytes
        batch = maximum
        for constant, per_sample in self.steps:
            if free < constant:
                return 0
            if per_sample:
                batch = min(batch, (free - constant) // per_sample)
        return max(batch, 0)


def memory_requirement(
    frozen: FrozenGraph, cut: int, encoding: str | None = None
) -> MemoryRequirement:
    """Returns the memory of ``frozen.prefix(cut)`` and of encoding its result.

    Args:
        frozen: the region.
        cut: 0 to ``num_cuts``.
        encoding: encoding of the features, made on the same device; None
            for the prefix alone.

    Raises:
        AnnotationError: ``unknown_encoding``.
        UnsupportedError: ``cut_out_of_range``.
    """
    end = frozen.fused_into(frozen.node_at(cut))
    calls = memory_by_call(frozen)
    num_calls = list(calls).index(end) + 1
    factor = _HEAP_FACTOR if frozen.is_on_cpu else 1
    every = {
        _with_margin(call.peak, factor)
        for call in itertools.islice(calls.values(), num_calls)
    }
    if encoding is not None:
        value = frozen.values[frozen.node_at(cut)]
        dtype = DTYPE_NAMES[value.dtype]
        encoder = encoder_step(value.shape[1:], encoding, dtype)
        every.add(_sum(_with_margin(calls[end].after, factor), encoder))
    kept: list[LinearBytes] = []
    for step in sorted(every, reverse=True):
        # Constants descend here, so a step counts only if it grows faster.
        if not kept or step[1] > kept[-1][1]:
            kept.append(step)
    return MemoryRequirement(frozen.parameter_bytes, tuple(kept))


def sample_bytes_by_cut(frozen: FrozenGraph) -> list[int]:
    """Returns peak working bytes of one sample for cut 0 to ``num_cuts``."""
    calls = memory_by_call(frozen)
    factor = _HEAP_FACTOR if frozen.is_on_cpu else 1
    peaks = (sum(_with_margin(x.peak, factor)) for x in calls.values())
    highest = dict(zip(calls, itertools.accumulate(peaks, max), strict=True))
    cuts = range(frozen.num_cuts + 1)
    return [highest[frozen.fused_into(frozen.node_at(cut))] for cut in cuts]


def largest_sample_bytes(frozen: FrozenGraph) -> int:
    """Returns bytes per sample of the largest tensor, input or result."""
    return max(_bytes_of(value)[1] for value in frozen.values)


def memory_by_call(frozen: FrozenGraph) -> Mapping[int, CallMemory]:
    """Returns measured or estimated memory of input and calls, by id."""
    if frozen.measured_memory and frozen.is_fast and frozen.is_on_cpu:
        return frozen.measured_memory
    return _estimated(frozen)


def _estimated(frozen: FrozenGraph) -> dict[int, CallMemory]:
    program, values = frozen.program_from(INPUT), frozen.values
    nodes = needed(program, INPUT, program.output)
    reuse = BufferReuse(program, values, nodes, INPUT, program.output)
    allocated = {INPUT}
    live = _bytes_of(values[INPUT])
    memories = {INPUT: CallMemory(live, live)}
    for node in nodes:
        call, result = program.call(node), _bytes_of(values[node])
        is_new = call.op not in VIEWS or call.op in _MAY_COPY
        is_in_place = reuse.target(node) is not None
        peak = live
        if is_new and not is_in_place:
            peak = _sum(live, result, *_copies(frozen, call, node))
        if is_new:
            allocated.add(node)
            live = _sum(live, result)
        for dead in allocated.intersection(reuse.released_by(node)):
            allocated.remove(dead)
            live = _difference(live, _bytes_of(values[dead]))
        memories[node] = CallMemory(peak, live)
    return memories


def _copies(frozen: FrozenGraph, call: Call, node: int) -> list[LinearBytes]:
    if operators()[call.op].rule in _WITHOUT_COPIES:
        return []
    copied = [frozen.known[ref] for ref in call.refs()]
    if call.op in _WITHOUT_PACKING:
        copied = [value for value in copied if value.batch is not None]
    return [_bytes_of(value) for value in (*copied, frozen.values[node])]


def _bytes_of(value: Value) -> LinearBytes:
    size = value.num_bytes
    return (size, 0) if value.batch is None else (0, size)


def _with_margin(step: LinearBytes, factor: int) -> LinearBytes:
    constant, per_sample = (factor * (n + n // _MARGIN_DIVISOR) for n in step)
    return constant + _MARGIN_BYTES, per_sample


def _sum(*steps: LinearBytes) -> LinearBytes:
    return sum(c for c, _ in steps), sum(s for _, s in steps)


def _difference(first: LinearBytes, second: LinearBytes) -> LinearBytes:
    return first[0] - second[0], first[1] - second[1]
