"""How features travel: which numbers a value becomes, and back.

With ``x`` a finite float32 value and ``x'`` what :func:`decode` gives back:

=========  ==============================================================
dtype      ``|x' - x|`` is at most
=========  ==============================================================
float32    0
float16    ``2**-11 * |x|`` where ``2**-14 <= |x| <= 65504``,
           ``2**-25`` below
bfloat16   ``2**-8 * |x|`` where ``2**-126 <= |x| <= (2 - 2**-7) * 2**127``,
           ``2**-134`` below
uint8      ``(max - min) / 510 + 2**-21 * max(|min|, |max|) + 2**-142``
           with the extremes of the value's group
=========  ==============================================================

Larger values become the largest finite ones of the 16-bit formats, with
their sign, and are counted as saturated; so are infinite ones.

The groups of uint8 are those of :func:`hapi_protocol.encodings.num_groups`.
A group has ``zero = min`` and ``scale = (max - min) / 255``, both float32,
and a value ``q = round((x - zero) / scale)``, so that ``x' = zero + scale *
q``. The bound's second term is their rounding: with ``u = 2**-24``, ``R = max
- min`` and ``M = max(|min|, |max|) >= R / 2``, the subtraction and the
division of ``q`` cost ``2 u R``, the product and the sum of ``x'`` at most ``u
R + u M``, half a step is ``R / 510`` with a relative error of ``u``, and all
of it together less than ``8 u M``. The third is that of a subnormal scale,
255 times half of the smallest float32. In a group, infinite values become
the largest or smallest finite one, and are counted as saturated; if it has no
finite value, they become the largest of float32, with their sign.

NaN stays NaN. A group of uint8 with a NaN in it is NaN throughout.

What a sample becomes does not depend on the others in its batch.
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
"""Float32 bytes that are converted at a time, or one sample's if it has
more: the temporary tensors stay of this order, whatever the batch."""

_MANY_SAMPLES = 256
"""Of a chunk: no micro-batch is expected to have more."""
_GROUP_BYTES = 80
"""What is kept of a group, and computed for it in float64."""
_FEW_BYTES = 4096
"""Counters."""

_LARGEST = torch.finfo(torch.float32).max
_LEVELS = 255
_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class EncodedFeatures:
    """Features as they travel.

    Attributes:
        array: ``[B, ...]`` in the encoding's wire dtype, C-contiguous.
        scale: ``[B, groups]`` float32 for uint8, else None.
        zero: as ``scale``.
        saturated: values that were clipped.
    """

    array: np.ndarray[Any, Any]
    scale: np.ndarray[Any, np.dtype[np.float32]] | None = None
    zero: np.ndarray[Any, np.dtype[np.float32]] | None = None
    saturated: int = 0


def encode(features: torch.Tensor, encoding: str) -> EncodedFeatures:
    """Features as they travel; converted where they are, then copied once.

    Args:
        features: float32 ``[B, ...]`` on any device; left as they are. The
            result may share their memory.
        encoding: see :mod:`hapi_protocol.encodings`; its compression is
            the stream's business.

    Raises:
        AnnotationError: ``unknown_encoding``.
    """
    dtype = Encoding.parse(encoding).dtype
    features = features.detach()
    if dtype == "uint8":
        return _encode_groups(features)
    if dtype == "float32":
        return EncodedFeatures(features.contiguous().cpu().numpy())
    half, saturated = _to_half(features, _HALVES[dtype])
    if dtype == "bfloat16":
        # NumPy has no bfloat16: its bits go as they are.
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
    """What :func:`encode` sent, as float32 of the same shape.

    Without ``out`` the result shares memory with a float32 ``array``, which
    must therefore be writable and the caller's own.

    Args:
        array: ``[B, ...]`` in the encoding's wire dtype.
        encoding: as for :func:`encode`.
        scale: ``[B, groups]`` float32 for uint8.
        zero: as ``scale``.
        out: a contiguous float32 tensor on the CPU of the array's shape
            that takes the result.

    Raises:
        AnnotationError: ``unknown_encoding``.
        ValueError: when the arrays are not what the encoding sends.
    """
    parsed = Encoding.parse(encoding)
    if array.dtype != parsed.wire_dtype:
        raise ValueError(
            f"features of dtype {array.dtype}; {parsed.dtype} travels as "
            f"{parsed.wire_dtype}"
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
            f"features of shape {tuple(values.shape)}; {tuple(out.shape)} "
            "are wanted"
        )
    if parsed.is_quantised:
        return _decode_groups(values, scale, zero, out)
    return out.copy_(values)


def encoder_step(shape: Sequence[int], encoding: str) -> tuple[int, int]:
    """Memory of the device that :func:`encode` takes beside the features.

    Args:
        shape: of one sample's features.
        encoding: as for :func:`encode`.

    Returns:
        Bytes that do not depend on the batch, and bytes per sample; an
        upper bound for each batch.
    """
    parsed = Encoding.parse(encoding)
    num_values = math.prod(shape)
    if parsed.dtype == "float32":
        # A copy, when the features do not lie in one piece.
        return 0, 4 * num_values
    result = parsed.value_bytes * num_values
    if not parsed.is_quantised:
        # A mask of what is clipped, and a copy of it where it is counted.
        return _FEW_BYTES, result + 2 * num_values
    result += _GROUP_BYTES * num_groups(shape)
    # Float32 values, three masks, and one where they are counted.
    temporary = 8 * num_values
    chunk = _chunk_samples(4 * num_values)
    if chunk < _MANY_SAMPLES:
        return _FEW_BYTES + chunk * temporary, result
    return _FEW_BYTES, result + temporary


def _to_half(
    features: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, int]:
    largest = torch.finfo(dtype).max
    half = features.to(dtype, memory_format=torch.contiguous_format)
    # What rounds to infinity is beyond the largest value, too.
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
    for part in _parts(features):
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
    """Turns float32 ``[B, groups, values]`` into 0 to 255, in place.

    Returns:
        Scale and zero, ``[B, groups]``, and how many values were clipped.
    """
    low, high = work.amin(2), work.amax(2)
    clipped: torch.Tensor | int = 0
    plain = bool((high - low).isfinite().all())
    if not plain:
        clipped = _clip_infinite(work)
        low, high = work.amin(2), work.amax(2)
    # In float64, where the range cannot overflow.
    scale = ((high.double() - low.double()) / _LEVELS).float()
    # Adding 0 makes one of the two zeros of float32 that a minimum may be.
    zero = low + 0.0
    step = torch.where(scale > 0, scale, 1.0)
    if plain:
        work.sub_(zero[..., None]).div_(step[..., None])
    else:
        # Where max - min overflows, all is halved first.
        factor = torch.where((high - low).isinf(), 0.5, 1.0)
        work.mul_(factor[..., None]).sub_((zero * factor)[..., None])
        work.div_((step * factor)[..., None]).nan_to_num_(0.0)
    work.round_().clamp_(max=_LEVELS)
    return scale, zero, clipped


def _clip_infinite(work: torch.Tensor) -> torch.Tensor:
    """Makes infinite values the finite extremes of their group, in place.

    Returns:
        How many there were.
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
    wanted = (len(values), num_groups(values.shape[1:]))
    for name, given in (("scale", scale), ("zero", zero)):
        if given is None or given.shape != wanted:
            found = None if given is None else given.shape
            raise ValueError(f"{name} of shape {found}; {wanted} is needed")
    scales, zeros = torch.from_numpy(scale), torch.from_numpy(zero)
    for part in _parts(out):
        work = out[part].copy_(values[part])
        _expand(work.view(len(work), wanted[1], -1), scales[part], zeros[part])
    return out


def _expand(
    work: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> None:
    """The reverse of :func:`_quantise`, in place."""
    far = (zero + scale * (_LEVELS + 1)).isinf()
    if not bool(far.any()):
        work.mul_(scale[..., None]).add_(zero[..., None])
        return
    # Where the sum might overflow, half of it is doubled, and kept finite.
    factor = torch.where(far, 0.5, 1.0)
    work.mul_((scale * factor)[..., None]).add_((zero * factor)[..., None])
    work.div_(factor[..., None]).clamp_(-_LARGEST, _LARGEST)


def _parts(features: torch.Tensor) -> Iterator[slice]:
    """Runs of samples that are converted together; none of no values."""
    if not features.numel():
        return
    step = _chunk_samples(features[0].numel() * 4)
    for start in range(0, len(features), step):
        yield slice(start, start + step)


def _chunk_samples(sample_bytes: int) -> int:
    return max(CHUNK_BYTES // max(sample_bytes, 1), 1)
