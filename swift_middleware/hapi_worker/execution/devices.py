"""Devices of a worker: choice, memory limits, number of passes."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hapi_splitter.host_limits import allowed_memory_bytes
from hapi_splitter.profiling.profiler import LARGEST_BATCH
from hapi_worker.config import WorkerConfig


@dataclass(frozen=True)
class DevicePlan:
    """One device of a worker.

    Attributes:
        name: ``cpu`` or ``cuda:1``; ``cpu#0``, ``cpu#1`` if several executors
            share a device.
        forwards: passes that run at a time.
        limit_bytes: limit of its memory.
        largest_batch: samples of a micro-batch if the memory suffices.
    """

    name: str
    device: torch.device
    forwards: int
    limit_bytes: int
    largest_batch: int


def plan_devices(config: WorkerConfig, cores: float) -> list[DevicePlan]:
    """Plans the devices of this host by the operator's options.

    Raises:
        ValueError: this host has no such device.
    """
    devices = choose_devices(config.device)
    sharing = Counter(devices)
    on_cpu = sum(device.type == "cpu" for device in devices)
    return [
        DevicePlan(
            name,
            device,
            num_forwards(device, config.forwards, cores, max(on_cpu, 1)),
            config.memory_limit
            or device_memory_bytes(device, sharing[device]),
            config.max_batch or LARGEST_BATCH[device.type],
        )
        for name, device in zip(_names(devices), devices, strict=True)
    ]


def choose_devices(wanted: str) -> list[torch.device]:
    """Returns the torch devices of an operator's ``device`` option.

    Args:
        wanted: ``auto`` (all GPUs, else the CPU), or names such as ``cpu``
            or ``cuda:1``, separated by commas.

    Raises:
        ValueError: this host has no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        wanted = ",".join(f"cuda:{n}" for n in range(count)) or "cpu"
    chosen = [_choose_device(name, count) for name in wanted.split(",")]
    if len({device.type for device in chosen}) > 1:
        raise ValueError(
            f"option 'device' is {wanted!r}; all devices must be of one "
            "kind, because features differ between kinds"
        )
    return chosen


def _choose_device(name: str, num_gpus: int) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if (device.index or 0) >= num_gpus:
            raise ValueError(
                f"option 'device' names {name!r}; torch sees {num_gpus} "
                "CUDA devices here"
            )
    return device


def device_memory_bytes(device: torch.device, num_sharing: int = 1) -> int:
    """Returns the limit of ``memory_limit = auto``.

    It is nine tenths of a GPU's free memory; on the CPU it is half the memory
    of the host, or of the process's control group if that has less.

    Args:
        device: the device.
        num_sharing: number of executors that share it.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.9) // num_sharing
    return allowed_memory_bytes() // 2 // num_sharing


def allocated_bytes(device: torch.device) -> int:
    """Memory in use: of a GPU by torch, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def num_forwards(
    device: torch.device, wanted: int, cores: float, num_sharing: int
) -> int:
    """Number of passes that run at a time on one device.

    Args:
        device: the device; a GPU runs one.
        wanted: the operator's option; 0 for one per core.
        cores: cores that the worker may use.
        num_sharing: executors on the CPU, which share the cores.
    """
    if device.type != "cpu":
        return 1
    return wanted or max(1, math.ceil(cores / num_sharing))


def _names(devices: Sequence[torch.device]) -> list[str]:
    counts = Counter(map(str, devices))
    seen: Counter[str] = Counter()
    names = []
    for name in map(str, devices):
        names.append(f"{name}#{seen[name]}" if counts[name] > 1 else name)
        seen[name] += 1
    return names
