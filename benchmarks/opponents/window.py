"""A window of a training loop, by which settings are compared.

A pass begins an epoch, lets the pipeline fill, and then counts from the end
of one training step to that of another one.  What starting an epoch takes is
left out; but what had come ahead by then counts, so that windows compare
settings of one opponent, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.cpu_seconds import session_seconds

MIN_BATCHES = 4
"""Fewer in a window say nothing."""


@dataclass(frozen=True)
class Throughput:
    """How long is measured.

    Attributes:
        fill_seconds, fill_batches: not counted, at the start; both are
            waited for.
        seconds, batches: that a window has at least, both;
        most_seconds: but no more than this, if :data:`MIN_BATCHES` came.
    """

    fill_seconds: float = 2.0
    fill_batches: int = 2
    seconds: float = 6.0
    batches: int = 16
    most_seconds: float = 15.0

    def is_over(self, seconds: float, batches: int) -> bool:
        """Whether a window of so many seconds and batches is one."""
        if seconds >= self.most_seconds:
            return batches >= MIN_BATCHES
        return seconds >= self.seconds and batches >= self.batches


@dataclass(frozen=True)
class ReadPlan:
    """Of clocks and counters, in one moment.

    Attributes:
        time: of the machine's monotonic clock.
        down, up: bytes that the client's interface received and sent so far,
            headers included; 0 without an interface.
        client_seconds, storage_seconds: CPU seconds of each tier's
            processes so far.
    """

    time: float
    down: int
    up: int
    client_seconds: float
    storage_seconds: float


@dataclass(frozen=True)
class Meter:
    """Reads clocks and counters.

    Args:
        interface: of the client's network namespace; None without one.
        storage_sessions: of the storage tier's processes. The client's are
            those of this process's own session.
    """

    interface: str | None
    storage_sessions: Collection[int]

    def read(self) -> ReadPlan:
        finish()
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


def finish() -> None:
    """Waits for what this process has asked of GPUs.

    A step is done when its numbers are there, not when it has been asked for.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def interface_bytes(name: str) -> tuple[int, int]:
    """Received and sent so far, of this network namespace's interface.

    Raises:
        ValueError: there is none of this name.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        interface, _, counters = line.partition(":")
        if interface.strip() == name:
            fields = counters.split()
            return int(fields[0]), int(fields[8])
    raise ValueError(f"there is no interface {name} in this namespace")


def measure(
    steps: Generator[torch.Tensor, None, None], meter: Meter, pace: Throughput
) -> dict[str, Any]:
    """Trains until the window is over, or the epoch.

    Args:
        steps: yields the labels of each batch when its step is done; is
            closed at the end.
        meter: what reads the counters.
        pace: how long.

    Returns:
        ``samples``, ``seconds`` and ``batches`` of the window,
        ``samples_per_second``, and of one sample ``down_bytes``,
        ``up_bytes``, ``client_seconds``, ``storage_seconds``.

    Raises:
        ValueError: the epoch ended before there was a window.
    """
    started = time.monotonic()
    begin = end = None
    samples = batches = filled = 0
    with contextlib.closing(steps):
        for labels in steps:
            now = time.monotonic()
            if begin is None:
                filled += 1
                if (
                    now - started >= pace.fill_seconds
                    and filled >= pace.fill_batches
                ):
                    begin = meter.read()
                continue
            samples += len(labels)
            batches += 1
            if pace.is_over(now - begin.time, batches):
                break
        end = meter.read()
    if begin is None or batches < MIN_BATCHES:
        raise ValueError(
            f"the epoch ended after {filled + batches} batches, too few for"
            " a window; give it more samples"
        )
    return {
        "samples": samples,
        "batches": batches,
        **between(begin, end, samples),
    }


def between(begin: ReadPlan, end: ReadPlan, samples: int) -> dict[str, float]:
    """Rates and costs of one sample, of what lies between two readings."""
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
