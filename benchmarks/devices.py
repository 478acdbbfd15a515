"""Where the client tier computes: told to all of its processes alike."""

from __future__ import annotations

import os

VARIABLE = "HAPI_BENCHMARKS_DEVICE"
CPU = "cpu"


def client_device() -> str:
    """Of this process: the environment's, or else the CPU."""
    return os.environ.get(VARIABLE, CPU)
