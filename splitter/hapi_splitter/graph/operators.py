"""The operators that a model package may call.

One row per operator: its arguments with their types, in the order of the
ATen schema, and its batch rule. Other operators are refused. All rows are
pure functions: none writes to an argument, draws random numbers, reads a file
or depends on anything but its arguments. Arguments after ``*`` are passed by
name.

Types: ``tensor``, ``tensor?``, ``tensors``, ``int``, ``int?``, ``ints``,
``size`` (integers or multiples of the batch), ``float``, ``number``,
``number?``, ``bool``, ``dtype?``; ``zero``, a probability that must be 0
because others would be random; and ``tanh``, a bool that selects GELU's
approximation (packages hold no strings).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hapi_splitter.graph import batch_independence as rules
from hapi_splitter.graph.batch_independence import Rule

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float32": torch.float32,
        "int64": torch.int64,
        "int32": torch.int32,
        "uint8": torch.uint8,
        "bool": torch.bool,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
)
"""Supported dtypes."""
HALVES = frozenset({torch.bfloat16, torch.float16})
FLOATS = HALVES | {torch.float32}
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {dtype: name for name, dtype in DTYPES.items()}
)

EMBEDDING = "aten.embedding.default"
CUMSUM = "aten.cumsum.default"

_UNARY = "self: tensor"
_PAIR = "self: tensor, other: tensor"
_SCALED_PAIR = "self: tensor, other: tensor, *, alpha: number"
_WITH_NUMBER = "self: tensor, other: number"
_WITH_SCALED_NUMBER = "self: tensor, other: number, alpha: number"
_REDUCE = "self: tensor, dim: ints, keepdim: bool"
_REDUCE_DTYPE = "self: tensor, dim: ints, keepdim: bool, *, dtype: dtype?"
_REFLECT = "self: tensor, padding: ints"
_SOFTMAX = "self: tensor, dim: int, dtype: dtype?"
_CONV = (
    "input: tensor, weight: tensor, bias: tensor?, stride: ints, "
    "padding: ints, dilation: ints, groups: int"
)
_MAX_POOL = (
    "self: tensor, kernel_size: ints, stride: ints, padding: ints, "
    "dilation: ints, ceil_mode: bool"
)
_AVG_POOL = (
    "self: tensor, kernel_size: ints, stride: ints, padding: ints, "
    "ceil_mode: bool, count_include_pad: bool, divisor_override: int?"
)
_ADAPTIVE = "self: tensor, output_size: ints"
_BATCH_NORM = (
    "input: tensor, weight: tensor?, bias: tensor?, running_mean: tensor, "
    "running_var: tensor, momentum: float, eps: float"
)
_ATTENTION = (
    "query: tensor, key: tensor, value: tensor, attn_mask: tensor?, "
    "dropout_p: zero, is_causal: bool, *, scale: number?"
)

# Arguments, batch rule, operators.  Names have the overload "default" unless
# they state another; "!": the operator has an in-place variant, which only the
# loader uses, as packages cannot name it.
_ROWS: tuple[tuple[str, Rule, str], ...] = (
    # elementwise, one tensor
    (
        _UNARY,
        rules.elementwise,
        "relu! relu6! sigmoid! hardsigmoid! hardswish! silu! mish! tanh! "
        "exp! log! sqrt! rsqrt! abs! neg! erf! sin! cos! floor! "
        "reciprocal! logical_not",
    ),
    ("self: tensor, *, approximate: tanh", rules.elementwise, "gelu!"),
    (
        "self: tensor, alpha: number, scale: number, input_scale: number",
        rules.elementwise,
        "elu!",
    ),
    ("self: tensor, negative_slope: number", rules.elementwise, "leaky_relu!"),
    (
        "self: tensor, beta: number, threshold: number",
        rules.elementwise,
        "softplus",
    ),
    (
        "self: tensor, min_val: number, max_val: number",
        rules.elementwise,
        "hardtanh!",
    ),
    ("self: tensor, min: number?, max: number?", rules.elementwise, "clamp!"),
    ("self: tensor, min: number", rules.elementwise, "clamp_min!"),
    ("self: tensor, exponent: number", rules.elementwise, "pow.Tensor_Scalar"),
    ("self: tensor, *, dtype: dtype?", rules.elementwise, "_to_copy"),
    # elementwise, two tensors or a tensor and a number
    (_SCALED_PAIR, rules.elementwise, "add.Tensor! sub.Tensor!"),
    (
        _PAIR,
        rules.elementwise,
        "mul.Tensor! div.Tensor! maximum minimum logical_and logical_or "
        "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor",
    ),
    ("self: tensor, exponent: tensor", rules.elementwise, "pow.Tensor_Tensor"),
    (
        _WITH_SCALED_NUMBER,
        rules.elementwise,
        "add.Scalar! sub.Scalar! rsub.Scalar",
    ),
    (
        _WITH_NUMBER,
        rules.elementwise,
        "mul.Scalar! div.Scalar! eq.Scalar ne.Scalar lt.Scalar le.Scalar "
        "gt.Scalar ge.Scalar",
    ),
    (
        "condition: tensor, self: tensor, other: tensor",
        rules.elementwise,
        "where.self",
    ),
    ("self: tensor, weight: tensor", rules.channelwise, "prelu"),
    # along dimensions other than the batch
    (_SOFTMAX, rules.along, "softmax.int log_softmax.int"),
    ("self: tensor, dims: ints", rules.along, "flip"),
    ("self: tensor, shifts: ints, dims: ints", rules.roll, "roll"),
    ("tensors: tensors, dim: int", rules.cat, "cat"),
    ("tensors: tensors, dim: int", rules.stack, "stack"),
    ("self: tensor, pad: ints, *, value: number?", rules.pad, "pad"),
    (_REFLECT, rules.pad, "reflection_pad1d reflection_pad2d"),
    (_REDUCE_DTYPE, rules.reduce, "mean.dim sum.dim_IntList"),
    ("self: tensor, dim: int, *, dtype: dtype?", rules.along, "cumsum"),
    ("self: tensor, dim: int, keepdim: bool", rules.reduce, "argmax"),
    (_REDUCE, rules.reduce, "amax amin logsumexp"),
    (
        "self: tensor, ord: number, dim: ints, keepdim: bool, *, "
        "dtype: dtype?",
        rules.reduce,
        "linalg_vector_norm",
    ),
    # convolution, pooling, resampling: images [batch, channels, ...]
    (_CONV, rules.conv, "conv1d conv2d conv3d"),
    (
        "input: tensor, weight: tensor, bias: tensor?, stride: ints, "
        "padding: ints, output_padding: ints, groups: int, dilation: ints",
        rules.conv,
        "conv_transpose2d.input",
    ),
    (_MAX_POOL, rules.columns, "max_pool1d"),
    (_MAX_POOL, rules.image, "max_pool2d"),
    (_MAX_POOL, rules.volume, "max_pool3d"),
    (_AVG_POOL, rules.image, "avg_pool2d"),
    (_AVG_POOL, rules.volume, "avg_pool3d"),
    (_ADAPTIVE, rules.image, "adaptive_avg_pool2d"),
    (_ADAPTIVE, rules.volume, "adaptive_avg_pool3d"),
    (
        "self: tensor, output_size: ints, scales_h: number?, "
        "scales_w: number?",
        rules.image,
        "upsample_nearest2d",
    ),
    (
        "self: tensor, output_size: ints, align_corners: bool, "
        "scales_h: number?, scales_w: number?",
        rules.image,
        "upsample_bilinear2d upsample_bicubic2d",
    ),
    (
        "self: tensor, kernel_size: ints, dilation: ints, padding: ints, "
        "stride: ints",
        rules.image,
        "im2col",
    ),
    (
        "self: tensor, output_size: ints, kernel_size: ints, "
        "dilation: ints, padding: ints, stride: ints",
        rules.columns,
        "col2im",
    ),
    ("self: tensor, upscale_factor: int", rules.image, "pixel_shuffle"),
    (_BATCH_NORM, rules.channelwise, "_native_batch_norm_legit_no_training"),
    (
        "input: tensor, num_groups: int, weight: tensor?, bias: tensor?, "
        "eps: float, cudnn_enabled: bool",
        rules.channelwise,
        "group_norm",
    ),
    (
        "input: tensor, normalized_shape: ints, weight: tensor?, "
        "bias: tensor?, eps: float, cudnn_enable: bool",
        rules.layer_norm,
        "layer_norm",
    ),
    (
        "input: tensor, normalized_shape: ints, weight: tensor?, eps: number?",
        rules.layer_norm,
        "rms_norm",
    ),
    # lookups; shapes.py checks their indices
    ("weight: tensor, indices: tensor", rules.embedding, "embedding"),
    ("self: tensor, dim: int, index: tensor", rules.along, "index_select"),
    ("self: tensor, dim: int, index: tensor", rules.gather, "gather"),
    # products
    ("input: tensor, weight: tensor, bias: tensor?", rules.linear, "linear"),
    (_PAIR, rules.matmul, "matmul"),
    ("self: tensor, mat2: tensor", rules.matmul, "bmm"),
    (_ATTENTION, rules.attention, "scaled_dot_product_attention"),
    # views
    ("self: tensor, shape: size", rules.reshape, "reshape"),
    ("self: tensor, size: size", rules.expand, "expand"),
    ("self: tensor, dims: ints", rules.permute, "permute"),
    ("self: tensor, dim0: int, dim1: int", rules.transpose, "transpose.int"),
    ("self: tensor, dim: int", rules.unsqueeze, "unsqueeze"),
    ("self: tensor, dim: ints", rules.squeeze, "squeeze.dims"),
    ("self: tensor, dim: int, index: int", rules.select, "select.int"),
    (
        "self: tensor, dim: int, start: int, end: int, step: int",
        rules.along,
        "slice.Tensor",
    ),
    (
        "self: tensor, dimension: int, size: int, step: int",
        rules.unfold,
        "unfold",
    ),
    (_UNARY, rules.elementwise, "contiguous"),
)


def op_names(words: str) -> frozenset[str]:
    """Returns full names of operators, whose default overload is "default"."""
    return frozenset(map(full_name, words.split()))


def full_name(word: str) -> str:
    """Returns the full name of an operator, such as ``aten.relu.default``."""
    return f"aten.{word}" if "." in word else f"aten.{word}.default"


VIEWS = op_names(
    "reshape expand permute transpose.int unsqueeze squeeze.dims select.int "
    "slice.Tensor unfold contiguous _to_copy"
)
"""Operators whose result may share memory with their input."""

PRODUCTS = op_names(
    "conv1d conv2d conv3d conv_transpose2d.input linear matmul bmm "
    "scaled_dot_product_attention"
)
"""Operators restricted to one floating-point type at a time.

torch's kernels for other types were not examined.  Those for 16 bits need no
more than memory that is linear in the batch, and torch reports all of it, so
that a worker measures it when it validates a package.  Without instructions
of the CPU for the type, a convolution unfolds the batch into columns: 9 times
its input for a 3x3 kernel, 27 times in three dimensions."""

INDICES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        EMBEDDING: ("weight", "indices"),
        "aten.index_select.default": ("self", "index"),
        "aten.gather.default": ("self", "index"),
    }
)
"""Operators that read entries by number: names of their table and indices."""

OVERLAPPING = op_names("expand unfold")
"""Views in which several entries may lie at one address."""

SELECTIONS = VIEWS - op_names("_to_copy") | op_names("flip roll cat stack")
"""Operators that move entries but never change them."""

COMMUTATIVE = op_names("add.Tensor mul.Tensor")
"""Operators whose tensors can be swapped with a bit-identical result."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of an operator."""

    name: str
    kind: str
    by_name: bool


@dataclass(frozen=True, slots=True)
class Operator:
    """One row of the table."""

    name: str
    parameters: tuple[Parameter, ...]
    rule: Rule
    inplace_name: str | None

    def overload(self) -> Any:
        """Returns the ``torch._ops.OpOverload`` of this row."""
        return _overload(self.name.removeprefix("aten."))

    def inplace_overload(self) -> Any:
        """Returns the overload that overwrites ``self``, or None."""
        return self.inplace_name and _overload(self.inplace_name)


@functools.cache
def operators() -> Mapping[str, Operator]:
    """Returns the table by operator name, such as ``aten.relu.default``."""
    table = {}
    for arguments, rule, words in _ROWS:
        for word in words.split():
            name = full_name(word.removesuffix("!"))
            packet, overload = name.removeprefix("aten.").split(".")
            inplace = f"{packet}_.{overload}" if word.endswith("!") else None
            parameters = _parameters(arguments)
            table[name] = Operator(name, parameters, rule, inplace)
    return MappingProxyType(table)


def _parameters(text: str) -> tuple[Parameter, ...]:
    positional, _, by_name = text.partition("*, ")
    return tuple(
        Parameter(*_name_and_kind(item), named)
        for part, named in ((positional, False), (by_name, True))
        for item in part.strip(", ").split(",")
        if item
    )


def _name_and_kind(item: str) -> tuple[str, str]:
    name, _, kind = item.strip().partition(": ")
    return name, kind


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)
