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
    call,
    dtype_of,
    shape_of,
)
from hapi_splitter.graph.indexing import INDEX
from hapi_splitter.graph.operators import full_name, op_names, operators

RESHAPES = op_names(
    "view _unsafe_view reshape flatten.using_ints unflatten.int"
)
"""Operators that regroup dimensions in row-major order."""

IDENTITIES = op_names("alias detach lift_fresh_copy dropout feature_dropout")
"""Operators without effect in eval mode; see :func:`is_identity`."""


def is_identity(node: fx.Node) -> bool:
    """Returns True if a call returns its argument.

    Dropout that is active in eval mode is random and no identity.
    """
    if str(node.target) not in IDENTITIES:
        return False
    return "dropout" not in str(node.target) or not all(node.args[1:3])


SPLITS = op_names("split.Tensor split_with_sizes chunk unbind.int")
"""Operators that return a list of slices along ``dim``."""

ASSERTIONS = op_names("_assert_tensor_metadata")
"""Operators without a result; the loader repeats their checks."""

DECOMPOSED = op_names(
    "adaptive_avg_pool1d addcmul avg_pool1d channel_shuffle einsum glu "
    "repeat_interleave.self_int type_as"
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
        return call("contiguous", bound)
    return Rewritten(IDENTITY, bound)


def _squeeze(bound: Named, node: fx.Node) -> Rewritten | None:
    dim = bound.get("dim")
    if dim is None:
        shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        dim = [i for i, s in enumerate(shape) if isinstance(s, int) and s == 1]
    dims = [dim] if isinstance(dim, int) else dim
    return call("squeeze.dims", self=bound["self"], dim=dims)


def _slice(bound: Named, node: fx.Node) -> Rewritten | None:
    source = node.args[0].meta["val"]  # type: ignore[union-attr]
    size = source.shape[bound["dim"]]
    is_whole = tuple(source.shape) == tuple(node.meta["val"].shape)
    if is_whole and bound["step"] == 1:
        return Rewritten(IDENTITY, bound)
    if not isinstance(size, int):
        return None
    span = slice(bound["start"], bound["end"], bound["step"])
    start, end, step = span.indices(size)
    end = max(start, end)
    return call("slice.Tensor", bound, start=start, end=end, step=step)


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
        return call("expand", self=bound["self"], size=sizes)
    count = bound["repeats"][repeated[0]]
    if added or len(repeated) > 1 or not isinstance(count, int) or count < 1:
        return None
    return call("cat", tensors=[bound["self"]] * count, dim=repeated[0])


def _cat(bound: Named, node: fx.Node) -> Rewritten | None:
    """Drops the empty vectors that torch ignores, as caches start with."""
    tensors = [t for t in bound["tensors"] if t.meta["val"].shape != (0,)]
    if len(tensors) == 1:
        return Rewritten(IDENTITY, {"self": tensors[0]})
    return call("cat", bound, tensors=tensors)


def _convert(bound: Named, node: fx.Node) -> Rewritten | None:
    source, result = bound["self"].meta["val"], node.meta["val"]
    if (source.dtype, source.stride()) == (result.dtype, result.stride()):
        return Rewritten(IDENTITY, bound)
    return call("_to_copy", bound, dtype=result.dtype)


def _copy(bound: Named, node: fx.Node) -> Rewritten | None:
    """Becomes a copy of the source, as the target is fully overwritten."""
    source, result = bound["src"].meta["val"], node.meta["val"]
    if (source.shape, source.dtype) != (result.shape, result.dtype):
        return None
    return call("contiguous", self=bound["src"])


def _reduce(name: str) -> Rewrite:
    def reduced(bound: Named, node: fx.Node) -> Rewritten | None:
        return call(name, bound) if bound["dim"] else None

    return reduced


def _with_number(name: str) -> Rewrite:
    """Picks the scalar overload: ``x * 2`` is exported as the tensor one."""

    def numbered(bound: Named, node: fx.Node) -> Rewritten | None:
        if isinstance(bound["other"], fx.Node):
            return _direct(f"aten.{name}.Tensor", bound)
        return _direct(f"aten.{name}.Scalar", bound)

    return numbered


def _adaptive_max_pool(bound: Named, node: fx.Node) -> Rewritten | None:
    """Supports windows of equal size."""
    sizes = bound["self"].meta["val"].shape[-2:]
    pairs = list(zip(sizes, bound["output_size"], strict=True))
    if any(size % target for size, target in pairs):
        return None
    window = [size // target for size, target in pairs]
    return call(
        "max_pool2d",
        self=bound["self"],
        kernel_size=window,
        stride=window,
        padding=[0, 0],
        dilation=[1, 1],
        ceil_mode=False,
    )


def _upsample(name: str) -> Rewrite:
    def upsampled(bound: Named, node: fx.Node) -> Rewritten | None:
        height, width = bound["scale_factors"] or (None, None)
        return call(
            name,
            bound,
            self=bound["input"],
            output_size=shape_of(node)[2:],
            scales_h=height,
            scales_w=width,
        )

    return upsampled


_REWRITES: Mapping[str, Rewrite] = MappingProxyType(
    {
        "clone": _clone,
        "cat": _cat,
        "squeeze": _squeeze,
        "squeeze.dim": _squeeze,
        "slice.Tensor": _slice,
        "expand": lambda b, n: call(
            "expand", self=b["self"], size=shape_of(n)
        ),
        "repeat": _repeat,
        "copy": _copy,
        "square": lambda b, n: call("mul.Tensor", b, other=b["self"]),
        "t": lambda b, n: call("transpose.int", b, dim0=0, dim1=1),
        # Its other arguments concern only gradients.
        "embedding": lambda b, n: call("embedding", b),
        "gelu": lambda b, n: call(
            "gelu", b, approximate=b["approximate"] == "tanh"
        ),
        "mean.dim": _reduce("mean.dim"),
        "sum.dim_IntList": _reduce("sum.dim_IntList"),
        "linalg_vector_norm": _reduce("linalg_vector_norm"),
        "add.Tensor": _with_number("add"),
        "sub.Tensor": _with_number("sub"),
        "mul.Tensor": _with_number("mul"),
        "div.Tensor": _with_number("div"),
        "multiply.Tensor": _with_number("mul"),
        "divide.Tensor": _with_number("div"),
        "to.dtype": lambda b, n: call("_to_copy", b, dtype=dtype_of(n)),
        "_to_copy": _convert,
        "adaptive_max_pool2d": _adaptive_max_pool,
        "upsample_nearest2d.vec": _upsample("upsample_nearest2d"),
        "upsample_bilinear2d.vec": _upsample("upsample_bilinear2d"),
        "upsample_bicubic2d.vec": _upsample("upsample_bicubic2d"),
    }
)
_SPECIAL: Mapping[str, Rewrite] = MappingProxyType(
    {
        full_name(word): rewrite
        for word, rewrite in {**DECOMPOSITIONS, **_REWRITES}.items()
    }
)
