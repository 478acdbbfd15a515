"""Replaces operators by calls of simpler ones from the table.

torch has decompositions of its own, but applying them retraces the whole
graph (:mod:`hapi_splitter.graph.functionalize`), and some of them end in
operators that packages do not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx

from hapi_splitter.graph.operators import full_name

Named: TypeAlias = dict[str, Any]
"""Arguments by name. A value may be a tensor, which becomes a weight, or a
:class:`Rewritten` call."""


class Rewritten(NamedTuple):
    """A call of an operator of the table; its arguments may be calls."""

    op: str
    arguments: Named


Rewrite: TypeAlias = Callable[[Named, fx.Node], Rewritten | None]


def call(
    word: str, given: Named | None = None, /, **changes: Any
) -> Rewritten:
    """Returns a call of an operator, named as in the table of operators.

    Args:
        word: name without ``aten.``, and without the overload ``default``.
        given: arguments by name.
        changes: further arguments, which replace those of the same name.
    """
    return Rewritten(full_name(word), {**(given or {}), **changes})


IDENTITY = "identity"
"""Stands for a call whose result is its argument ``self``."""


def shape_of(node: fx.Node) -> list[Any]:
    return list(node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def reshape(source: Any, shape: Sequence[Any]) -> Rewritten:
    return call("reshape", self=source, shape=list(shape))


def _number_like(value: Any, node: fx.Node) -> torch.Tensor:
    result = node.meta["val"]
    return torch.tensor(value, dtype=result.dtype, device=result.device)


def _scaled(source: Any, factor: float) -> Any:
    if factor == 1:
        return source
    return call("mul.Scalar", self=source, other=factor)


def _masked_fill(bound: Named, node: fx.Node) -> Rewritten | None:
    """The number becomes a weight, because it is often infinite."""
    value = bound["value"]
    if not isinstance(value, fx.Node):
        value = _number_like(value, node)
    elif dtype_of(value) != dtype_of(node):
        return None
    mask, other = bound["mask"], bound["self"]
    return call("where.self", condition=mask, self=value, other=other)


def _where(bound: Named, node: fx.Node) -> Rewritten | None:
    numbers = {
        name: _number_like(bound[name], node)
        for name in ("self", "other")
        if not isinstance(bound[name], fx.Node)
    }
    return call("where.self", bound, **numbers)


def _logical(name: str) -> Rewrite:
    """Supports operators on bits for bools."""

    def rewritten(bound: Named, node: fx.Node) -> Rewritten | None:
        sources = [n for n in bound.values() if isinstance(n, fx.Node)]
        is_bool = all(dtype_of(source) == torch.bool for source in sources)
        if not is_bool or len(sources) < len(bound):
            return None
        return call(name, bound)

    return rewritten


def _extreme(name: str) -> Rewrite:
    """Supports the values; nothing may read the indices."""

    def rewritten(bound: Named, node: fx.Node) -> Rewritten | None:
        return call(name, bound, dim=[bound["dim"]])

    return rewritten


def _addmm(bound: Named, node: fx.Node) -> Rewritten | None:
    bias, weight = bound["self"], bound["mat2"]
    is_linear = weight.op == "placeholder" and len(shape_of(bias)) == 1
    if is_linear and bound["alpha"] == bound["beta"] == 1:
        turned = call("transpose.int", self=weight, dim0=0, dim1=1)
        return call("linear", input=bound["mat1"], weight=turned, bias=bias)
    return _plus_product(bound, bound["mat1"], weight)


def _plus_product(bound: Named, left: Any, right: Any) -> Rewritten:
    product = _scaled(call("matmul", self=left, other=right), bound["alpha"])
    if not bound["beta"]:
        return Rewritten(IDENTITY, {"self": product})
    other = _scaled(bound["self"], bound["beta"])
    return call("add.Tensor", self=product, other=other, alpha=1)


def _attention(bound: Named, node: fx.Node) -> Rewritten | None:
    """Repeats the keys and values that several heads share."""
    name = "scaled_dot_product_attention"
    if not bound["enable_gqa"]:
        return call(name, bound)
    num_heads = shape_of(bound["query"])[-3]
    key, value = (_repeat_heads(bound[n], num_heads) for n in ("key", "value"))
    return call(name, bound, key=key, value=value)


def _repeat_heads(source: fx.Node, num_heads: int) -> Rewritten:
    *before, count, length, features = shape_of(source)
    dim = len(before) + 1
    single = call("unsqueeze", self=source, dim=dim)
    sizes = [*before, count, num_heads // count, length, features]
    copies = call("expand", self=single, size=sizes)
    return reshape(copies, [*before, num_heads, length, features])


def _instance_norm(bound: Named, node: fx.Node) -> Rewritten | None:
    """Becomes a group norm of single channels, or a batch norm."""
    if not bound["use_input_stats"]:
        return call("_native_batch_norm_legit_no_training", bound)
    num_groups = shape_of(bound["input"])[1]
    return call("group_norm", bound, num_groups=num_groups)


def _variance(bound: Named, node: fx.Node) -> Rewritten | None:
    """Subtracts the mean first, as torch does."""
    source, dims = bound["self"], bound["dim"]
    correction = bound.get("correction", bound.get("unbiased"))
    correction = 1 if correction is None else correction
    count = math.prod(shape_of(source)[dim] for dim in dims or ())
    if not dims or not isinstance(count, int) or count <= correction:
        return None
    over = {"dim": dims, "dtype": None}
    mean = call("mean.dim", over, self=source, keepdim=True)
    difference = call("sub.Tensor", self=source, other=mean, alpha=1)
    squares = call("pow.Tensor_Scalar", self=difference, exponent=2)
    keepdim = bound["keepdim"]
    total = call("sum.dim_IntList", over, self=squares, keepdim=keepdim)
    return call("div.Scalar", self=total, other=count - correction)


def _deviation(bound: Named, node: fx.Node) -> Rewritten | None:
    variance = _variance(bound, node)
    return variance and call("sqrt", self=variance)


def _named_padding(name: str) -> Rewrite:
    """Computes the widths of ``padding="same"`` and ``"valid"``."""

    def rewritten(bound: Named, node: fx.Node) -> Rewritten | None:
        spans = [
            0 if bound["padding"] == "valid" else dilation * (size - 1)
            for dilation, size in zip(
                bound["dilation"], shape_of(bound["weight"])[2:], strict=True
            )
        ]
        source = bound["input"]
        if any(span % 2 for span in spans):
            # torch pads the end by one more.
            widths = [span % 2 * end for span in spans[::-1] for end in (0, 1)]
            source = call("pad", self=source, pad=widths, value=0)
        padding = [span // 2 for span in spans]
        return call(name, bound, input=source, padding=padding)

    return rewritten


def _slice_scatter(bound: Named, node: fx.Node) -> Rewritten | None:
    """Joins the overwritten entries with those before and after them."""
    source, dim = bound["self"], bound["dim"]
    if shape_of(source) == shape_of(bound["src"]):
        return Rewritten(IDENTITY, {"self": bound["src"]})
    size = shape_of(source)[dim]
    if not isinstance(size, int) or bound["step"] != 1:
        return None
    start, end, _ = slice(bound["start"], bound["end"]).indices(size)
    before, after = (
        call("slice.Tensor", self=source, dim=dim, start=a, end=b, step=1)
        for a, b in ((0, start), (end, size))
    )
    return call("cat", tensors=[before, bound["src"], after], dim=dim)


def _pad(bound: Named, node: fx.Node) -> Rewritten | None:
    source, mode, widths = bound["self"], bound["mode"], list(bound["pad"])
    while widths and not any(widths[-2:]):
        del widths[-2:]
    if not widths:
        return Rewritten(IDENTITY, bound)
    if mode == "constant":
        return call("pad", bound, pad=widths)
    count = len(widths) // 2
    if mode != "reflect" or count > 2:
        return None
    return call(f"reflection_pad{count}d", self=source, padding=widths)


DECOMPOSITIONS: Mapping[str, Rewrite] = MappingProxyType(
    {
        "masked_fill.Scalar": _masked_fill,
        "masked_fill.Tensor": _masked_fill,
        "where.Scalar": _where,
        "where.ScalarSelf": _where,
        "where.ScalarOther": _where,
        "bitwise_not": _logical("logical_not"),
        "bitwise_and.Tensor": _logical("logical_and"),
        "bitwise_or.Tensor": _logical("logical_or"),
        "bitwise_xor.Tensor": _logical("ne.Tensor"),
        "__and__.Tensor": _logical("logical_and"),
        "__or__.Tensor": _logical("logical_or"),
        "__xor__.Tensor": _logical("ne.Tensor"),
        "max.dim": _extreme("amax"),
        "min.dim": _extreme("amin"),
        "mm": lambda b, n: call("matmul", self=b["self"], other=b["mat2"]),
        "addmm": _addmm,
        "baddbmm": lambda b, n: _plus_product(b, b["batch1"], b["batch2"]),
        "scaled_dot_product_attention": _attention,
        "instance_norm": _instance_norm,
        "var.dim": _variance,
        "var.correction": _variance,
        "std.dim": _deviation,
        "std.correction": _deviation,
        "pad": _pad,
        "slice_scatter": _slice_scatter,
        **{
            f"conv{n}d.padding": _named_padding(f"conv{n}d") for n in (1, 2, 3)
        },
    }
)
