"""Several trainers at the same time, measured in one common window."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.ratios import rate_between
from benchmarks.suite.contenders import CLIENT, ask
from benchmarks.testbed.remote import Remote
from benchmarks.testbed.two_tiers import Testbed


@dataclass(frozen=True)
class Window:
    """Length of a measurement; ``fill_seconds`` do not count."""

    fill_seconds: float = 4.0
    seconds: float = 12.0


@dataclass(frozen=True)
class Trainer:
    """A process that answers ``follow``, with further arguments."""

    remote: Remote
    question: Mapping[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def client_processes(
    bed: Testbed, environments: Sequence[Mapping[str, str]]
) -> Iterator[list[Remote]]:
    """Starts a client process for each environment."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                replace(
                    bed.client,
                    environment={**bed.client.environment, **environment},
                ).remote(CLIENT)
            )
            for environment in environments
        ]


def measure_together(
    trainers: Sequence[Trainer], epoch: int, window: Window
) -> dict[str, Any]:
    """Runs all trainers at once.

    Args:
        trainers: each with its own process.
        epoch: that they begin with.
        window: length of the measurement.

    Returns:
        ``samples_per_second`` of all, and ``each``.
    """
    begin = time.monotonic() + window.fill_seconds
    end = begin + window.seconds
    with ThreadPoolExecutor(len(trainers)) as pool:
        pending = [
            pool.submit(
                ask,
                trainer.remote,
                "follow",
                epoch=epoch,
                until=end,
                **trainer.question,
            )
            for trainer in trainers
        ]
        progress = [result.result() for result in pending]
    rates = [rate_between([points], begin, end) for points in progress]
    return {
        "samples_per_second": sum(rates),
        "each": rates,
    }
