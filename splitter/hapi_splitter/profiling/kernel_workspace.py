"""What kernels allocate beside their results, of recomputed shapes.

Upper bounds of what torch's CPU kernels take for float32
(:data:`hapi_splitter.graph.operators.PRODUCTS` take nothing else): packed
copies of what a convolution reads and writes, of its weight alone where images
have their channels last, or the columns of a small one; the operands of a
product broadcast to its leading dimensions; several score matrices of
attention, unless it works by tiles; int64 indices of max pooling; statistics
of normalisations; contiguous copies of what is not sure to lie so, and copies
in another dtype. Scratch memory of further threads is not counted; it does not
grow with the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

import torch

from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.graph import batch_independence as by
from hapi_splitter.graph.batch_independence import Bound, Value, tensors_of
from hapi_splitter.graph.lowering import BATCH_NORM, LINEAR
from hapi_splitter.graph.memory_format import CONVOLUTION, POOLS
from hapi_splitter.graph.operators import EMBEDDING, VIEWS, operators
from hapi_splitter.graph.program import Call
from hapi_splitter.graph.shapes import bind
from hapi_splitter.graph.strides import ATTENTION, attends_by_tiles

Step: TypeAlias = tuple[int, int]
"""Bytes that do not depend on the batch, and bytes per sample."""

_NOTHING: Step = (0, 0)
_RESHAPE = "aten.reshape.default"
_CONTIGUOUS = "aten.contiguous.default"
_MAY_COPY = frozenset({_RESHAPE, _CONTIGUOUS, "aten._to_copy.default"})
_MAX_POOL = "aten.max_pool2d.default"
_LAYER_NORM = "aten.layer_norm.default"
_GROUP_NORM = "aten.group_norm.default"
_PACKED_CHANNELS = 16
"""oneDNN's blocked layouts round channels up to this."""
_PACKED_RESULTS = 64
"""And a weight's, of more than that, up to this."""
_CONVOLUTION_BYTES = 256 * 1024
"""Of a convolution for itself, whatever it reads."""
_PRODUCT_BYTES = 4 << 20
"""Of a product's tiles at most: 3.4 MiB were taken for one of 25,088 by
4,096."""
_TILE = 256, 512
"""Most queries and keys of an attention's tile."""
_COLUMNS_ELEMENTS = 20480
_COLUMNS_SAMPLES = 15
_COLUMNS_KERNEL = 3
"""Up to these sizes of a whole input torch may convolve by columns, without
oneDNN."""
_READ_AS_THEY_LIE = frozenset({by.elementwise, by.cat, by.stack})
"""Rules of operators that make no contiguous copy of what they read."""
_READ_IF_CONTIGUOUS = frozenset(
    {
        "aten.softmax.int",
        "aten.log_softmax.int",
        "aten.mean.dim",
        "aten.sum.dim_IntList",
        "aten.amax.default",
        "aten.amin.default",
        "aten.pad.default",
        BATCH_NORM,
        _LAYER_NORM,
        _GROUP_NORM,
        *POOLS,
    }
)
"""Operators that make none of what is contiguous."""


@dataclass(frozen=True, slots=True)
class Site:
    """A call, and what is known of what it reads and yields.

    Args:
        call: of a program.
        bound: its arguments by name, tensors as what is known of them.
        laid: the same, tensors as they lie in memory or None.
        read: the tensors of both, in the order of the arguments.
        result: that it yields.
        last: ids of what has its channels last.
    """

    call: Call
    bound: Bound
    laid: Bound
    read: tuple[tuple[Value, torch.Tensor | None], ...]
    result: Value
    last: frozenset[int]

    @classmethod
    def of(cls, frozen: FrozenGraph, call: Call, result: Value) -> Site:
        """A call of a region, seen from the region's input."""
        operator, found = operators()[call.op], frozen.laid_out
        bound = bind(operator, call.args, frozen.known)
        tensors = {node: found.get(node) for node in call.refs()}
        read = zip(tensors_of(bound), map(found.get, call.refs()), strict=True)
        return cls(
            call,
            bound,
            bind(operator, call.args, tensors),
            tuple(read),
            result,
            frozen.channels_last,
        )


def need(value: Value) -> Step:
    """Of a tensor."""
    size = value.num_bytes
    return (size, 0) if value.batch is None else (0, size)


def added(first: Step, second: Step) -> Step:
    return first[0] + second[0], first[1] + second[1]


def without(first: Step, second: Step) -> Step:
    return first[0] - second[0], first[1] - second[1]


def allocates(site: Site) -> bool:
    """Whether a call's result may have memory of its own."""
    op = site.call.op
    if op not in VIEWS:
        return True
    if op not in _MAY_COPY:
        return False
    tensor = site.read[0][1]
    if tensor is None:
        return True
    if op == _CONTIGUOUS:
        return not tensor.is_contiguous()
    return op != _RESHAPE or not _can_view(tensor, site.result)


def _can_view(tensor: torch.Tensor, result: Value) -> bool:
    """Whether :meth:`torch.Tensor.reshape` copies nothing."""
    shape = list(result.shape)
    if result.batch is not None:
        shape[result.batch.dim] = -1
    try:
        tensor.view(shape)
    except RuntimeError:
        return False
    return True


def workspace(site: Site) -> Step:
    """Of a call, beside what it reads and yields."""
    found = _of_images(site)
    if found is not None:
        return found
    rule = _WORKSPACES.get(site.call.op)
    if rule is not None:
        return rule(site)
    return _NOTHING if site.call.op in VIEWS else _copies(site)


def _total(values: Iterable[Value]) -> Step:
    needs = [need(value) for value in values]
    return sum(c for c, _ in needs), sum(s for _, s in needs)


def _times(count: int, step: Step) -> Step:
    return count * step[0], count * step[1]


def _of_images(site: Site) -> Step | None:
    """Of what works on images with their channels last, if it does."""
    op, bound, last = site.call.op, site.bound, site.last
    image, *others = site.call.refs()
    if op == CONVOLUTION and others[0] in last:
        found = _convolution(site)
        if _reads_channels_last(bound):
            copied = [] if image in last else [bound["input"]]
            packed = _total([*copied, _packed_weight(bound)])
            found = added(packed, _columns(bound, site.result))
        return added(found, (_CONVOLUTION_BYTES, 0))
    if image in last and op in POOLS:
        return _indices(site.result) if op == _MAX_POOL else _NOTHING
    if image in last and op == BATCH_NORM:
        return _total([bound["running_mean"], bound["running_var"]])
    return None


def _copies(site: Site) -> Step:
    """Of what a kernel reads: in its dtype, and in one piece."""
    op, result = site.call.op, site.result
    as_they_lie = operators()[op].rule in _READ_AS_THEY_LIE
    widest = max(
        (value.dtype for value in (*tensors_of(site.bound), result)),
        key=lambda dtype: dtype.itemsize,
    )

    def is_copied(value: Value, tensor: torch.Tensor | None) -> bool:
        if value.dtype != result.dtype:
            return True
        if op in _READ_IF_CONTIGUOUS:
            return not _is_contiguous(tensor)
        return not as_they_lie

    return _total(
        replace(value, dtype=widest)
        for value, tensor in site.read
        if is_copied(value, tensor)
    )


def _is_contiguous(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_contiguous()


def _lookup(site: Site) -> Step:
    return _total([site.bound["indices"]])


def _layer_norm(site: Site) -> Step:
    together = math.prod(site.bound["normalized_shape"])
    rows = site.bound["input"].num_elements // max(together, 1)
    return added(_copies(site), _statistics(site, rows))


def _group_norm(site: Site) -> Step:
    return added(_copies(site), _statistics(site, site.bound["num_groups"]))


def _statistics(site: Site, count: int) -> Step:
    """A mean and a deviation of each of what is normalised together."""
    return need(replace(site.result, shape=(2, count)))


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


def _convolution(site: Site) -> Step:
    image = _packed(_with_margin(site.bound))
    packed = _total([image, _packed_weight(site.bound), _packed(site.result)])
    return added(packed, _columns(site.bound, site.result))


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
        return _NOTHING
    rows = image.shape[1] * math.prod(kernel)
    places = math.prod((result.shape[0], *result.shape[2:]))
    return samples * rows * places * result.dtype.itemsize, 0


def _transposed_convolution(site: Site) -> Step:
    image, weight = site.bound["input"], site.bound["weight"]
    packed = _total(map(_packed, (image, weight, site.result)))
    # Without oneDNN, where the output's padding is large: sample by sample.
    places = math.prod(image.shape[2:])
    rows = math.prod(weight.shape[1:]) * site.bound["groups"]
    return added(packed, (rows * places * image.dtype.itemsize, 0))


def _linear(site: Site) -> Step:
    # Lowering makes what it reads contiguous.
    copied = (
        [] if _is_contiguous(site.laid["input"]) else [site.bound["input"]]
    )
    return added(_total(copied), _tiles(site.bound["weight"]))


def _tiles(operand: Value) -> Step:
    size = operand.num_bytes if operand.batch is None else _PRODUCT_BYTES
    return min(size, _PRODUCT_BYTES), 0


def _product(site: Site) -> Step:
    values = tensors_of(site.bound)
    if _multiplied_as_they_lie(*(laid for _, laid in site.read)):
        return _tiles(values[1])
    operands = [_expanded(value, site.result) for value in values]
    return _total([*operands, site.result])


def _multiplied_as_they_lie(
    first: torch.Tensor | None, second: torch.Tensor | None
) -> bool:
    """Whether a product neither expands its operands nor copies them."""
    if first is None or second is None or min(first.ndim, second.ndim) < 2:
        return False
    if second.ndim == 2:
        return first.is_contiguous() and _is_matrix(second)
    return (
        first.shape[:-2] == second.shape[:-2]
        and _is_matrix(first)
        and _is_matrix(second)
    )


def _is_matrix(tensor: torch.Tensor) -> bool:
    """Or several in one piece, by their rows or by their columns."""
    return tensor.is_contiguous() or tensor.mT.is_contiguous()


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


def _attention(site: Site) -> Step:
    bound, result = site.bound, site.result
    query, key, value = (bound[name] for name in ("query", "key", "value"))
    if _attends_by_tiles(site):
        # The sum of each row of scores; masks are made float32 first.
        mask = bound["attn_mask"]
        masks = [] if mask is None else [replace(mask, dtype=result.dtype)]
        sums = replace(result, shape=(*result.shape[:-1], 1))
        queries, keys = _TILE
        tile = queries * (keys + 2 + query.shape[-1]) * result.dtype.itemsize
        return added(_total([sums, *masks]), (tile, 0))
    operands = _total(_expanded(v, result) for v in (query, key, value))
    shape = (*result.shape[:-1], key.shape[-2])
    scores = need(replace(result, shape=shape))
    # Scores, their softmax, and what keeps fully masked rows from NaN;
    # masks are made float32 first. Operands are scaled, then expanded.
    masked = bound["attn_mask"] is not None or bound["is_causal"]
    found = added(_times(2, operands), _times(6 if masked else 4, scores))
    return added(found, need(result))


def _attends_by_tiles(site: Site) -> bool:
    laid = [tensor for _, tensor in site.read if tensor is not None]
    return len(laid) == len(site.read) and attends_by_tiles(*laid)


def _windows(site: Site) -> Step:
    # What they read is made contiguous by the call and by its kernel.
    image = site.bound["self"]
    return added(_total([image, image]), need(site.result))


def _resized(site: Site) -> Step:
    # Those of many channels are resized with their channels last.
    return _total([site.bound["self"], site.result])


def _max_pool(site: Site) -> Step:
    return added(_copies(site), _indices(site.result))


def _indices(result: Value) -> Step:
    return need(replace(result, dtype=torch.int64))


_WORKSPACES: Mapping[str, Callable[[Site], Step]] = MappingProxyType(
    {
        "aten.conv1d.default": _convolution,
        CONVOLUTION: _convolution,
        "aten.conv_transpose2d.input": _transposed_convolution,
        EMBEDDING: _lookup,
        LINEAR: _linear,
        "aten.matmul.default": _product,
        "aten.bmm.default": _product,
        ATTENTION: _attention,
        _MAX_POOL: _max_pool,
        _LAYER_NORM: _layer_norm,
        _GROUP_NORM: _group_norm,
        "aten.im2col.default": _windows,
        "aten.col2im.default": _windows,
        "aten.upsample_nearest2d.default": _resized,
        "aten.upsample_bilinear2d.default": _resized,
        "aten.upsample_bicubic2d.default": _resized,
    }
)
