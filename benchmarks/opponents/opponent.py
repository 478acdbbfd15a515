"""What every opponent is: a way to read, and the loop around it."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from benchmarks.devices import client_device
from benchmarks.opponents.training import (
    Decoder,
    Options,
    Place,
    Task,
    Trainer,
)

Batches = Generator[tuple[torch.Tensor, torch.Tensor], None, None]
Steps = Generator[torch.Tensor, None, None]


class Opponent(abc.ABC):
    """Trains the tail on photographs that it reads its own way.

    Args:
        task: what is trained.
        place: where the data is.
        options: one of ``GRID``.

    Attributes:
        PACKAGES: distributions whose versions a report tells.
        GRID: settings to choose from; the fastest is taken, by a short
            pass of each.
        KEEPS: whether a second epoch reads less than the first one, so that
            :meth:`forget` has to come before a first one.
    """

    PACKAGES: ClassVar[Sequence[str]] = ()
    GRID: ClassVar[Sequence[Options]] = ({},)
    KEEPS: ClassVar[bool] = False

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
        """Images of uint8 ``[batch, 3, H, W]``, labels ``[batch]``, once each.

        When it is closed, its threads and processes end.
        """

    def steps(self, epoch: int) -> Steps:
        """Trains an epoch; the labels of each batch, when it is done."""
        with contextlib.closing(self.batches(epoch)) as batches:
            for images, labels in batches:
                self.trainer.step(self.trainer.features(images), labels)
                yield labels

    def forget(self) -> None:  # noqa: B027 (most keep nothing)
        """Removes what earlier epochs kept."""

    def close(self) -> None:  # noqa: B027 (most have nothing open)
        """Ends what outlives an epoch."""
