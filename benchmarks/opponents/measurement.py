"""Measures a training loop: whole epochs, and progress over time."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.testbed.process_resources import session_seconds

Steps = Generator[torch.Tensor, None, None]
"""An epoch; yields the labels of each batch after its step."""


@dataclass(frozen=True)
class ReadPlan:
    """Monotonic clock, bytes of the client's interface, CPU seconds."""

    time: float
    down: int
    up: int
    client_seconds: float
    storage_seconds: float


@dataclass(frozen=True)
class Meter:
    """Reads clocks and counters.

    ``interface`` is that of the client's network namespace, headers included;
    without one bytes are 0.  The client's processes are those of this
    process's session, the storage tier's those of ``storage_sessions``.
    """

    interface: str | None
    storage_sessions: Collection[int]

    def read(self) -> ReadPlan:
        if torch.cuda.is_initialized():
            # A step is complete when its results are there.
            torch.cuda.synchronize()
        down, up = (
            interface_bytes(self.interface) if self.interface else (0, 0)
        )
        return ReadPlan(
            time.monotonic(),
            down,
            up,
            session_seconds({os.getsid(0)}),
            session_seconds(self.storage_sessions),
        )


def interface_bytes(name: str) -> tuple[int, int]:
    """Bytes that an interface of this namespace received and sent so far.

    Raises:
        ValueError: there is no interface of this name.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        interface, _, counters = line.partition(":")
        if interface.strip() == name:
            fields = counters.split()
            return int(fields[0]), int(fields[8])
    raise ValueError(f"there is no interface {name} in this namespace")


def between(begin: ReadPlan, end: ReadPlan, samples: int) -> dict[str, float]:
    """Rate between two readings, and the costs of one sample."""
    seconds = end.time - begin.time
    return {
        "seconds": seconds,
        "samples_per_second": samples / seconds,
        "down_bytes": (end.down - begin.down) / samples,
        "up_bytes": (end.up - begin.up) / samples,
        "client_seconds": (end.client_seconds - begin.client_seconds)
        / samples,
        "storage_seconds": (end.storage_seconds - begin.storage_seconds)
        / samples,
    }


def follow(
    steps: Callable[[int], Steps], epoch: int, until: float
) -> list[tuple[float, int]]:
    """Trains epoch after epoch, until a batch ends at or after a time.

    ``steps`` starts an epoch by its number; ``until`` is of the machine's
    monotonic clock.

    Returns:
        (time, samples so far), at the start and after each batch.
    """
    samples = 0
    marks = [(time.monotonic(), samples)]
    for number in itertools.count(epoch):
        with contextlib.closing(steps(number)) as batches:
            for labels in batches:
                samples += len(labels)
                marks.append((time.monotonic(), samples))
                if marks[-1][0] >= until:
                    return marks
        if not samples:
            raise ValueError(f"epoch {number} has no batch")
    raise AssertionError("epochs are endless")
