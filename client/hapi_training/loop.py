"""The training loop of ``hapi train`` and ``hapi demo``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from hapi_client.job.transfer_job import TransferJob
from hapi_protocol.errors import ClientError
from hapi_training.checkpoint_file import (
    Checkpoint,
    check_features_match,
    defer_interrupts,
    random_state,
    set_random_state,
)
from hapi_training.state_transfer import LOAD_ERRORS
from hapi_training.virtual_nodes.step import Step
from hapi_training.virtual_nodes.virtual_nodes import VirtualNodes

MOMENTUM = 0.9


@dataclass
class EpochResult:
    """Results of one epoch of training, so far.

    Attributes:
        losses: losses of each batch, before its step.
        num_correct: samples whose largest output was their label.
        num_samples: trained samples.
        seconds: training time.
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
    """Results of all epochs of a training run."""

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
    num_nodes: int = 1,
    seed: int = 0,
) -> History:
    """Trains ``job.tail`` with SGD and cross entropy.

    On this worker alone, or on those of torchrun or of a rendezvous: see
    :class:`.VirtualNodes`.  The first of them writes the checkpoint; each
    that can read it resumes from it.

    Args:
        job: loads features and labels.
        epochs: number of epochs, including those of the checkpoint.
        learning_rate: constant; the momentum is 0.9.
        on_epoch: called after each epoch with its number (from 0) and result.
        on_samples: called after each batch with the epoch's number and its
            samples so far.
        on_resume: called first if the checkpoint exists, with its number of
            finished epochs and of samples in the unfinished one.
        checkpoint: is resumed from, and written at intervals, after each
            epoch and on an interrupt.
        num_nodes: number of virtual nodes of all workers.
        seed: seed of their random numbers.

    Returns:
        Results of all epochs, including those of the checkpoint.

    Raises:
        ClientError: ``bad_configuration`` if there is nothing to train, or
            the checkpoint is in use or cannot be written; ``bad_state``
            if it belongs to another run.
        HapiError: of the job's loader.
        KeyboardInterrupt: after the step in which the interrupt came.
    """
    if not any(p.requires_grad for p in job.frozen.tail.parameters()):
        raise ClientError(
            "bad_configuration",
            "there is no parameter to train after the freeze point; freeze "
            "less of the model (freeze=, --freeze)",
        )
    nodes = VirtualNodes(job.tail, num_nodes, seed=seed, strict=False)
    with _locked(checkpoint, nodes) as stop_requested:
        run = _Run(job, learning_rate, checkpoint, nodes)
        if run.is_resumed:
            on_resume(len(run.history.epochs), run.num_samples)
        while (epoch := len(run.history.epochs)) < epochs:
            run.train_epoch(epoch, on_samples, stop_requested)
            if nodes.is_behind:
                # The results so far have come from the other workers.
                continue
            on_epoch(epoch, run.history.epochs[-1])
            if stop_requested.is_set():
                raise KeyboardInterrupt
    return run.history


@contextmanager
def _locked(
    checkpoint: Checkpoint | None, nodes: VirtualNodes
) -> Iterator[threading.Event]:
    """Locks the checkpoint, and yields an event that an interrupt sets.

    Without a checkpoint, interrupts are not deferred; nor with several
    workers, which end one after another.
    """
    if checkpoint is None or not nodes.is_alone:
        yield threading.Event()
        return
    with checkpoint.lock(), defer_interrupts() as stop_requested:
        yield stop_requested


@dataclass(eq=False)
class _Run:
    """State of a training run: everything that a checkpoint saves."""

    job: TransferJob
    learning_rate: float
    checkpoint: Checkpoint | None
    nodes: VirtualNodes

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.SGD(
            self.job.tail.parameters(),
            lr=self.learning_rate,
            momentum=MOMENTUM,
        )
        self._device = next(self.job.tail.parameters()).device
        self.history = History()
        self._current = EpochResult()
        saved = self.checkpoint.load() if self.checkpoint else None
        self.is_resumed = saved is not None
        if saved is not None:
            self._restore(saved)

    @property
    def num_samples(self) -> int:
        """Trained samples of the current epoch."""
        return self._current.num_samples

    def train_epoch(
        self,
        epoch: int,
        on_samples: Callable[[int, int], None],
        stop_requested: threading.Event,
    ) -> None:
        """Trains the rest of an epoch.

        Args:
            epoch: its number.
            on_samples: see :func:`train_tail`.
            stop_requested: ends the run after the current step if set.
        """
        self.job.tail.train()
        started = time.monotonic() - self._current.seconds
        self.job.train_loader.set_epoch(epoch)
        state = {
            "tail": self.job.tail,
            "optimizer": self._optimizer,
            "results": self,
        }
        for step in self.nodes.steps(self.job.train_loader, state):
            self._take_step(step)
            self._current.seconds = time.monotonic() - started
            on_samples(epoch, self._current.num_samples)
            # After the last step the job is already in the next epoch.
            if self.job.epoch == epoch:
                self._after_step(stop_requested)
        if not self.nodes.is_behind:
            self._finish_epoch()

    def _after_step(self, stop_requested: threading.Event) -> None:
        if stop_requested.is_set():
            self._save()
            raise KeyboardInterrupt
        if self.checkpoint and self.checkpoint.is_due:
            self._save()

    def _finish_epoch(self) -> None:
        self.history.epochs.append(self._current)
        self._current = EpochResult()
        self._save()

    def _take_step(self, step: Step) -> None:
        for features, labels in step:
            outputs = self.job.tail(features)
            step.backward(cross_entropy(outputs, labels))
            step.add((outputs.argmax(1) == labels).sum())
        self._optimizer.step()
        self._optimizer.zero_grad()
        if step.num_samples:
            self._current.losses.append(step.loss)
        self._current.num_correct += int(step.added)
        self._current.num_samples += step.num_samples

    def state_dict(self) -> dict[str, Any]:
        """Results so far, which other workers get with the tail."""
        return {
            "epochs": [asdict(epoch) for epoch in self.history.epochs],
            "begun": asdict(self._current),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.epochs[:] = [
            EpochResult(**epoch) for epoch in state["epochs"]
        ]
        self._current = EpochResult(**state["begun"])

    def _save(self) -> None:
        if self.checkpoint is None or not self.nodes.is_first:
            return
        self.checkpoint.save(
            features=self.job.features_facts(),
            tail=self.job.tail.state_dict(),
            optimizer=self._optimizer.state_dict(),
            random=random_state(self._device),
            data=self.job.state_dict(),
            nodes=self.nodes.state_dict(),
            **self.state_dict(),
        )

    def _restore(self, saved: Mapping[str, Any]) -> None:
        try:
            check_features_match(saved["features"], self.job.features_facts())
            self.job.load_state_dict(saved["data"])
            self.job.tail.load_state_dict(saved["tail"])
            self._optimizer.load_state_dict(saved["optimizer"])
            self.nodes.load_state_dict(saved["nodes"])
            self.load_state_dict(saved)
            set_random_state(self._device, saved["random"])
        except LOAD_ERRORS as error:
            raise ClientError(
                "bad_state",
                "the checkpoint belongs to another model or release: "
                f"{type(error).__name__}: {error}",
            ) from error
        if len(self.history.epochs) != self.job.epoch:
            raise ClientError(
                "bad_state",
                f"the checkpoint has results of {len(self.history.epochs)} "
                f"epochs, but its data is in epoch {self.job.epoch}",
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
