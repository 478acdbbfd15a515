"""The numerics class ``exact``: equal features on hosts of the same kind.

torch picks kernels by the shape of their input: the features of a sample have
the same bits in each batch of the same size, and may have others in a batch
of another.  :func:`batch_size` makes the size a fact of the sample.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch

_PROTOCOL = 2
_SUM_FLAGS = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


def enforce_exact() -> None:
    """Sets this process to the class ``exact``; call before using a GPU.

    Full float32 products (no TF32), sums of 16-bit products in float32,
    deterministic kernels, no autotuning.
    """
    # cuBLAS needs a fixed workspace and reads this when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    for flag in _SUM_FLAGS:
        setattr(torch.backends.cuda.matmul, flag, False)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    # Saves a pass over each new tensor: no operator of the table returns
    # uninitialised memory. Any, because torch's annotations lack the flag.
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False


@contextlib.contextmanager
def exact_numerics(device: torch.device) -> Iterator[None]:
    """Runs a block in the class ``exact`` inside a user's process.

    Autocast, reduced-precision products and cuDNN's autotuning are off inside
    the block; the user's settings are restored afterwards.  Blocks of several
    threads may overlap.

    Args:
        device: used by the block.
    """
    with torch.autocast(device.type, enabled=False), _EXACT:
        yield


class _ExactFlags:
    """Sets torch's process-wide flags while any thread is in a block.

    The first block sets them and the last one restores them, because blocks
    of several threads may end in any order.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._reset()  # a forked child has none of the parent's threads
        with self._lock:
            self._num_blocks += 1
            if self._num_blocks == 1:
                self._before = [_set(*flag) for flag in exact_flags()]

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_blocks -= 1
            if not self._num_blocks:
                for flag in self._before:
                    _set(*flag)


_EXACT = _ExactFlags()


def exact_flags() -> list[tuple[Any, str, Any]]:
    """Returns torch's flags: owner, name, value in the class ``exact``."""
    # Any, because torch's annotations lack these flags.
    backends: Any = torch.backends
    return [
        (backends.cuda.matmul, "fp32_precision", "ieee"),
        (backends.cudnn.conv, "fp32_precision", "ieee"),
        (backends.mkldnn.matmul, "fp32_precision", "ieee"),
        (backends.mkldnn.conv, "fp32_precision", "ieee"),
        *((backends.cuda.matmul, flag, False) for flag in _SUM_FLAGS),
        (backends.cudnn, "benchmark", False),
        (backends.cudnn, "deterministic", True),
    ]


def _set(owner: Any, name: str, value: Any) -> tuple[Any, str, Any]:
    """Sets a flag and returns the arguments that restore it."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return owner, name, before


def numerics_tag(device: str) -> str:
    """Returns a tag of everything but model and data that affects features.

    It has class, protocol, minor versions of torch and torchvision and device
    kind, and is part of every feature ETag.

    Args:
        device: such as ``cpu`` or ``cuda:1``.
    """
    kind = torch.device(device).type
    # Its version, without an import that takes seconds and 180 MB.
    torchvision = version("torchvision")
    return (
        f"exact;protocol={_PROTOCOL};torch={_minor(torch.__version__)};"
        f"torchvision={_minor(torchvision)};device={kind}"
    )


def _minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def batch_size(largest: int, num_samples: int | None) -> int:
    """Size of the batches in which some samples are computed.

    Client and worker fill batches that have fewer samples with zeros.

    Args:
        largest: that suits device and model.
        num_samples: samples of the whole span or object; None if unknown.

    Returns:
        ``largest``, or the next power of two where fewer samples come.
    """
    if num_samples is None or num_samples >= largest:
        return largest
    return min(largest, 1 << max(num_samples - 1, 0).bit_length())
