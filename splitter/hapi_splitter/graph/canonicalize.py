"""Rewrites exported operators to the smaller set that packages hold."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import fx

from hapi_splitter.graph.decompositions import (
    DECOMPOSITIONS,
    IDENTITY,
    Named,
    Rewrite,
    Rewritten,
)
from hapi_splitter.graph.indexing import INDEX
from hapi_splitter.graph.operators import EMBEDDING, operators

RESHAPES = frozenset(
    f"aten.{name}"
    for name in (
        "view.default",
        "_unsafe_view.default",
        "reshape.default",
        "flatten.using_ints",
        "unflatten.int",
    )
)
"""Operators that regroup dimensions in row-major order."""

IDENTITIES = frozenset(
    f"aten.{name}"
    for name in (
        "alias.default",
        "detach.default",
        "lift_fresh_copy.default",
        "dropout.default",
        "feature_dropout.default",
    )
)
"""Operators without effect in eval mode; see :func:`is_identity`."""


def is_identity(node: fx.Node) -> bool:
    """Returns True if a call returns its argument.

    Dropout that is active in eval mode is random and no identity.
    """
    if str(node.target) not in IDENTITIES:
        return False
    return "dropout" not in str(node.target) or not all(node.args[1:3])


SPLITS = frozenset(
    {
        "aten.split.Tensor",
        "aten.split_with_sizes.default",
        "aten.chunk.default",
        "aten.unbind.int",
    }
)
"""Operators that return a list of slices along ``dim``."""

ASSERTIONS = frozenset({"aten._assert_tensor_metadata.default"})
"""Operators without a result; the loader repeats their checks."""

DECOMPOSED = frozenset(
    f"aten.{name}"
    for name in (
        "adaptive_avg_pool1d.default",
        "addcmul.default",
        "avg_pool1d.default",
        "channel_shuffle.default",
        "einsum.default",
        "glu.default",
        "repeat_interleave.self_int",
        "type_as.default",
    )
)
"""Operators for which torch has a decomposition."""

_NEUTRAL = (None, False, torch.contiguous_format, torch.strided)


def rewrite(name: str, bound: Named, node: fx.Node) -> Rewritten | None:
    """Returns the table's equivalent of an exported operator.

    Args:
        name: name of the exported operator.
        bound: its arguments by name, including defaults.
        node: the exported call.

    Returns:
        Operator and arguments; :data:`IDENTITY` as the operator if the call
        has no effect; None if packages cannot hold it.
    """
    special = _SPECIAL.get(name)
    if special is not None:
        return special(bound, node)
    return _direct(name, bound)


def is_known(name: str) -> bool:
    """Returns True if packages hold some form of an exported operator."""
    return (
        name in operators()
        or name in _SPECIAL
        or name in RESHAPES | SPLITS | IDENTITIES | {INDEX}
    )


def _direct(name: str, bound: Named) -> Rewritten | None:
    """Returns the same operator if its other arguments have defaults."""
    operator = operators().get(name)
    if operator is None:
        return None
    expected = {parameter.name for parameter in operator.parameters}
    extra = {k: v for k, v in bound.items() if k not in expected}
    if any(value not in _NEUTRAL for value in extra.values()):
        return None
    return Rewritten(name, bound)


def _clone(bound: Named, node: fx.Node) -> Rewritten | None:
    if bound["memory_format"] is torch.contiguous_format:
        return Rewritten("aten.contiguous.default", bound)
    return Rewritten(IDENTITY, bound)


def _squeeze(bound: Named, node: fx.Node) -> Rewritten | None:
    dim = bound.get("dim")
    if dim is None:
        shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        dim = [i for i, s in enumerate(shape) if isinstance(s, int) and s == 1]
    dims = [dim] if isinstance(dim, int) else dim
    return Rewritten("aten.squeeze.dims", {"self": bound["self"], "dim": dims})


def _slice(bound: Named, node: fx.Node) -> Rewritten | None:
    source = node.args[0].meta["val"]  # type: ignore[union-attr]
    size = source.shape[bound["dim"]]
    if not isinstance(size, int):
        is_whole = tuple(source.shape) == tuple(node.meta["val"].shape)
        return (
            Rewritten(IDENTITY, bound)
            if is_whole and bound["step"] == 1
            else None
        )
    start, end, step = slice(
        bound["start"], bound["end"], bound["step"]
    ).indices(size)
    return Rewritten(
        "aten.slice.Tensor",
        bound
        | {
            "start": start,
            "end": max(start, end),
            "step": step,
        },
    )


def _expand(bound: Named, node: fx.Node) -> Rewritten | None:
    sizes = list(node.meta["val"].shape)
    return Rewritten(
        "aten.expand.default", {"self": bound["self"], "size": sizes}
    )


def _repeat(bound: Named, node: fx.Node) -> Rewritten | None:
    """Supports dimensions of size 1, or one dimension of constant size."""
    source = bound["self"].meta["val"]
    sizes = list(node.meta["val"].shape)
    added = len(sizes) - source.ndim
    repeated = [
        dim
        for dim, count in enumerate(bound["repeats"])
        if not isinstance(count, int) or count != 1
    ]
    old = [1] * added + list(source.shape)
    if all(isinstance(old[d], int) and old[d] == 1 for d in repeated):
        return Rewritten(
            "aten.expand.default", {"self": bound["self"], "size": sizes}
        )
    count = bound["repeats"][repeated[0]]
    if added or len(repeated) > 1 or not isinstance(count, int):
        return None
    if count < 1:
        return None
    copies = [bound["self"]] * count
    return Rewritten(
        "aten.cat.default", {"tensors": copies, "dim": repeated[0]}
    )


def _cat(bound: Named, node: fx.Node) -> Rewritten | None:
    """Drops the empty vectors that torch ignores, as caches start with."""
    tensors = [t for t in bound["tensors"] if t.meta["val"].shape != (0,)]
    if len(tensors) == 1:
        return Rewritten(IDENTITY, {"self": tensors[0]})
    return Rewritten("aten.cat.default", bound | {"tensors": tensors})


def _copy(bound: Named, node: fx.Node) -> Rewritten | None:
    """Becomes a copy of the source, as the target is fully overwritten."""
    source, result = bound["src"].meta["val"], node.meta["val"]
    if (source.shape, source.dtype) != (result.shape, result.dtype):
        return None
    return Rewritten("aten.contiguous.default", {"self": bound["src"]})


def _square(bound: Named, node: fx.Node) -> Rewritten | None:
    return Rewritten(
        "aten.mul.Tensor", {"self": bound["self"], "other": bound["self"]}
    )


def _embedding(bound: Named, node: fx.Node) -> Rewritten | None:
    """Drops the arguments that concern only gradients."""
    return Rewritten(
        EMBEDDING, {name: bound[name] for name in ("weight", "indices")}
    )


def _matrix_transpose(bound: Named, node: fx.Node) -> Rewritten | None:
    return Rewritten("aten.transpose.int", bound | {"dim0": 0, "dim1": 1})


def _gelu(bound: Named, node: fx.Node) -> Rewritten | None:
    tanh = bound["approximate"] == "tanh"
    return Rewritten("aten.gelu.default", bound | {"approximate": tanh})


def _reduce(name: str) -> Rewrite:
    def reduced(bound: Named, node: fx.Node) -> Rewritten | None:
        return Rewritten(name, bound) if bound["dim"] else None

    return reduced


def _with_number(name: str) -> Rewrite:
    """Picks the scalar overload: ``x * 2`` is exported as the tensor one."""

    def numbered(bound: Named, node: fx.Node) -> Rewritten | None:
        if isinstance(bound["other"], fx.Node):
            return _direct(f"aten.{name}.Tensor", bound)
        return _direct(f"aten.{name}.Scalar", bound)

    return numbered


def _dtype(bound: Named, node: fx.Node) -> Rewritten | None:
    dtype = node.meta["val"].dtype
    return Rewritten(
        "aten._to_copy.default", {"self": bound["self"], "dtype": dtype}
    )


def _adaptive_max_pool(bound: Named, node: fx.Node) -> Rewritten | None:
    """Supports windows of equal size."""
    sizes = bound["self"].meta["val"].shape[-2:]
    pairs = list(zip(sizes, bound["output_size"], strict=True))
    if any(size % target for size, target in pairs):
        return None
    window = [size // target for size, target in pairs]
    return Rewritten(
        "aten.max_pool2d.default",
        {
            "self": bound["self"],
            "kernel_size": window,
            "stride": window,
            "padding": [0, 0],
            "dilation": [1, 1],
            "ceil_mode": False,
        },
    )


def _upsample(name: str) -> Rewrite:
    def upsampled(bound: Named, node: fx.Node) -> Rewritten | None:
        factors = bound["scale_factors"] or (None, None)
        return Rewritten(
            f"aten.{name}.default",
            bound
            | {
                "self": bound["input"],
                "output_size": list(node.meta["val"].shape[2:]),
                "scales_h": factors[0],
                "scales_w": factors[1],
            },
        )

    return upsampled


_SPECIAL: Mapping[str, Rewrite] = MappingProxyType(
    {
        **DECOMPOSITIONS,
        "aten.clone.default": _clone,
        "aten.cat.default": _cat,
        "aten.squeeze.default": _squeeze,
        "aten.squeeze.dim": _squeeze,
        "aten.slice.Tensor": _slice,
        "aten.expand.default": _expand,
        "aten.repeat.default": _repeat,
        "aten.copy.default": _copy,
        "aten.square.default": _square,
        "aten.t.default": _matrix_transpose,
        EMBEDDING: _embedding,
        "aten.gelu.default": _gelu,
        "aten.mean.dim": _reduce("aten.mean.dim"),
        "aten.sum.dim_IntList": _reduce("aten.sum.dim_IntList"),
        "aten.linalg_vector_norm.default": _reduce(
            "aten.linalg_vector_norm.default"
        ),
        "aten.add.Tensor": _with_number("add"),
        "aten.sub.Tensor": _with_number("sub"),
        "aten.mul.Tensor": _with_number("mul"),
        "aten.div.Tensor": _with_number("div"),
        "aten.multiply.Tensor": _with_number("mul"),
        "aten.divide.Tensor": _with_number("div"),
        "aten.to.dtype": _dtype,
        "aten._to_copy.default": _dtype,
        "aten.adaptive_max_pool2d.default": _adaptive_max_pool,
        "aten.upsample_nearest2d.vec": _upsample("upsample_nearest2d"),
        "aten.upsample_bilinear2d.vec": _upsample("upsample_bilinear2d"),
        "aten.upsample_bicubic2d.vec": _upsample("upsample_bicubic2d"),
    }
)
