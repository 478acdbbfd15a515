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

# operator -> (arguments, batch rule, in-place variant).
# Only the loader uses in-place variants: packages cannot name them.
_ROWS: Mapping[str, tuple[str, Rule, str | None]] = MappingProxyType(
    {
        # elementwise, one tensor
        "aten.relu.default": (_UNARY, rules.elementwise, "relu_.default"),
        "aten.relu6.default": (_UNARY, rules.elementwise, "relu6_.default"),
        "aten.sigmoid.default": (
            _UNARY,
            rules.elementwise,
            "sigmoid_.default",
        ),
        "aten.hardsigmoid.default": (
            _UNARY,
            rules.elementwise,
            "hardsigmoid_.default",
        ),
        "aten.hardswish.default": (
            _UNARY,
            rules.elementwise,
            "hardswish_.default",
        ),
        "aten.silu.default": (_UNARY, rules.elementwise, "silu_.default"),
        "aten.mish.default": (_UNARY, rules.elementwise, "mish_.default"),
        "aten.tanh.default": (_UNARY, rules.elementwise, "tanh_.default"),
        "aten.exp.default": (_UNARY, rules.elementwise, "exp_.default"),
        "aten.log.default": (_UNARY, rules.elementwise, "log_.default"),
        "aten.sqrt.default": (_UNARY, rules.elementwise, "sqrt_.default"),
        "aten.rsqrt.default": (_UNARY, rules.elementwise, "rsqrt_.default"),
        "aten.abs.default": (_UNARY, rules.elementwise, "abs_.default"),
        "aten.neg.default": (_UNARY, rules.elementwise, "neg_.default"),
        "aten.erf.default": (_UNARY, rules.elementwise, "erf_.default"),
        "aten.sin.default": (_UNARY, rules.elementwise, "sin_.default"),
        "aten.cos.default": (_UNARY, rules.elementwise, "cos_.default"),
        "aten.floor.default": (_UNARY, rules.elementwise, "floor_.default"),
        "aten.reciprocal.default": (
            _UNARY,
            rules.elementwise,
            "reciprocal_.default",
        ),
        "aten.logical_not.default": (_UNARY, rules.elementwise, None),
        "aten.gelu.default": (
            "self: tensor, *, approximate: tanh",
            rules.elementwise,
            "gelu_.default",
        ),
        "aten.elu.default": (
            "self: tensor, alpha: number, scale: number, input_scale: number",
            rules.elementwise,
            "elu_.default",
        ),
        "aten.leaky_relu.default": (
            "self: tensor, negative_slope: number",
            rules.elementwise,
            "leaky_relu_.default",
        ),
        "aten.softplus.default": (
            "self: tensor, beta: number, threshold: number",
            rules.elementwise,
            None,
        ),
        "aten.hardtanh.default": (
            "self: tensor, min_val: number, max_val: number",
            rules.elementwise,
            "hardtanh_.default",
        ),
        "aten.clamp.default": (
            "self: tensor, min: number?, max: number?",
            rules.elementwise,
            "clamp_.default",
        ),
        "aten.clamp_min.default": (
            "self: tensor, min: number",
            rules.elementwise,
            "clamp_min_.default",
        ),
        "aten.pow.Tensor_Scalar": (
            "self: tensor, exponent: number",
            rules.elementwise,
            None,
        ),
        "aten._to_copy.default": (
            "self: tensor, *, dtype: dtype?",
            rules.elementwise,
            None,
        ),
        # elementwise, two tensors or a tensor and a number
        "aten.add.Tensor": (_SCALED_PAIR, rules.elementwise, "add_.Tensor"),
        "aten.sub.Tensor": (_SCALED_PAIR, rules.elementwise, "sub_.Tensor"),
        "aten.mul.Tensor": (_PAIR, rules.elementwise, "mul_.Tensor"),
        "aten.div.Tensor": (_PAIR, rules.elementwise, "div_.Tensor"),
        "aten.maximum.default": (_PAIR, rules.elementwise, None),
        "aten.minimum.default": (_PAIR, rules.elementwise, None),
        "aten.pow.Tensor_Tensor": (
            "self: tensor, exponent: tensor",
            rules.elementwise,
            None,
        ),
        "aten.logical_and.default": (_PAIR, rules.elementwise, None),
        "aten.logical_or.default": (_PAIR, rules.elementwise, None),
        "aten.eq.Tensor": (_PAIR, rules.elementwise, None),
        "aten.ne.Tensor": (_PAIR, rules.elementwise, None),
        "aten.lt.Tensor": (_PAIR, rules.elementwise, None),
        "aten.le.Tensor": (_PAIR, rules.elementwise, None),
        "aten.gt.Tensor": (_PAIR, rules.elementwise, None),
        "aten.ge.Tensor": (_PAIR, rules.elementwise, None),
        "aten.add.Scalar": (
            _WITH_SCALED_NUMBER,
            rules.elementwise,
            "add_.Scalar",
        ),
        "aten.sub.Scalar": (
            _WITH_SCALED_NUMBER,
            rules.elementwise,
            "sub_.Scalar",
        ),
        "aten.rsub.Scalar": (_WITH_SCALED_NUMBER, rules.elementwise, None),
        "aten.mul.Scalar": (_WITH_NUMBER, rules.elementwise, "mul_.Scalar"),
        "aten.div.Scalar": (_WITH_NUMBER, rules.elementwise, "div_.Scalar"),
        "aten.eq.Scalar": (_WITH_NUMBER, rules.elementwise, None),
        "aten.ne.Scalar": (_WITH_NUMBER, rules.elementwise, None),
        "aten.lt.Scalar": (_WITH_NUMBER, rules.elementwise, None),
        "aten.le.Scalar": (_WITH_NUMBER, rules.elementwise, None),
        "aten.gt.Scalar": (_WITH_NUMBER, rules.elementwise, None),
        "aten.ge.Scalar": (_WITH_NUMBER, rules.elementwise, None),
        "aten.where.self": (
            "condition: tensor, self: tensor, other: tensor",
            rules.elementwise,
            None,
        ),
        "aten.prelu.default": (
            "self: tensor, weight: tensor",
            rules.channelwise,
            None,
        ),
        # along dimensions other than the batch
        "aten.softmax.int": (_SOFTMAX, rules.along, None),
        "aten.log_softmax.int": (_SOFTMAX, rules.along, None),
        "aten.flip.default": ("self: tensor, dims: ints", rules.along, None),
        "aten.roll.default": (
            "self: tensor, shifts: ints, dims: ints",
            rules.roll,
            None,
        ),
        "aten.cat.default": ("tensors: tensors, dim: int", rules.cat, None),
        "aten.stack.default": (
            "tensors: tensors, dim: int",
            rules.stack,
            None,
        ),
        "aten.pad.default": (
            "self: tensor, pad: ints, *, value: number?",
            rules.pad,
            None,
        ),
        "aten.reflection_pad1d.default": (_REFLECT, rules.pad, None),
        "aten.reflection_pad2d.default": (_REFLECT, rules.pad, None),
        "aten.mean.dim": (_REDUCE_DTYPE, rules.reduce, None),
        "aten.sum.dim_IntList": (_REDUCE_DTYPE, rules.reduce, None),
        CUMSUM: (
            "self: tensor, dim: int, *, dtype: dtype?",
            rules.along,
            None,
        ),
        "aten.argmax.default": (
            "self: tensor, dim: int, keepdim: bool",
            rules.reduce,
            None,
        ),
        "aten.amax.default": (_REDUCE, rules.reduce, None),
        "aten.amin.default": (_REDUCE, rules.reduce, None),
        "aten.logsumexp.default": (_REDUCE, rules.reduce, None),
        "aten.linalg_vector_norm.default": (
            "self: tensor, ord: number, dim: ints, keepdim: bool, *, "
            "dtype: dtype?",
            rules.reduce,
            None,
        ),
        # convolution, pooling, resampling: images [batch, channels, ...]
        "aten.conv1d.default": (_CONV, rules.conv, None),
        "aten.conv2d.default": (_CONV, rules.conv, None),
        "aten.conv3d.default": (_CONV, rules.conv, None),
        "aten.conv_transpose2d.input": (
            "input: tensor, weight: tensor, bias: tensor?, stride: ints, "
            "padding: ints, output_padding: ints, groups: int, "
            "dilation: ints",
            rules.conv,
            None,
        ),
        "aten.max_pool1d.default": (_MAX_POOL, rules.columns, None),
        "aten.max_pool2d.default": (_MAX_POOL, rules.image, None),
        "aten.max_pool3d.default": (_MAX_POOL, rules.volume, None),
        "aten.avg_pool2d.default": (_AVG_POOL, rules.image, None),
        "aten.avg_pool3d.default": (_AVG_POOL, rules.volume, None),
        "aten.adaptive_avg_pool2d.default": (_ADAPTIVE, rules.image, None),
        "aten.adaptive_avg_pool3d.default": (_ADAPTIVE, rules.volume, None),
        "aten.upsample_nearest2d.default": (
            "self: tensor, output_size: ints, scales_h: number?, "
            "scales_w: number?",
            rules.image,
            None,
        ),
        "aten.upsample_bilinear2d.default": (
            "self: tensor, output_size: ints, align_corners: bool, "
            "scales_h: number?, scales_w: number?",
            rules.image,
            None,
        ),
        "aten.upsample_bicubic2d.default": (
            "self: tensor, output_size: ints, align_corners: bool, "
            "scales_h: number?, scales_w: number?",
            rules.image,
            None,
        ),
        "aten.im2col.default": (
            "self: tensor, kernel_size: ints, dilation: ints, padding: ints, "
            "stride: ints",
            rules.image,
            None,
        ),
        "aten.col2im.default": (
            "self: tensor, output_size: ints, kernel_size: ints, "
            "dilation: ints, padding: ints, stride: ints",
            rules.columns,
            None,
        ),
        "aten.pixel_shuffle.default": (
            "self: tensor, upscale_factor: int",
            rules.image,
            None,
        ),
        "aten._native_batch_norm_legit_no_training.default": (
            _BATCH_NORM,
            rules.channelwise,
            None,
        ),
        "aten.group_norm.default": (
            "input: tensor, num_groups: int, weight: tensor?, "
            "bias: tensor?, eps: float, cudnn_enabled: bool",
            rules.channelwise,
            None,
        ),
        "aten.layer_norm.default": (
            "input: tensor, normalized_shape: ints, weight: tensor?, "
            "bias: tensor?, eps: float, cudnn_enable: bool",
            rules.layer_norm,
            None,
        ),
        "aten.rms_norm.default": (
            "input: tensor, normalized_shape: ints, weight: tensor?, "
            "eps: number?",
            rules.layer_norm,
            None,
        ),
        # lookups; shapes.py checks their indices
        EMBEDDING: (
            "weight: tensor, indices: tensor",
            rules.embedding,
            None,
        ),
        "aten.index_select.default": (
            "self: tensor, dim: int, index: tensor",
            rules.along,
            None,
        ),
        "aten.gather.default": (
            "self: tensor, dim: int, index: tensor",
            rules.gather,
            None,
        ),
        # products
        "aten.linear.default": (
            "input: tensor, weight: tensor, bias: tensor?",
            rules.linear,
            None,
        ),
        "aten.matmul.default": (_PAIR, rules.matmul, None),
        "aten.bmm.default": ("self: tensor, mat2: tensor", rules.matmul, None),
        "aten.scaled_dot_product_attention.default": (
            _ATTENTION,
            rules.attention,
            None,
        ),
        # views
        "aten.reshape.default": (
            "self: tensor, shape: size",
            rules.reshape,
            None,
        ),
        "aten.expand.default": (
            "self: tensor, size: size",
            rules.expand,
            None,
        ),
        "aten.permute.default": (
            "self: tensor, dims: ints",
            rules.permute,
            None,
        ),
        "aten.transpose.int": (
            "self: tensor, dim0: int, dim1: int",
            rules.transpose,
            None,
        ),
        "aten.unsqueeze.default": (
            "self: tensor, dim: int",
            rules.unsqueeze,
            None,
        ),
        "aten.squeeze.dims": ("self: tensor, dim: ints", rules.squeeze, None),
        "aten.select.int": (
            "self: tensor, dim: int, index: int",
            rules.select,
            None,
        ),
        "aten.slice.Tensor": (
            "self: tensor, dim: int, start: int, end: int, step: int",
            rules.along,
            None,
        ),
        "aten.unfold.default": (
            "self: tensor, dimension: int, size: int, step: int",
            rules.unfold,
            None,
        ),
        "aten.contiguous.default": (_UNARY, rules.elementwise, None),
    }
)

VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "reshape.default",
        "expand.default",
        "permute.default",
        "transpose.int",
        "unsqueeze.default",
        "squeeze.dims",
        "select.int",
        "slice.Tensor",
        "unfold.default",
        "contiguous.default",
        "_to_copy.default",
    )
)
"""Operators whose result may share memory with their input."""

PRODUCTS = frozenset(
    f"aten.{name}"
    for name in (
        "conv1d.default",
        "conv2d.default",
        "conv3d.default",
        "conv_transpose2d.input",
        "linear.default",
        "matmul.default",
        "bmm.default",
        "scaled_dot_product_attention.default",
    )
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

OVERLAPPING = frozenset({"aten.expand.default", "aten.unfold.default"})
"""Views in which several entries may lie at one address."""

SELECTIONS = (VIEWS - {"aten._to_copy.default"}) | {
    "aten.flip.default",
    "aten.roll.default",
    "aten.cat.default",
    "aten.stack.default",
}
"""Operators that move entries but never change them."""

COMMUTATIVE = frozenset({"aten.add.Tensor", "aten.mul.Tensor"})
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
    return MappingProxyType(
        {
            name: Operator(name, _parameters(text), rule, inplace)
            for name, (text, rule, inplace) in _ROWS.items()
        }
    )


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
