"""One micro-batch through a prefix, on a thread of the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hapi_protocol.errors import DoesNotFitError
from hapi_splitter.encodings import EncodedFeatures, encode

Prefix = Callable[[torch.Tensor], torch.Tensor] | nn.Module


@dataclass(frozen=True)
class PassResult:
    """Features of one micro-batch, on the device.

    Attributes:
        features: ``[batch, *shape]`` in the dtype of the cut.
        seconds: seconds of the pass, the copy to the device included.
        cpu_seconds: core-seconds, as of :func:`core_clock`.
        num_halvings: how often the memory did not suffice.
    """

    features: torch.Tensor
    seconds: float
    cpu_seconds: float
    num_halvings: int = 0


def core_clock(device: torch.device) -> float:
    """Core-seconds of this thread and of the threads that torch adds.

    The kernel does not tell what torch's threads did for one pass of
    several.  On a CPU they work, or wait busily, as long as this one works;
    of a GPU none has part.
    """
    num_threads = torch.get_num_threads() if device.type == "cpu" else 1
    return time.thread_time() * num_threads


def padded(
    images: Sequence[torch.Tensor], size: int, device: torch.device
) -> torch.Tensor:
    """``[size, *input_shape]``: the images or arrays, then zeros.

    Of ids 0 is one that each model has.  On the host; pinned where a GPU will
    read it.
    """
    first = images[0]
    batch = torch.empty(
        (size, *first.shape),
        dtype=first.dtype,
        pin_memory=device.type == "cuda",
    )
    for number, image in enumerate(images):
        batch[number] = image
    batch[len(images) :] = 0
    return batch


def run_prefix(
    prefix: Prefix, images: torch.Tensor, *, device: torch.device
) -> PassResult:
    """Runs ``prefix`` on ``[batch, *input_shape]``, images or arrays.

    When the device's memory does not suffice, halves of the batch are tried
    in turn: rows do not depend on one another.

    Raises:
        DoesNotFitError: not even one sample fits now.
    """
    try:
        return _run(prefix, images, device)
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
    first = run_prefix(prefix, images[:half], device=device)
    second = run_prefix(prefix, images[half:], device=device)
    return PassResult(
        torch.cat([first.features, second.features]),
        first.seconds + second.seconds,
        first.cpu_seconds + second.cpu_seconds,
        1 + max(first.num_halvings, second.num_halvings),
    )


def encode_rows(features: torch.Tensor, encoding: str) -> EncodedFeatures:
    """Features ``[rows, *shape]`` in the encoding's wire dtype, on the host,
    and what their decoding needs."""
    with torch.inference_mode():
        return encode(features, encoding)


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if torch could not allocate; on the CPU its message says so."""
    return isinstance(
        error, torch.OutOfMemoryError
    ) or "DefaultCPUAllocator" in str(error)


def is_device_failure(error: Exception) -> bool:
    """True if the device itself failed, and will not work again in
    this process."""
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and "CUDA error" in str(error)
    )


def _run(
    prefix: Prefix, images: torch.Tensor, device: torch.device
) -> PassResult:
    started, started_cpu = time.monotonic(), core_clock(device)
    with torch.inference_mode():
        features = prefix(images.to(device, non_blocking=True))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return PassResult(
        features,
        seconds=time.monotonic() - started,
        cpu_seconds=core_clock(device) - started_cpu,
    )
