"""Peak memory of one forward pass, in a process that does nothing else.

    python -m benchmarks.memory_probe < SETTINGS

Standard input: JSON with ``package``, a file; ``cut``; ``batch``.  Standard
output: JSON with ``measured_bytes``, by how much the peak of the resident set
(VmHWM of proc(5)) during the forward pass is above the set before, the input
included.

A pass of one sample goes before, since code that torch loads at its first use
is no activation; what it freed goes back to the system.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.package.reader import load_package
from hapi_splitter.package.subprocess_validation import validate_package

PEAK_RESET = "5"
"""To clear_refs: the peak is the present size from now on."""


def probe(package: str, cut: int, batch: int) -> dict[str, int]:
    """See the module's text."""
    torch.set_num_threads(1)
    frozen = loaded(Path(package))
    prefix = frozen.prefix(cut)
    with torch.inference_mode():
        prefix(samples(frozen, 1))
        before = settled_bytes()
        prefix(samples(frozen, batch))
    return {"measured_bytes": status_bytes("VmHWM") - before}


def loaded(package: Path) -> FrozenGraph:
    """The region as a worker has it on a CPU."""
    return load_package(bytearray(package.read_bytes())).to("cpu", fast=True)


def validated(package: Path) -> FrozenGraph:
    """The region with its memory measured, as when a worker loads it."""
    frozen = loaded(package)
    frozen.measured_memory = validate_package(package).memory
    return frozen


def samples(frozen: FrozenGraph, batch: int) -> Any:
    """``[batch, *input_shape]`` float32."""
    return torch.ones(batch, *frozen.input_shape)


def settled_bytes() -> int:
    """The resident set, without what is free; the peak begins with it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(PEAK_RESET)
    return status_bytes("VmRSS")


def status_bytes(key: str, process: str = "self") -> int:
    """A size in a process's status, of proc(5).

    Raises:
        ValueError: it has no such entry.
    """
    text = Path(f"/proc/{process}/status").read_text()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise ValueError(f"/proc/{process}/status has no {key}")


def main() -> None:
    json.dump(probe(**json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
