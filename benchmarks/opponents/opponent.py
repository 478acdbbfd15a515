"""Base class of the opponents: batches to read, and the training loop."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from benchmarks.opponents.measurement import Steps
from benchmarks.opponents.training import (
    Decoder,
    Options,
    Place,
    Task,
    Trainer,
)
from benchmarks.testbed.process_resources import client_device

Batches = Generator[tuple[torch.Tensor, torch.Tensor], None, None]


class Opponent(abc.ABC):
    """Trains the tail on photographs that it loads.

    ``GRID`` has settings to choose the fastest from; versions of ``PACKAGES``
    are recorded.
    """

    PACKAGES: ClassVar[Sequence[str]] = ()
    GRID: ClassVar[Sequence[Options]] = ({},)

    def __init__(
        self, task: Task, place: Place, options: Mapping[str, Any]
    ) -> None:
        self.task = task
        self.place = place
        self.options = dict(options)
        self.decode = Decoder(task)
        self.trainer = Trainer(
            task,
            channels_last=self.options.get("channels_last", False),
            device=client_device(),
        )

    @abc.abstractmethod
    def batches(self, epoch: int) -> Batches:
        """Images, uint8 ``[batch, 3, H, W]``, and labels ``[batch]``.

        Each sample comes once.  Closing it ends its threads and processes.
        """

    def steps(self, epoch: int) -> Steps:
        """Trains an epoch; yields the labels of each batch after its step."""
        with contextlib.closing(self.batches(epoch)) as batches:
            for images, labels in batches:
                self.trainer.step(self.trainer.features(images), labels)
                yield labels

    def forget(self) -> None:  # noqa: B027 (most have no cache)
        """Empties the caches of earlier epochs."""

    def close(self) -> None:  # noqa: B027 (most have nothing open)
        """Releases resources that outlive an epoch."""
