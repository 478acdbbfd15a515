"""How much memory a prefix needs, from recomputed shapes alone.

Every call is one step: the tensors live there, its result and the
workspace of its kernel. A step needs ``constant + batch * per_sample``
bytes; the peak is the largest step plus the parameters. Views cost nothing,
what may be a copy counts as one, buffers are reused exactly as
:mod:`hapi_splitter.lowering` does.

Workspaces are upper bounds of what torch's CPU kernels allocate for float32
(:data:`hapi_splitter.ops.PRODUCTS` take nothing else): packed copies of
what a convolution reads and writes, or the columns of a small one; the
operands of a product broadcast to its leading dimensions; several score
matrices of attention; int64 indices of max pooling; contiguous copies of
what other kernels read, and copies in another dtype. Not counted are the
allocators' own few percent, scratch memory of threads, which does not grow
with the batch, and what a GPU's libraries take beside this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

import torch

from hapi_splitter import batchwise as by
from hapi_splitter.batchwise import Bound, Value
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.encodings import encoder_step
from hapi_splitter.lowering import BufferReuse, needed
from hapi_splitter.ops import VIEWS, operators
from hapi_splitter.program import INPUT
from hapi_splitter.shapes import bind, tensors_of

Step: TypeAlias = tuple[int, int]
"""Bytes that do not depend on the batch, and bytes per sample."""

_MAY_COPY = frozenset(
    {
        "aten.reshape.default",
        "aten.contiguous.default",
        "aten._to_copy.default",
    }
)
_PACKED_CHANNELS = 16
"""oneDNN's blocked layouts round channels up to this."""
_COLUMNS_ELEMENTS = 20480
_COLUMNS_SAMPLES = 15
_COLUMNS_KERNEL = 3
"""Up to these sizes of a whole input torch may convolve by columns, without
oneDNN."""
_READ_AS_THEY_LIE = frozenset({by.elementwise, by.cat, by.stack})
"""Rules of operators that make no contiguous copy of what they read."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a prefix needs, for any batch.

    Args:
        parameter_bytes: of the whole region.
        steps: those that can be the largest for some batch.
    """

    parameter_bytes: int
    steps: tuple[Step, ...]

    def peak_bytes(self, batch: int) -> int:
        """Bytes for a batch, its input and the parameters included."""
        return self.parameter_bytes + max(
            constant + batch * per_sample
            for constant, per_sample in self.steps
        )

    def batch_for(self, available_bytes: int, maximum: int) -> int:
        """The largest batch up to ``maximum`` that fits, 0 if none does."""
        free = available_bytes - self.parameter_bytes
        batch = maximum
        for constant, per_sample in self.steps:
            if free < constant:
                return 0
            if per_sample:
                batch = min(batch, (free - constant) // per_sample)
        return max(batch, 0)


def needs_of(
    frozen: FrozenGraph, cut: int, encoding: str | None = None
) -> Needs:
    """What ``frozen.prefix(cut)`` needs, and the encoding of its result.

    Args:
        frozen: the region.
        cut: 0 to ``num_cuts``.
        encoding: that is made of the features on the same device; None for
            the prefix alone.

    Raises:
        AnnotationError: ``unknown_encoding``.
        UnsupportedError: ``cut_out_of_range``.
    """
    every = list(steps(frozen, cut))
    if encoding is not None:
        shape = frozen.cuts[cut - 1].shape if cut else frozen.input_shape
        every.append(_added(every[-1], encoder_step(shape, encoding)))
    kept: list[Step] = []
    for step in sorted(set(every), reverse=True):
        # The constants fall, so a step counts only if it grows faster.
        if not kept or step[1] > kept[-1][1]:
            kept.append(step)
    return Needs(frozen.parameter_bytes, tuple(kept))


def peak_bytes(frozen: FrozenGraph, cut: int, batch: int) -> int:
    """:meth:`Needs.peak_bytes` of one prefix.

    Raises:
        UnsupportedError: ``cut_out_of_range``.
    """
    return needs_of(frozen, cut).peak_bytes(batch)


def batch_for(
    frozen: FrozenGraph, cut: int, available_bytes: int, maximum: int
) -> int:
    """:meth:`Needs.batch_for` of one prefix.

    Raises:
        UnsupportedError: ``cut_out_of_range``.
    """
    return needs_of(frozen, cut).batch_for(available_bytes, maximum)


def steps(frozen: FrozenGraph, cut: int) -> Iterator[Step]:
    """The needs of the input alone, of each call of a prefix, and of what
    is left at its end, the input included."""
    stop = frozen.node_at(cut)
    program, values = frozen.program, frozen.values
    nodes = needed(program, INPUT, stop)
    reuse = BufferReuse(program, values, nodes, INPUT, stop)
    known = dict(enumerate(values))
    table = operators()
    live = {INPUT}
    total = _need(values[INPUT])
    yield total
    for node in nodes:
        call = program.call(node)
        allocates = call.op not in VIEWS or call.op in _MAY_COPY
        in_place = reuse.target(node) is not None
        if allocates and not in_place:
            live.add(node)
            total = _added(total, _need(values[node]))
        bound = bind(table[call.op], call.args, known)
        yield _added(total, _workspace(call.op, bound, values[node]))
        for dead in reuse.released_by(node):
            if dead in live:
                live.remove(dead)
                total = _without(total, _need(values[dead]))
        if in_place:
            live.add(node)
            total = _added(total, _need(values[node]))
    yield total


def _need(value: Value) -> Step:
    size = value.num_bytes
    return (size, 0) if value.batch is None else (0, size)


def _total(values: Iterable[Value]) -> Step:
    needs = [_need(value) for value in values]
    return sum(c for c, _ in needs), sum(s for _, s in needs)


def _added(first: Step, second: Step) -> Step:
    return first[0] + second[0], first[1] + second[1]


def _without(first: Step, second: Step) -> Step:
    return first[0] - second[0], first[1] - second[1]


def _times(count: int, step: Step) -> Step:
    return count * step[0], count * step[1]


def _workspace(op: str, bound: Bound, result: Value) -> Step:
    rule = _WORKSPACES.get(op)
    if rule is not None:
        return rule(bound, result)
    return (0, 0) if op in VIEWS else _copies(op, bound, result)


def _copies(op: str, bound: Bound, result: Value) -> Step:
    """Of what a kernel reads: in its dtype, and in one piece."""
    as_they_lie = operators()[op].rule in _READ_AS_THEY_LIE
    tensors = tensors_of(bound)
    widest = max(
        (value.dtype for value in (*tensors, result)),
        key=lambda dtype: dtype.itemsize,
    )
    return _total(
        replace(value, dtype=widest)
        for value in tensors
        if value.dtype != result.dtype or not as_they_lie
    )


def _packed(value: Value) -> Value:
    """With its channels rounded up to the kernel's blocks."""
    if value.ndim < 3:
        return value
    first, channels = value.shape[0], _rounded_up(value.shape[1])
    if value.batch is None:
        first = _rounded_up(first)
    return replace(value, shape=(first, channels, *value.shape[2:]))


def _rounded_up(channels: int) -> int:
    return -(-channels // _PACKED_CHANNELS) * _PACKED_CHANNELS


def _conv_workspace(bound: Bound, result: Value) -> Step:
    image, weight = bound["input"], bound["weight"]
    packed = _total(map(_packed, (image, weight, result)))
    kernel = weight.shape[2:]
    size = max(image.num_elements, 1)
    samples = min(_COLUMNS_ELEMENTS // size, _COLUMNS_SAMPLES)
    if samples == 0 or max(kernel) > _COLUMNS_KERNEL:
        return packed
    rows = image.shape[1] * math.prod(kernel)
    places = math.prod((result.shape[0], *result.shape[2:]))
    columns = samples * rows * places * result.dtype.itemsize
    return _added(packed, (columns, 0))


def _transposed_workspace(bound: Bound, result: Value) -> Step:
    image, weight = bound["input"], bound["weight"]
    packed = _total(map(_packed, (image, weight, result)))
    # Without oneDNN, where the output's padding is large: sample by sample.
    places = math.prod(image.shape[2:])
    rows = math.prod(weight.shape[1:]) * bound["groups"]
    return _added(packed, (rows * places * image.dtype.itemsize, 0))


def _linear_workspace(bound: Bound, result: Value) -> Step:
    return _total([*tensors_of(bound), result])


def _matmul_workspace(bound: Bound, result: Value) -> Step:
    operands = [_expanded(value, result) for value in tensors_of(bound)]
    return _total([*operands, result])


def _expanded(value: Value, result: Value) -> Value:
    """Broadcast to a product's leading dimensions, as a copy would be.

    What is repeated in all of them stays a view of itself.
    """
    if math.prod(value.shape[:-2]) == 1 and value.batch is None:
        return value
    shape = (*result.shape[:-2], *value.shape[-2:])
    leading = result.batch is not None and result.batch.dim < result.ndim - 2
    return replace(
        value, shape=shape, batch=result.batch if leading else value.batch
    )


def _attention_workspace(bound: Bound, result: Value) -> Step:
    query, key, value = (bound[name] for name in ("query", "key", "value"))
    operands = _total(_expanded(v, result) for v in (query, key, value))
    shape = (*result.shape[:-1], key.shape[-2])
    scores = _need(replace(result, shape=shape))
    # Scores, their softmax, and what keeps fully masked rows from NaN;
    # masks are made float32 first. Operands are scaled, then expanded.
    masked = bound["attn_mask"] is not None or bound["is_causal"]
    found = _added(_times(2, operands), _times(6 if masked else 4, scores))
    return _added(found, _need(result))


def _windows_workspace(bound: Bound, result: Value) -> Step:
    # What they read is made contiguous by the call and by its kernel.
    return _added(_total([bound["self"], bound["self"]]), _need(result))


def _max_pool_workspace(bound: Bound, result: Value) -> Step:
    indices = replace(result, dtype=torch.int64)
    return _total([bound["self"], indices])


_WORKSPACES: Mapping[str, Callable[[Bound, Value], Step]] = MappingProxyType(
    {
        "aten.conv1d.default": _conv_workspace,
        "aten.conv2d.default": _conv_workspace,
        "aten.conv_transpose2d.input": _transposed_workspace,
        "aten.linear.default": _linear_workspace,
        "aten.matmul.default": _matmul_workspace,
        "aten.bmm.default": _matmul_workspace,
        "aten.scaled_dot_product_attention.default": _attention_workspace,
        "aten.max_pool2d.default": _max_pool_workspace,
        "aten.im2col.default": _windows_workspace,
        "aten.col2im.default": _windows_workspace,
    }
)
