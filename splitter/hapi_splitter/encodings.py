"""Encodes features for transport and decodes them.

With a finite float32 value ``x`` and its decoded value ``x'``:

=========  ==============================================================
dtype      ``|x' - x|`` is at most
=========  ==============================================================
float32    0
float16    ``2**-11 * |x|`` if ``2**-14 <= |x| <= 65504``,
           ``2**-25`` below
bfloat16   ``2**-8 * |x|`` if ``2**-126 <= |x| <= (2 - 2**-7) * 2**127``,
           ``2**-134`` below
uint8      ``(max - min) / 510 + 2**-21 * max(|min|, |max|) + 2**-142``
           with the extremes of the value's group
=========  ==============================================================

In the 16-bit formats larger and infinite values become the largest finite
ones, with their sign, and are counted as saturated.

The groups of uint8 are those of :func:`hapi_protocol.encodings.num_groups`.
A group has ``zero = min`` and ``scale = (max - min) / 255``, both float32,
and a value ``q = round((x - zero) / scale)``, so that ``x' = zero + scale *
q``. The bound's second term is their rounding: with ``u = 2**-24``, ``R = max
- min`` and ``M = max(|min|, |max|) >= R / 2``, the subtraction and the
division of ``q`` cost ``2 u R``, the product and the sum of ``x'`` at most ``u
R + u M``, half a step is ``R / 510`` with a relative error of ``u``, and the
total is less than ``8 u M``. The third term is the rounding of a subnormal
scale, 255 times half of the smallest float32. Infinite values become the
largest or smallest finite value of their group and are counted as saturated;
in a group without a finite value they become the largest float32, with their
sign.

NaN stays NaN; a uint8 group that contains a NaN becomes NaN throughout. The
encoding of a sample does not depend on the others in its batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hapi_protocol.encodings import Encoding, num_groups

CHUNK_BYTES = 8 * 1024 * 1024
"""Float32 bytes that are converted at a time, at least one sample. Bounds
temporary memory for any batch size."""

_MAX_MICRO_BATCH = 256
"""Largest micro-batch that is expected."""
_GROUP_BYTES = 80
"""Memory per group: scale, zero, and their computation in float64."""
_COUNTER_BYTES = 4096

_LARGEST = torch.finfo(torch.float32).max
_LEVELS = 255
_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class EncodedFeatures:
    """A batch of encoded features.

    Attributes:
        array: ``[B, ...]`` in the encoding's wire dtype, C-contiguous.
        scale: ``[B, groups]`` float32 for uint8, else None.
        zero: ``[B, groups]`` float32 for uint8, else None.
        saturated: number of clipped values.
    """

    array: np.ndarray[Any, Any]
    scale: np.ndarray[Any, np.dtype[np.float32]] | None = None
    zero: np.ndarray[Any, np.dtype[np.float32]] | None = None
    saturated: int = 0


def encode(features: torch.Tensor, encoding: str) -> EncodedFeatures:
    """Encodes features on their device, then copies them to the host once.

    Args:
        features: float32, bfloat16 or float16 ``[B, ...]`` on any device;
            not modified. The result may share their memory. An encoding in
            their own dtype is exact, but for infinite values.
        encoding: see :mod:`hapi_protocol.encodings`. Its compression is
            ignored here; the stream applies it.

    Raises:
        AnnotationError: ``unknown_encoding``.
    """
    dtype = Encoding.parse(encoding).dtype
    features = features.detach()
    if dtype == "uint8":
        return _encode_groups(features)
    if dtype == "float32":
        return EncodedFeatures(features.float().contiguous().cpu().numpy())
    half, saturated = _to_half(features, _HALVES[dtype])
    if dtype == "bfloat16":
        # NumPy has no bfloat16, so its bits are sent as uint16.
        bits = half.view(torch.int16).cpu().numpy().view(np.uint16)
        return EncodedFeatures(bits, saturated=saturated)
    return EncodedFeatures(half.cpu().numpy(), saturated=saturated)


def decode(
    array: np.ndarray[Any, Any],
    encoding: str,
    scale: np.ndarray[Any, Any] | None = None,
    zero: np.ndarray[Any, Any] | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decodes features to float32 of the same shape.

    Without ``out`` the result shares memory with a float32 ``array``, which
    must therefore be writable and owned by the caller.

    Args:
        array: ``[B, ...]`` in the encoding's wire dtype.
        encoding: the encoding of the array.
        scale: ``[B, groups]`` float32 for uint8.
        zero: ``[B, groups]`` float32 for uint8.
        out: a contiguous float32 tensor of the array's shape on the CPU, to
            receive the result.

    Raises:
        AnnotationError: ``unknown_encoding``.
        ValueError: if the arrays do not match the encoding.
    """
    parsed = Encoding.parse(encoding)
    if array.dtype != parsed.wire_dtype:
        raise ValueError(
            f"features of dtype {array.dtype}, expected {parsed.wire_dtype} "
            f"for the encoding {parsed.dtype}"
        )
    if parsed.dtype == "bfloat16":
        array = array.view(np.int16)
    values = torch.from_numpy(array)
    if parsed.dtype == "bfloat16":
        values = values.view(torch.bfloat16)
    if parsed.dtype == "float32" and out is None:
        return values
    if out is None:
        out = torch.empty(values.shape, dtype=torch.float32)
    if out.shape != values.shape:
        raise ValueError(
            f"features of shape {tuple(values.shape)}, expected "
            f"{tuple(out.shape)}"
        )
    if parsed.is_quantised:
        return _decode_groups(values, scale, zero, out)
    return out.copy_(values)


def encoder_step(
    shape: Sequence[int], encoding: str, dtype: str = "float32"
) -> tuple[int, int]:
    """Bounds the temporary device memory of :func:`encode`.

    Args:
        shape: shape of one sample's features.
        encoding: the encoding.
        dtype: dtype of the features.

    Returns:
        Bytes that do not depend on the batch, and bytes per sample.
    """
    parsed = Encoding.parse(encoding)
    num_values = math.prod(shape)
    if parsed.dtype == "float32":
        # A copy, if the features are not contiguous or have 16 bits.
        return 0, 4 * num_values
    result = parsed.value_bytes * num_values
    if not parsed.is_quantised:
        # A mask of clipped values, and its copy for counting; float32 values
        # between two formats of 16 bits.
        between = 4 * num_values * (dtype not in ("float32", parsed.dtype))
        return _COUNTER_BYTES, result + 2 * num_values + between
    result += _GROUP_BYTES * num_groups(shape)
    # Float32 values, three masks, and one more for counting.
    temporary = 8 * num_values
    chunk = _chunk_samples(4 * num_values)
    if chunk < _MAX_MICRO_BATCH:
        return _COUNTER_BYTES + chunk * temporary, result
    return _COUNTER_BYTES, result + temporary


def _to_half(
    features: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, int]:
    largest = torch.finfo(dtype).max
    if features.dtype != dtype:
        # The other 16-bit format may not have the largest value.
        features = features.float()
    half = features.to(dtype, memory_format=torch.contiguous_format, copy=True)
    # Values that round to infinity exceed the largest value as well.
    half.clamp_(-largest, largest)
    saturated = torch.count_nonzero(features > largest)
    saturated += torch.count_nonzero(features < -largest)
    return half, int(saturated)


def _encode_groups(features: torch.Tensor) -> EncodedFeatures:
    groups = num_groups(features.shape[1:])
    array = torch.empty(
        features.shape, dtype=torch.uint8, device=features.device
    )
    scales = torch.zeros(
        (2, len(features), groups), dtype=torch.float32, device=array.device
    )
    saturated = torch.zeros((), dtype=torch.int64, device=array.device)
    for part in _chunks(features):
        work = features[part].to(
            torch.float32, memory_format=torch.contiguous_format, copy=True
        )
        work = work.view(len(work), groups, -1)
        scales[0, part], scales[1, part], clipped = _quantise(work)
        saturated += clipped
        array[part] = work.view(array[part].shape)
    scale, zero = scales.cpu().numpy()
    return EncodedFeatures(array.cpu().numpy(), scale, zero, int(saturated))


def _quantise(
    work: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | int]:
    """Quantises float32 ``[B, groups, values]`` to 0 to 255, in place.

    Returns:
        Scale and zero, ``[B, groups]``, and the number of clipped values.
    """
    low, high = work.amin(2), work.amax(2)
    clipped: torch.Tensor | int = 0
    is_finite = bool((high - low).isfinite().all())
    if not is_finite:
        clipped = _clip_infinite(work)
        low, high = work.amin(2), work.amax(2)
    # The range cannot overflow in float64.
    scale = ((high.double() - low.double()) / _LEVELS).float()
    zero = low + 0.0  # turns -0.0 into 0.0
    step = torch.where(scale > 0, scale, 1.0)
    if is_finite:
        work.sub_(zero[..., None]).div_(step[..., None])
    else:
        # If max - min overflows, values are halved first.
        factor = torch.where((high - low).isinf(), 0.5, 1.0)
        work.mul_(factor[..., None]).sub_((zero * factor)[..., None])
        work.div_((step * factor)[..., None]).nan_to_num_(0.0)
    work.round_().clamp_(max=_LEVELS)
    return scale, zero, clipped


def _clip_infinite(work: torch.Tensor) -> torch.Tensor:
    """Replaces infinite values by the finite extremes of their group.

    Returns:
        The number of infinite values.
    """
    above = work == math.inf
    below = work == -math.inf
    count = torch.count_nonzero(above) + torch.count_nonzero(below)
    high = work.masked_fill_(above, -math.inf).amax(2, keepdim=True)
    low = work.masked_fill_(above | below, math.inf).amin(2, keepdim=True)
    high.masked_fill_(high == -math.inf, _LARGEST)
    low.masked_fill_(low == math.inf, -_LARGEST)
    torch.where(above, high, work, out=work)
    torch.where(below, low, work, out=work)
    return count


def _decode_groups(
    values: torch.Tensor,
    scale: np.ndarray[Any, Any] | None,
    zero: np.ndarray[Any, Any] | None,
    out: torch.Tensor,
) -> torch.Tensor:
    expected = (len(values), num_groups(values.shape[1:]))
    for name, given in (("scale", scale), ("zero", zero)):
        shape = None if given is None else given.shape
        if shape != expected:
            raise ValueError(f"{name} of shape {shape}, expected {expected}")
    scales, zeros = torch.from_numpy(scale), torch.from_numpy(zero)
    for part in _chunks(out):
        work = out[part].copy_(values[part])
        groups = work.view(len(work), expected[1], -1)
        _dequantise(groups, scales[part], zeros[part])
    return out


def _dequantise(
    work: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> None:
    """Reverses :func:`_quantise` in place."""
    may_overflow = (zero + scale * (_LEVELS + 1)).isinf()
    if not bool(may_overflow.any()):
        work.mul_(scale[..., None]).add_(zero[..., None])
        return
    # Computes half of the sum, doubles it and clamps it to finite values.
    factor = torch.where(may_overflow, 0.5, 1.0)
    work.mul_((scale * factor)[..., None]).add_((zero * factor)[..., None])
    work.div_(factor[..., None]).clamp_(-_LARGEST, _LARGEST)


def _chunks(features: torch.Tensor) -> Iterator[slice]:
    """Yields runs of samples that are converted together."""
    if not features.numel():
        return
    step = _chunk_samples(features[0].numel() * 4)
    for start in range(0, len(features), step):
        yield slice(start, start + step)


def _chunk_samples(sample_bytes: int) -> int:
    return max(CHUNK_BYTES // max(sample_bytes, 1), 1)
