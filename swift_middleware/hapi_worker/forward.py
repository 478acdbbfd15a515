"""One micro-batch through a prefix, on the device's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hapi_protocol.errors import DoesNotFitError
from hapi_splitter.encodings import encode

Prefix = Callable[[torch.Tensor], torch.Tensor] | nn.Module


@dataclass(frozen=True)
class Computed:
    """Features of one micro-batch.

    Attributes:
        features: ``[batch, *shape]`` in the encoding's wire dtype.
        saturated: values that the encoding clipped.
    """

    features: npt.NDArray[Any]
    saturated: int
    forward_seconds: float
    encode_seconds: float


def run_prefix(
    prefix: Prefix,
    images: torch.Tensor,
    *,
    device: torch.device,
    encoding: str,
) -> Computed:
    """Runs ``prefix`` on ``[batch, *input_shape]`` float32 images.

    When the device's memory does not suffice, halves of the batch are tried
    in turn: rows do not depend on one another.

    Raises:
        DoesNotFitError: not even one sample fits now.
    """
    try:
        return _run(prefix, images, device, encoding)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if len(images) == 1:
            raise DoesNotFitError(
                "does_not_fit",
                f"the device has no memory left for one sample: {error}",
            ) from error
    if device.type == "cuda":
        torch.cuda.empty_cache()
    half = len(images) // 2
    return _join(
        run_prefix(prefix, part, device=device, encoding=encoding)
        for part in (images[:half], images[half:])
    )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not allocate; on the CPU only its words tell."""
    return isinstance(
        error, torch.OutOfMemoryError
    ) or "DefaultCPUAllocator" in str(error)


def _run(
    prefix: Prefix, images: torch.Tensor, device: torch.device, encoding: str
) -> Computed:
    started = time.monotonic()
    with torch.inference_mode():
        features = prefix(images.to(device, non_blocking=True))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        computed = time.monotonic()
        array, saturated = encode(features, encoding)
    return Computed(
        array, saturated, computed - started, time.monotonic() - computed
    )


def _join(parts: Any) -> Computed:
    first, second = parts
    return Computed(
        np.concatenate([first.features, second.features]),
        first.saturated + second.saturated,
        first.forward_seconds + second.forward_seconds,
        first.encode_seconds + second.encode_seconds,
    )
