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
from hapi_splitter.encodings import EncodedFeatures, encode

Prefix = Callable[[torch.Tensor], torch.Tensor] | nn.Module


@dataclass(frozen=True)
class Computed:
    """Features of one micro-batch.

    Attributes:
        encoded: ``[batch, *shape]`` in the encoding's wire dtype, and what
            its decoding needs.
        forward_cpu: core-seconds: this thread's CPU seconds, on a CPU
            device times the threads of a forward.
        encode_cpu: CPU seconds of this thread.
    """

    encoded: EncodedFeatures
    forward_seconds: float
    encode_seconds: float
    forward_cpu: float = 0.0
    encode_cpu: float = 0.0

    @property
    def features(self) -> npt.NDArray[Any]:
        """``[batch, *shape]`` in the encoding's wire dtype."""
        return self.encoded.array

    @property
    def saturated(self) -> int:
        """Values that the encoding clipped."""
        return self.encoded.saturated


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
    started, started_cpu = time.monotonic(), time.thread_time()
    with torch.inference_mode():
        features = prefix(images.to(device, non_blocking=True))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        computed, computed_cpu = time.monotonic(), time.thread_time()
        encoded = encode(features, encoding)
    num_threads = torch.get_num_threads() if device.type == "cpu" else 1
    return Computed(
        encoded,
        forward_seconds=computed - started,
        encode_seconds=time.monotonic() - computed,
        forward_cpu=(computed_cpu - started_cpu) * num_threads,
        encode_cpu=time.thread_time() - computed_cpu,
    )


def _join(parts: Any) -> Computed:
    first, second = parts
    return Computed(
        _join_encoded(first.encoded, second.encoded),
        first.forward_seconds + second.forward_seconds,
        first.encode_seconds + second.encode_seconds,
        first.forward_cpu + second.forward_cpu,
        first.encode_cpu + second.encode_cpu,
    )


def _join_encoded(
    first: EncodedFeatures, second: EncodedFeatures
) -> EncodedFeatures:
    return EncodedFeatures(
        np.concatenate([first.array, second.array]),
        _join_scales(first.scale, second.scale),
        _join_scales(first.zero, second.zero),
        first.saturated + second.saturated,
    )


def _join_scales(
    first: npt.NDArray[np.float32] | None,
    second: npt.NDArray[np.float32] | None,
) -> npt.NDArray[np.float32] | None:
    if first is None or second is None:
        return None
    return np.concatenate([first, second])
