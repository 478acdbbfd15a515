"""How much memory a prefix needs, from recomputed shapes alone.

Every call is one step: the tensors live there, its result and the
workspace of its kernel. A step needs ``constant + batch * per_sample``
bytes; the peak is the largest step plus the parameters. Views cost nothing,
what may be a copy counts as one, buffers are reused exactly as
:mod:`hapi_splitter.lowering` does.

Workspaces are upper bounds of what torch's CPU kernels allocate for float32
(:data:`hapi_splitter.ops.PRODUCTS` take nothing else): packed copies of
what a convolution reads and writes, of its weight alone where images have
their channels last, or the columns of a small one; the
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
from hapi_splitter.layout import CONVOLUTION, POOLS
from hapi_splitter.lowering import BATCH_NORM, BufferReuse, needed
from hapi_splitter.ops import VIEWS, operators
from hapi_splitter.program import INPUT, Call
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
_MAX_POOL = "aten.max_pool2d.default"
_PACKED_CHANNELS = 16
"""oneDNN's blocked layouts round channels up to this."""
_PACKED_RESULTS = 64
"""And a weight's, of more than that, up to this."""
_SCRATCH_BYTES = 256 * 1024
"""Of a convolution for itself, whatever it reads."""
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
    program, values = frozen.stretch(INPUT), frozen.values
    nodes = needed(program, INPUT, stop)
    reuse = BufferReuse(program, values, nodes, INPUT, stop)
    known = frozen.known
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
        need = _workspace_of_images(
            call, bound, values[node], frozen.channels_last
        )
        if need is None:
            need = _workspace(call.op, bound, values[node])
        yield _added(total, need)
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


def _workspace_of_images(
    call: Call, bound: Bound, result: Value, last: frozenset[int]
) -> Step | None:
    """Of what works on images with their channels last, if it does.

    Args:
        call: that yields ``result``.
        bound: its arguments.
        result: of the call.
        last: ids of what has its channels last.
    """
    image, *others = call.refs()
    if call.op == CONVOLUTION and others[0] in last:
        found = _conv_workspace(bound, result)
        if _reads_channels_last(bound):
            copied = [] if image in last else [bound["input"]]
            packed = _total([*copied, _packed_weight(bound)])
            found = _added(packed, _columns(bound, result))
        return _added(found, (_SCRATCH_BYTES, 0))
    if image in last and call.op in POOLS:
        return _indices(result) if call.op == _MAX_POOL else (0, 0)
    if image in last and call.op == BATCH_NORM:
        return _total([bound["running_mean"], bound["running_var"]])
    return None


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


def _rounded_up(channels: int, block: int = _PACKED_CHANNELS) -> int:
    return -(-channels // block) * block


def _conv_workspace(bound: Bound, result: Value) -> Step:
    image = _packed(_with_margin(bound))
    packed = _total([image, _packed_weight(bound), _packed(result)])
    return _added(packed, _columns(bound, result))


def _packed_weight(bound: Bound) -> Value:
    """With the channels of each of its groups rounded up."""
    weight: Value = bound["weight"]
    groups: int = bound["groups"]
    if _is_depthwise(bound):
        return replace(weight, shape=(_rounded_up(groups), *weight.shape[1:]))
    yielded, read = weight.shape[0] // groups, weight.shape[1]
    few = yielded <= _PACKED_CHANNELS
    block = _PACKED_CHANNELS if few else _PACKED_RESULTS
    channels = groups * _rounded_up(yielded, block)
    return replace(
        weight, shape=(channels, _rounded_up(read), *weight.shape[2:])
    )


def _with_margin(bound: Bound) -> Value:
    """The image, as a kernel for single pixels is given it."""
    image: Value = bound["input"]
    if not _has_margin(bound):
        return image
    sides = [
        side + 2 * margin
        for side, margin in zip(image.shape[2:], bound["padding"], strict=True)
    ]
    return replace(image, shape=(*image.shape[:2], *sides))


def _has_margin(bound: Bound) -> bool:
    single = math.prod(bound["weight"].shape[2:]) == 1
    return single and any(bound["padding"])


def _is_depthwise(bound: Bound) -> bool:
    weight: Value = bound["weight"]
    return (bound["groups"], 1) == weight.shape[:2]


def _reads_channels_last(bound: Bound) -> bool:
    """Whether oneDNN takes images as they lie, its channels last."""
    image: Value = bound["input"]
    grouped = bound["groups"] > 1 and not _is_depthwise(bound)
    return image.shape[1] > 1 and not grouped and not _has_margin(bound)


def _columns(bound: Bound, result: Value) -> Step:
    image, kernel = bound["input"], bound["weight"].shape[2:]
    size = max(image.num_elements, 1)
    samples = min(_COLUMNS_ELEMENTS // size, _COLUMNS_SAMPLES)
    if samples == 0 or min(kernel) > _COLUMNS_KERNEL:
        return (0, 0)
    rows = image.shape[1] * math.prod(kernel)
    places = math.prod((result.shape[0], *result.shape[2:]))
    return samples * rows * places * result.dtype.itemsize, 0


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
    return _added(_need(bound["self"]), _indices(result))


def _indices(result: Value) -> Step:
    return _need(replace(result, dtype=torch.int64))


_WORKSPACES: Mapping[str, Callable[[Bound, Value], Step]] = MappingProxyType(
    {
        "aten.conv1d.default": _conv_workspace,
        CONVOLUTION: _conv_workspace,
        "aten.conv_transpose2d.input": _transposed_workspace,
        "aten.linear.default": _linear_workspace,
        "aten.matmul.default": _matmul_workspace,
        "aten.bmm.default": _matmul_workspace,
        "aten.scaled_dot_product_attention.default": _attention_workspace,
        _MAX_POOL: _max_pool_workspace,
        "aten.im2col.default": _windows_workspace,
        "aten.col2im.default": _windows_workspace,
    }
)
