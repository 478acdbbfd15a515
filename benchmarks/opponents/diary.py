"""Training for a while, epoch after epoch, and when each batch was done."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator

import torch


def follow(
    steps: Callable[[int], Generator[torch.Tensor, None, None]],
    epoch: int,
    until: float,
) -> list[tuple[float, int]]:
    """Trains until the first batch that ends at a time or after it.

    Args:
        steps: of an epoch by its number; yields the labels of each batch
            when its step is done.
        epoch: number of the first one.
        until: of the machine's monotonic clock, which processes share.

    Returns:
        Time and samples so far, at the start and after each batch.

    Raises:
        ValueError: an epoch has no batch.
    """
    samples = 0
    found = [(time.monotonic(), samples)]
    for number in itertools.count(epoch):
        before = samples
        with contextlib.closing(steps(number)) as batches:
            for labels in batches:
                samples += len(labels)
                found.append((time.monotonic(), samples))
                if found[-1][0] >= until:
                    return found
        if samples == before:
            raise ValueError(f"epoch {number} has no batch")
    raise AssertionError("epochs are endless")
