"""Floating-point operations of a call, per sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from hapi_splitter.graph.batch_independence import Bound, Value, tensors_of
from hapi_splitter.graph.operators import EMBEDDING, op_names


def flops_of(op: str, bound: Bound, result: Value) -> int:
    """Estimates the floating-point operations of one call per sample.

    Products count two per multiply-add, pooling one per entry of its window,
    anything else one per entry read or written, whichever is more.
    """
    count = _FLOPS.get(op)
    if count is not None:
        return count(bound, result)
    tensors = tensors_of(bound)
    num_read = max((value.num_elements for value in tensors), default=0)
    return max(num_read, result.num_elements)


def _conv(bound: Bound, result: Value) -> int:
    window = math.prod(bound["weight"].shape[1:])
    return int(2 * result.num_elements * window)


def _transposed_conv(bound: Bound, result: Value) -> int:
    window = math.prod(bound["weight"].shape[1:])
    return int(2 * bound["input"].num_elements * window)


def _matmul(bound: Bound, result: Value) -> int:
    return int(2 * result.num_elements * bound["self"].shape[-1])


def _attention(bound: Bound, result: Value) -> int:
    keys = bound["key"].shape[-2]
    query = bound["query"].num_elements
    return int(2 * keys * (query + result.num_elements))


def _pool(bound: Bound, result: Value) -> int:
    kernel = bound["kernel_size"]
    if len(kernel) == 1:
        kernel *= result.ndim - 2
    return int(result.num_elements * math.prod(kernel))


_FLOPS: Mapping[str, Callable[[Bound, Value], int]] = MappingProxyType(
    {
        EMBEDDING: lambda bound, result: result.num_elements,
        "aten.conv_transpose2d.input": _transposed_conv,
        "aten.scaled_dot_product_attention.default": _attention,
        **dict.fromkeys(op_names("conv1d conv2d conv3d linear"), _conv),
        **dict.fromkeys(op_names("matmul bmm"), _matmul),
        **dict.fromkeys(op_names("max_pool1d max_pool2d max_pool3d"), _pool),
        **dict.fromkeys(op_names("avg_pool2d avg_pool3d"), _pool),
    }
)
