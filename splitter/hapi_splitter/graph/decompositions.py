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

Named: TypeAlias = dict[str, Any]
"""Arguments by name. A value may be a tensor, which becomes a weight, or a
:class:`Rewritten` call."""


class Rewritten(NamedTuple):
    """A call of an operator of the table; its arguments may be calls."""

    op: str
    arguments: Named


Rewrite: TypeAlias = Callable[[Named, fx.Node], Rewritten | None]

IDENTITY = "identity"
"""Stands for a call whose result is its argument ``self``."""
_CONVOLUTIONS = ("aten.conv1d", "aten.conv2d", "aten.conv3d")


def shape_of(node: fx.Node) -> list[Any]:
    return list(node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def reshape(source: Any, shape: Sequence[Any]) -> Rewritten:
    return Rewritten(
        "aten.reshape.default", {"self": source, "shape": list(shape)}
    )


def _number_like(value: Any, node: fx.Node) -> torch.Tensor:
    result = node.meta["val"]
    return torch.tensor(value, dtype=result.dtype, device=result.device)


def index_select(source: Any, dim: int, index: torch.Tensor) -> Rewritten:
    return Rewritten(
        "aten.index_select.default",
        {"self": source, "dim": dim, "index": index},
    )


def _scaled(source: Any, factor: float) -> Any:
    if factor == 1:
        return source
    return Rewritten("aten.mul.Scalar", {"self": source, "other": factor})


def _masked_fill(bound: Named, node: fx.Node) -> Rewritten | None:
    """The number becomes a weight, because it is often infinite."""
    value = bound["value"]
    if not isinstance(value, fx.Node):
        value = _number_like(value, node)
    elif dtype_of(value) != dtype_of(node):
        return None
    return Rewritten(
        "aten.where.self",
        {"condition": bound["mask"], "self": value, "other": bound["self"]},
    )


def _where(bound: Named, node: fx.Node) -> Rewritten | None:
    numbers = {
        name: _number_like(bound[name], node)
        for name in ("self", "other")
        if not isinstance(bound[name], fx.Node)
    }
    return Rewritten("aten.where.self", bound | numbers)


def _logical(name: str) -> Rewrite:
    """Supports operators on bits for bools."""

    def rewritten(bound: Named, node: fx.Node) -> Rewritten | None:
        sources = [n for n in bound.values() if isinstance(n, fx.Node)]
        is_bool = all(dtype_of(source) == torch.bool for source in sources)
        if not is_bool or len(sources) < len(bound):
            return None
        return Rewritten(f"aten.{name}", bound)

    return rewritten


def _extreme(name: str) -> Rewrite:
    """Supports the values; nothing may read the indices."""

    def rewritten(bound: Named, node: fx.Node) -> Rewritten | None:
        return Rewritten(name, bound | {"dim": [bound["dim"]]})

    return rewritten


def _matmul(bound: Named, node: fx.Node) -> Rewritten | None:
    return Rewritten(
        "aten.matmul.default", {"self": bound["self"], "other": bound["mat2"]}
    )


def _addmm(bound: Named, node: fx.Node) -> Rewritten | None:
    bias, weight = bound["self"], bound["mat2"]
    is_linear = weight.op == "placeholder" and len(shape_of(bias)) == 1
    if is_linear and bound["alpha"] == bound["beta"] == 1:
        turned = {"self": weight, "dim0": 0, "dim1": 1}
        return Rewritten(
            "aten.linear.default",
            {
                "input": bound["mat1"],
                "weight": Rewritten("aten.transpose.int", turned),
                "bias": bias,
            },
        )
    return _plus_product(bound, {"self": bound["mat1"], "other": weight})


def _baddbmm(bound: Named, node: fx.Node) -> Rewritten | None:
    factors = {"self": bound["batch1"], "other": bound["batch2"]}
    return _plus_product(bound, factors)


def _plus_product(bound: Named, factors: Named) -> Rewritten:
    product = _scaled(
        Rewritten("aten.matmul.default", factors), bound["alpha"]
    )
    if not bound["beta"]:
        return Rewritten(IDENTITY, {"self": product})
    return Rewritten(
        "aten.add.Tensor",
        {
            "self": product,
            "other": _scaled(bound["self"], bound["beta"]),
            "alpha": 1,
        },
    )


def _attention(bound: Named, node: fx.Node) -> Rewritten | None:
    """Repeats the keys and values that several heads share."""
    name = "aten.scaled_dot_product_attention.default"
    if not bound["enable_gqa"]:
        return Rewritten(name, bound)
    num_heads = shape_of(bound["query"])[-3]
    repeated = {
        name: _repeat_heads(bound[name], num_heads)
        for name in ("key", "value")
    }
    return Rewritten(name, bound | repeated)


def _repeat_heads(source: fx.Node, num_heads: int) -> Rewritten:
    *before, count, length, features = shape_of(source)
    dim = len(before) + 1
    single = Rewritten("aten.unsqueeze.default", {"self": source, "dim": dim})
    sizes = [*before, count, num_heads // count, length, features]
    copies = Rewritten("aten.expand.default", {"self": single, "size": sizes})
    return reshape(copies, [*before, num_heads, length, features])


def _instance_norm(bound: Named, node: fx.Node) -> Rewritten | None:
    """Becomes a group norm of single channels, or a batch norm."""
    if not bound["use_input_stats"]:
        name = "aten._native_batch_norm_legit_no_training.default"
        return Rewritten(name, bound)
    num_groups = shape_of(bound["input"])[1]
    return Rewritten(
        "aten.group_norm.default", bound | {"num_groups": num_groups}
    )


def _variance(bound: Named, node: fx.Node) -> Rewritten | None:
    """Subtracts the mean first, as torch does."""
    source, dims = bound["self"], bound["dim"]
    correction = bound.get("correction", bound.get("unbiased"))
    correction = 1 if correction is None else correction
    count = math.prod(shape_of(source)[dim] for dim in dims or ())
    if not dims or not isinstance(count, int) or count <= correction:
        return None
    over = {"dim": dims, "dtype": None}
    mean = Rewritten("aten.mean.dim", over | {"self": source, "keepdim": True})
    difference = Rewritten(
        "aten.sub.Tensor", {"self": source, "other": mean, "alpha": 1}
    )
    squares = Rewritten(
        "aten.pow.Tensor_Scalar", {"self": difference, "exponent": 2}
    )
    total = Rewritten(
        "aten.sum.dim_IntList",
        over | {"self": squares, "keepdim": bound["keepdim"]},
    )
    return Rewritten(
        "aten.div.Scalar", {"self": total, "other": count - correction}
    )


def _deviation(bound: Named, node: fx.Node) -> Rewritten | None:
    variance = _variance(bound, node)
    return variance and Rewritten("aten.sqrt.default", {"self": variance})


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
            arguments = {"self": source, "pad": widths, "value": 0}
            source = Rewritten("aten.pad.default", arguments)
        padding = [span // 2 for span in spans]
        return Rewritten(name, bound | {"input": source, "padding": padding})

    return rewritten


def _slice_scatter(bound: Named, node: fx.Node) -> Rewritten | None:
    """Joins the overwritten entries with those before and after them."""
    source, dim = bound["self"], bound["dim"]
    size = shape_of(source)[dim]
    if not isinstance(size, int) or bound["step"] != 1:
        return None
    start, end, _ = slice(bound["start"], bound["end"]).indices(size)
    parts = [
        Rewritten(
            "aten.slice.Tensor",
            {
                "self": source,
                "dim": dim,
                "start": first,
                "end": last,
                "step": 1,
            },
        )
        for first, last in ((0, start), (end, size))
    ]
    joined = [parts[0], bound["src"], parts[1]]
    return Rewritten("aten.cat.default", {"tensors": joined, "dim": dim})


def _pad(bound: Named, node: fx.Node) -> Rewritten | None:
    source, mode, widths = bound["self"], bound["mode"], list(bound["pad"])
    while widths and not any(widths[-2:]):
        del widths[-2:]
    if not widths:
        return Rewritten(IDENTITY, bound)
    if mode == "constant":
        return Rewritten("aten.pad.default", bound | {"pad": widths})
    count = len(widths) // 2
    if mode != "reflect" or count > 2:
        return None
    arguments = {"self": source, "padding": widths}
    return Rewritten(f"aten.reflection_pad{count}d.default", arguments)


DECOMPOSITIONS: Mapping[str, Rewrite] = MappingProxyType(
    {
        "aten.masked_fill.Scalar": _masked_fill,
        "aten.masked_fill.Tensor": _masked_fill,
        "aten.where.Scalar": _where,
        "aten.where.ScalarSelf": _where,
        "aten.where.ScalarOther": _where,
        "aten.bitwise_not.default": _logical("logical_not.default"),
        "aten.bitwise_and.Tensor": _logical("logical_and.default"),
        "aten.bitwise_or.Tensor": _logical("logical_or.default"),
        "aten.bitwise_xor.Tensor": _logical("ne.Tensor"),
        "aten.__and__.Tensor": _logical("logical_and.default"),
        "aten.__or__.Tensor": _logical("logical_or.default"),
        "aten.__xor__.Tensor": _logical("ne.Tensor"),
        "aten.max.dim": _extreme("aten.amax.default"),
        "aten.min.dim": _extreme("aten.amin.default"),
        "aten.mm.default": _matmul,
        "aten.addmm.default": _addmm,
        "aten.baddbmm.default": _baddbmm,
        "aten.scaled_dot_product_attention.default": _attention,
        "aten.instance_norm.default": _instance_norm,
        "aten.var.dim": _variance,
        "aten.var.correction": _variance,
        "aten.std.dim": _deviation,
        "aten.std.correction": _deviation,
        "aten.pad.default": _pad,
        "aten.slice_scatter.default": _slice_scatter,
        **{
            f"{name}.padding": _named_padding(f"{name}.default")
            for name in _CONVOLUTIONS
        },
    }
)
