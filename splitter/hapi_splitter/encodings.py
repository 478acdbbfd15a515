"""How features travel: which numbers a value becomes, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hapi_protocol.errors import AnnotationError

ENCODINGS = ("float32", "float16")


def encode(
    features: torch.Tensor, encoding: str
) -> tuple[np.ndarray[Any, Any], int]:
    """Features as an array to send, and how many values were saturated.

    Args:
        features: float32 ``[B, ...]`` on any device.
        encoding: ``float32`` (exact) or ``float16``: rounded to nearest,
            relative error at most 2**-11 in the normal range; finite and
            infinite values beyond 65504 become that and are counted; NaN
            stays NaN.

    Returns:
        A contiguous array of the encoding's dtype, same shape, on the CPU.

    Raises:
        AnnotationError: ``unknown_encoding``.
    """
    _check(encoding)
    saturated = 0
    if encoding == "float16":
        largest = torch.finfo(torch.float16).max
        saturated = int((features.abs() > largest).sum())
        if saturated:
            features = features.clamp(-largest, largest)
        features = features.to(torch.float16)
    return features.detach().contiguous().cpu().numpy(), saturated


def decode(array: np.ndarray[Any, Any], encoding: str) -> torch.Tensor:
    """What :func:`encode` sent, as float32 of the same shape.

    The result shares memory with a float32 ``array``, which must therefore
    be writable and the caller's own.

    Raises:
        AnnotationError: ``unknown_encoding``.
    """
    _check(encoding)
    return torch.from_numpy(array).to(torch.float32)


def _check(encoding: str) -> None:
    if encoding not in ENCODINGS:
        raise AnnotationError(
            "unknown_encoding",
            f"encoding {encoding!r:.80} is not one of {', '.join(ENCODINGS)}",
        )
