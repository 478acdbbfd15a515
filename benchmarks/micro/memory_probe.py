"""Peak memory of forward passes, in a process of their own.

    python -m benchmarks.micro.memory_probe < SETTINGS

Standard input: JSON with ``package`` (a file), ``cut`` and ``batch``.
Standard output: JSON with ``measured_bytes``, the growth of the resident set's
peak (VmHWM) during four passes, with the input and the holes of the heap,
which is that of a worker.

A pass of one sample runs first, because code that torch loads at its first use
is no activation; its freed memory is returned to the system.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.testbed.process_resources import status_bytes
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.package.reader import load_package
from hapi_splitter.package.subprocess_validation import validate_package
from hapi_worker.monitoring.malloc_tuning import (
    keep_heap,
    restart_without_thread_caches,
)

PEAK_RESET = "5"
"""Value for clear_refs that resets the peak to the present size."""
PASSES = 4
"""The heap grows for some passes: blocks of a batch come to lie elsewhere."""


def probe(package: str, cut: int, batch: int) -> dict[str, int]:
    """Measures one pass; see above for arguments and result."""
    torch.set_num_threads(1)
    frozen = load_frozen(Path(package))
    prefix = frozen.prefix(cut)
    with torch.inference_mode():
        prefix(inputs(frozen, 1))
        before = settled_bytes()
        for _ in range(PASSES):
            prefix(inputs(frozen, batch))
    return {"measured_bytes": status_bytes("VmHWM") - before}


def load_frozen(package: Path) -> FrozenGraph:
    """The frozen region as a worker loads it on a CPU."""
    return load_package(bytearray(package.read_bytes())).to("cpu", fast=True)


def load_validated(package: Path) -> FrozenGraph:
    """The region with its memory measured, as when a worker loads it."""
    frozen = load_frozen(package)
    frozen.measured_memory = validate_package(package).memory
    return frozen


def inputs(frozen: FrozenGraph, batch: int) -> Any:
    """Float32 ones, ``[batch, *input_shape]``."""
    return torch.ones(batch, *frozen.input_shape)


def settled_bytes() -> int:
    """The resident set without free memory; resets the peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(PEAK_RESET)
    return status_bytes("VmRSS")


def main() -> None:
    restart_without_thread_caches()
    assert keep_heap()
    json.dump(probe(**json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
