"""The numerics class ``exact``: same features on every host of a kind."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torchvision

_PROTOCOL = 2


def enforce_exact() -> None:
    """Sets this process to the class ``exact``; call before using a GPU.

    Full float32 products (no TF32), deterministic kernels, no autotuning.
    """
    # cuBLAS is deterministic only with a fixed workspace, read at its start.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    # Else each new tensor is filled before it is written; no operator of
    # a package reads or returns memory that was not (ops.py).
    # Any: torch's annotations lack it.
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False


@contextlib.contextmanager
def exact_numerics(device: torch.device) -> Iterator[None]:
    """A block of class ``exact`` in a process that belongs to the user.

    Autocast, reduced products and cuDNN's autotuning are off inside;
    afterwards everything is as the user had set it.  Blocks of several
    threads may overlap.

    Args:
        device: on which the block computes.
    """
    with torch.autocast(device.type, enabled=False), _EXACT:
        yield


class _ExactFlags:
    """torch's flags, which are those of all threads.

    The first block sets them, and the last one puts back what there was:
    blocks of several threads end in any order.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._forget()  # the other threads stayed with the parent
        with self._lock:
            self._num_blocks += 1
            if self._num_blocks == 1:
                self._before = [_set(*flag) for flag in _exact_flags()]

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_blocks -= 1
            if not self._num_blocks:
                for flag in self._before:
                    _set(*flag)


_EXACT = _ExactFlags()


def _exact_flags() -> list[tuple[Any, str, Any]]:
    # Any: torch's annotations lack these, which it has since 2.9.
    backends: Any = torch.backends
    return [
        (backends.cuda.matmul, "fp32_precision", "ieee"),
        (backends.cudnn.conv, "fp32_precision", "ieee"),
        (backends.mkldnn.matmul, "fp32_precision", "ieee"),
        (backends.mkldnn.conv, "fp32_precision", "ieee"),
        (backends.cudnn, "benchmark", False),
        (backends.cudnn, "deterministic", True),
    ]


def _set(owner: Any, name: str, value: Any) -> tuple[Any, str, Any]:
    """What there was before."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return owner, name, before


def numerics_tag(device: str) -> str:
    """Names all that features depend on beside model and data.

    Part of every feature ETag: class, protocol, minor versions of torch
    and torchvision, device kind.

    Args:
        device: such as ``cpu`` or ``cuda:1``.
    """
    kind = torch.device(device).type
    return (
        f"exact;protocol={_PROTOCOL};torch={_minor(torch.__version__)};"
        f"torchvision={_minor(torchvision.__version__)};device={kind}"
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
