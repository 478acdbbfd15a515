"""Bounds of the integers in a tensor, by interval arithmetic.

Operators that read entries by number run only if each index is known to exist:
an index out of range fails the batch on a CPU and ends the process on a GPU.
Models compute such indices in a few ways, such as position ids that count the
tokens of a mask, or the position of a maximum. The rules below follow them.
A result that may not fit its dtype, or that no rule covers, has the bounds of
its dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from hapi_splitter.graph.batch_independence import Bound, Value, tensors_of
from hapi_splitter.graph.operators import CUMSUM, SELECTIONS, op_names

Bounds: TypeAlias = tuple[int, int]
"""Smallest and largest possible entry."""


def dtype_bounds(dtype: torch.dtype) -> Bounds | None:
    """Returns the bounds of all values of a dtype; None for floats."""
    if dtype.is_floating_point:
        return None
    if dtype == torch.bool:
        return 0, 1
    limits = torch.iinfo(dtype)
    return int(limits.min), int(limits.max)


def weight_bounds(weight: torch.Tensor) -> Bounds | None:
    """Returns the bounds of a weight's entries; None for floats."""
    every = dtype_bounds(weight.dtype)
    if every is None or weight.dtype == torch.bool or not weight.numel():
        return every
    low, high = torch.aminmax(weight)
    return int(low), int(high)


def result_bounds(op: str, bound: Bound, dtype: torch.dtype) -> Bounds | None:
    """Returns the bounds of a call's entries; None for floats.

    Args:
        op: name of the operator.
        bound: its arguments.
        dtype: dtype of its result.
    """
    every = dtype_bounds(dtype)
    if every is None:
        return None
    if op == "aten.argmax.default":
        return 0, _size(bound["self"], bound["dim"]) - 1
    rule = _RULES.get(op)
    if rule is None or not _is_exact(bound, every):
        return every
    bounds = rule(bound)
    return bounds if _fits(bounds, every) else every


def is_within(value: Value, size: int) -> bool:
    """Returns True if all entries number one of ``size`` things."""
    return value.bounds is not None and _fits(value.bounds, (0, size - 1))


def _fits(inner: Bounds, outer: Bounds) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _is_exact(bound: Bound, every: Bounds) -> bool:
    """Returns True if no argument changes when it gets the result's dtype."""
    numbers = [n for n in bound.values() if isinstance(n, int | float)]
    operands = [value.bounds for value in tensors_of(bound)]
    operands += [(n, n) if isinstance(n, int) else None for n in numbers]
    return all(operand and _fits(operand, every) for operand in operands)


def _of(argument: Value | int) -> Bounds:
    if not isinstance(argument, Value):
        return argument, argument
    assert argument.bounds is not None
    return argument.bounds


def _hull(*arguments: Value | int) -> Bounds:
    lows, highs = zip(*map(_of, arguments), strict=True)
    return min(lows), max(highs)


def _product(first: Bounds, second: Bounds) -> Bounds:
    ends = [one * other for one in first for other in second]
    return min(ends), max(ends)


def _sum(first: Bounds, second: Bounds, factor: int = 1) -> Bounds:
    low, high = _product(second, (factor, factor))
    return first[0] + low, first[1] + high


def _size(value: Value, dim: int) -> int:
    return value.shape[dim] if value.shape else 1


def _add(bound: Bound) -> Bounds:
    return _sum(_of(bound["self"]), _of(bound["other"]), bound["alpha"])


def _subtract(bound: Bound) -> Bounds:
    return _add({**bound, "alpha": -bound["alpha"]})


def _subtract_from(bound: Bound) -> Bounds:
    return _sum(_of(bound["other"]), _of(bound["self"]), -bound["alpha"])


def _clamp(bound: Bound) -> Bounds:
    """If ``min`` exceeds ``max``, all entries become ``max``."""
    low, high = _of(bound["self"])
    least, most = bound.get("min"), bound.get("max")
    if least is not None:
        low, high = max(low, least), max(high, least)
    if most is not None:
        low, high = min(low, most), min(high, most)
    return low, high


def _cumulate(bound: Bound) -> Bounds:
    """Adds one entry up to all of them."""
    value = bound["self"]
    low, high = _of(value)
    length = _size(value, bound["dim"])
    return min(low, low * length), max(high, high * length)


def _reduce_sum(bound: Bound) -> Bounds:
    value = bound["self"]
    sizes = [_size(value, dim) for dim in bound["dim"]] or value.shape
    return _product(_of(value), (math.prod(sizes),) * 2)


def _moved(bound: Bound) -> Bounds:
    return _hull(*bound.get("tensors", [bound.get("self")]))


_RULES: Mapping[str, Callable[[Any], Bounds]] = MappingProxyType(
    {
        **dict.fromkeys(SELECTIONS, _moved),
        **dict.fromkeys(op_names("_to_copy amax amin"), _moved),
        **dict.fromkeys(op_names("index_select gather"), _moved),
        **dict.fromkeys(
            op_names("where.self maximum minimum"),
            lambda b: _hull(b["self"], b["other"]),
        ),
        **dict.fromkeys(op_names("add.Tensor add.Scalar"), _add),
        **dict.fromkeys(op_names("sub.Tensor sub.Scalar"), _subtract),
        **dict.fromkeys(
            op_names("mul.Tensor mul.Scalar"),
            lambda b: _product(_of(b["self"]), _of(b["other"])),
        ),
        **dict.fromkeys(op_names("clamp clamp_min"), _clamp),
        "aten.pad.default": lambda b: _hull(b["self"], b["value"] or 0),
        "aten.rsub.Scalar": _subtract_from,
        "aten.neg.default": lambda b: _product(_of(b["self"]), (-1, -1)),
        CUMSUM: _cumulate,
        "aten.sum.dim_IntList": _reduce_sum,
    }
)
