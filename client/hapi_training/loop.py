"""The training loop of ``hapi train`` and ``hapi demo``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hapi_client.job.transfer_job import TransferJob
from hapi_protocol.errors import ClientError
from hapi_training.checkpoint_file import (
    Checkpoint,
    check_same,
    heeding_interrupts,
    random_state,
    set_random_state,
)

MOMENTUM = 0.9
_NOT_OURS = (
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What parts of another form or size raise."""


@dataclass
class EpochResult:
    """One epoch of training, or what is done of it.

    Attributes:
        losses: of each batch, before its step.
        num_correct: samples whose largest output was their label.
        num_samples: of the epoch.
        seconds: of the epoch.
    """

    losses: list[float] = field(default_factory=list)
    num_correct: int = 0
    num_samples: int = 0
    seconds: float = 0.0

    @property
    def mean_loss(self) -> float:
        return sum(self.losses) / max(1, len(self.losses))

    @property
    def accuracy(self) -> float:
        return self.num_correct / max(1, self.num_samples)


@dataclass
class History:
    """All epochs of a training run."""

    epochs: list[EpochResult] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [loss for epoch in self.epochs for loss in epoch.losses]

    @property
    def seconds(self) -> float:
        return sum(epoch.seconds for epoch in self.epochs)


def train_tail(
    job: TransferJob,
    *,
    epochs: int,
    learning_rate: float,
    on_epoch: Callable[[int, EpochResult], None] = lambda number, result: None,
    on_samples: Callable[[int, int], None] = lambda number, samples: None,
    on_resume: Callable[[int, int], None] = lambda epochs, samples: None,
    checkpoint: Checkpoint | None = None,
) -> History:
    """Trains ``job.tail`` with SGD and cross entropy.

    Args:
        job: gives features and labels.
        epochs: of the whole run, those of the checkpoint counted.
        learning_rate: constant; the momentum is 0.9.
        on_epoch: told each epoch's number, from 0 on, and result.
        on_samples: told after each batch the epoch's number, and its
            samples so far.
        on_resume: told the epochs that the checkpoint has, and the samples
            of the one that it has begun, before any further.
        checkpoint: goes on from it, and writes it now and then, behind each
            epoch, and when interrupted.

    Returns:
        All epochs, those before the checkpoint among them.

    Raises:
        ClientError: ``bad_configuration`` when there is nothing to train,
            or the checkpoint is in use or cannot be written; ``bad_state``
            when it is of another run.
        HapiError: of the job's loader.
        KeyboardInterrupt: behind the step that was under way.
    """
    if not any(p.requires_grad for p in job.tail.parameters()):
        raise ClientError(
            "bad_configuration",
            "no parameter is left to train behind the freeze point; freeze "
            "less of the model (freeze=, --freeze)",
        )
    with _kept(checkpoint) as asked:
        run = _Run(job, learning_rate, checkpoint)
        if run.is_resumed:
            on_resume(len(run.history.epochs), run.num_samples)
        for epoch in range(len(run.history.epochs), epochs):
            run.train_epoch(epoch, on_samples, asked)
            on_epoch(epoch, run.history.epochs[-1])
            if asked.is_set():
                raise KeyboardInterrupt
    return run.history


@contextmanager
def _kept(checkpoint: Checkpoint | None) -> Iterator[threading.Event]:
    """Set when the run shall end; without a checkpoint an interrupt is one."""
    if checkpoint is None:
        yield threading.Event()
        return
    with checkpoint.file_lock(), heeding_interrupts() as asked:
        yield asked


class _Run:
    """A training run, and what it is at when it is interrupted."""

    def __init__(
        self,
        job: TransferJob,
        learning_rate: float,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._job = job
        self._checkpoint = checkpoint
        self._learning_rate = learning_rate
        self._optimizer = torch.optim.SGD(
            job.tail.parameters(), lr=learning_rate, momentum=MOMENTUM
        )
        self._device = next(job.tail.parameters()).device
        self.history = History()
        self._begun = EpochResult()
        saved = checkpoint.load() if checkpoint else None
        self.is_resumed = saved is not None
        if saved is not None:
            self._go_on_from(saved)

    @property
    def num_samples(self) -> int:
        """Of the epoch that has begun."""
        return self._begun.num_samples

    def train_epoch(
        self,
        epoch: int,
        on_samples: Callable[[int, int], None],
        asked: threading.Event,
    ) -> None:
        """What is left of an epoch.

        Args:
            epoch: its number.
            on_samples: as of :func:`train_tail`.
            asked: set when the run shall end behind a step.
        """
        self._job.tail.train()
        started = time.monotonic() - self._begun.seconds
        for features, labels in self._job.loader(epoch):
            self._take_step(features, labels)
            self._begun.seconds = time.monotonic() - started
            on_samples(epoch, self._begun.num_samples)
            # Behind its last step the job stands in the next epoch already.
            if self._job.epoch == epoch:
                self._pause(asked)
        self._close()

    def _pause(self, asked: threading.Event) -> None:
        if asked.is_set():
            self._save()
            raise KeyboardInterrupt
        if self._checkpoint and self._checkpoint.is_due:
            self._save()

    def _close(self) -> None:
        self.history.epochs.append(self._begun)
        self._begun = EpochResult()
        self._save()

    def _take_step(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        outputs = self._job.tail(features)
        loss: Any = torch.nn.functional.cross_entropy(outputs, labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        correct = int((outputs.argmax(1) == labels).sum())
        self._begun.losses.append(float(loss.detach()))
        self._begun.num_correct += correct
        self._begun.num_samples += len(labels)

    def _save(self) -> None:
        if self._checkpoint is None:
            return
        self._checkpoint.save(
            features=self._job.features_facts(),
            tail=self._job.tail.state_dict(),
            optimizer=self._optimizer.state_dict(),
            random=random_state(self._device),
            data=self._job.state_dict(),
            epochs=[asdict(each) for each in self.history.epochs],
            begun=asdict(self._begun),
        )

    def _go_on_from(self, saved: Mapping[str, Any]) -> None:
        try:
            check_same(saved["features"], self._job.features_facts())
            self._job.load_state_dict(saved["data"])
            self._job.tail.load_state_dict(saved["tail"])
            self._optimizer.load_state_dict(saved["optimizer"])
            self.history.epochs += [
                EpochResult(**each) for each in saved["epochs"]
            ]
            self._begun = EpochResult(**saved["begun"])
            set_random_state(self._device, saved["random"])
        except _NOT_OURS as error:
            raise ClientError(
                "bad_state",
                "the checkpoint is of another model or release: "
                f"{type(error).__name__}: {error}",
            ) from error
        if len(self.history.epochs) != self._job.epoch:
            raise ClientError(
                "bad_state",
                f"the checkpoint has results of {len(self.history.epochs)} "
                f"epochs, and its data stands in epoch {self._job.epoch}",
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate
