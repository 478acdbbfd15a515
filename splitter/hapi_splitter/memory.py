"""How much memory a prefix needs, from recomputed shapes alone.

Every call is one step: the tensors live there, its result and the
workspace of its kernel. A step needs ``constant + batch * per_sample``
bytes; the peak is the largest step plus the parameters. Views cost nothing,
what may be a copy counts as one, buffers are reused exactly as
:mod:`hapi_splitter.lowering` does. Workspaces are upper bounds for the CPU
kernels (packed copies of what a product reads and writes, int64 indices of
max pooling, attention scores); allocators add a few percent of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

import torch

from hapi_splitter.batchwise import Bound, Value
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.lowering import BufferReuse, needed
from hapi_splitter.ops import VIEWS, operators
from hapi_splitter.program import INPUT
from hapi_splitter.shapes import bind

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


def peak_bytes(frozen: FrozenGraph, cut: int, batch: int) -> int:
    """Bytes that ``frozen.prefix(cut)`` needs for a batch.

    The parameters of the whole region and the input batch are included.

    Args:
        frozen: the region.
        cut: 0 to ``num_cuts``.
        batch: number of samples.

    Raises:
        UnsupportedError: ``cut_out_of_range``.
    """
    worst = max(c + batch * s for c, s in steps(frozen, cut))
    return frozen.parameter_bytes + worst


def batch_for(
    frozen: FrozenGraph, cut: int, available_bytes: int, maximum: int
) -> int:
    """The largest batch up to ``maximum`` that fits, 0 if none does."""
    free = available_bytes - frozen.parameter_bytes
    batch = maximum
    for constant, per_sample in steps(frozen, cut):
        if free < constant:
            return 0
        if per_sample:
            batch = min(batch, (free - constant) // per_sample)
    return max(batch, 0)


def steps(frozen: FrozenGraph, cut: int) -> list[Step]:
    """The needs of the input alone and of each call of a prefix."""
    stop = frozen.node_at(cut)
    program, values = frozen.program, frozen.values
    nodes = needed(program, INPUT, stop)
    reuse = BufferReuse(program, values, nodes, INPUT, stop)
    known = dict(enumerate(values))
    live: dict[int, Value] = {INPUT: values[INPUT]}
    found = [_total(live.values())]
    for node in nodes:
        op, args = program.call(node).op, program.call(node).args
        bound = bind(operators()[op], args, known)
        in_place = reuse.target(node) is not None
        allocates = op not in VIEWS or op in _MAY_COPY
        if allocates and not in_place:
            live[node] = values[node]
        found.append(
            _added(_total(live.values()), _workspace(op, bound, values[node]))
        )
        for dead in reuse.released_by(node):
            live.pop(dead, None)
        if in_place:
            live[node] = values[node]
    return found


def _total(values: Iterable[Value]) -> Step:
    constant = per_sample = 0
    for value in values:
        if value.batch is None:
            constant += value.num_bytes
        else:
            per_sample += value.num_bytes
    return constant, per_sample


def _added(first: Step, second: Step) -> Step:
    return first[0] + second[0], first[1] + second[1]


def _workspace(op: str, bound: Bound, result: Value) -> Step:
    rule = _WORKSPACES.get(op)
    return rule(bound, result) if rule is not None else (0, 0)


def _packed(value: Value) -> Value:
    """With its channels rounded up to the kernel's blocks."""
    if value.ndim < 3:
        return value
    channels = -(-value.shape[1] // _PACKED_CHANNELS) * _PACKED_CHANNELS
    shape = (value.shape[0], channels, *value.shape[2:])
    return replace(value, shape=shape)


def _conv_workspace(bound: Bound, result: Value) -> Step:
    tensors = (bound["input"], bound["weight"], result)
    return _total(map(_packed, tensors))


def _product_workspace(bound: Bound, result: Value) -> Step:
    tensors = [v for v in bound.values() if isinstance(v, Value)]
    return _total([*tensors, result])


def _attention_workspace(bound: Bound, result: Value) -> Step:
    query, key = bound["query"], bound["key"]
    rows = math.prod(query.shape[:-1])
    scores = 2 * rows * key.shape[-2] * query.dtype.itemsize
    return _added(_product_workspace(bound, result), (0, scores))


def _max_pool_workspace(bound: Bound, result: Value) -> Step:
    return 0, result.num_elements * torch.int64.itemsize


_WORKSPACES: Mapping[str, Callable[[Bound, Value], Step]] = MappingProxyType(
    {
        "aten.conv1d.default": _conv_workspace,
        "aten.conv2d.default": _conv_workspace,
        "aten.conv_transpose2d.input": _conv_workspace,
        "aten.linear.default": _product_workspace,
        "aten.matmul.default": _product_workspace,
        "aten.bmm.default": _product_workspace,
        "aten.scaled_dot_product_attention.default": _attention_workspace,
        "aten.max_pool2d.default": _max_pool_workspace,
    }
)
