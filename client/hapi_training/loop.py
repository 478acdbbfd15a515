"""The training loop of ``hapi train`` and ``hapi demo``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from hapi_client.job.transfer_job import VAL, TransferJob
from hapi_protocol.errors import ClientError
from hapi_training.checkpoint_file import defer_interrupts
from hapi_training.checkpoints.manager import CheckpointManager
from hapi_training.checkpoints.uploads import CheckpointStats
from hapi_training.membership import WorkerLostError
from hapi_training.partial_backward import PartialBackward
from hapi_training.recipe import Recipe
from hapi_training.turns import DeviceQueue
from hapi_training.virtual_nodes.step import Step
from hapi_training.virtual_nodes.virtual_nodes import VirtualNodes

TOP_K = 5
SAVE_SECONDS = 30.0
"""Interval between checkpoints within an epoch, unless given in steps."""


@dataclass
class EpochResult:
    """Results of one epoch of training, so far.

    Attributes:
        losses: losses of each batch, before its step.
        num_correct: samples whose largest output was their label.
        num_samples: trained samples.
        seconds: training time, without validation.
        val_loss: mean loss of the validation samples, without label
            smoothing; None without such data, as those below.
        val_accuracy: ratio of them whose largest output is their label.
        val_top5: ratio whose label is among the five largest outputs.
    """

    losses: list[float] = field(default_factory=list)
    num_correct: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_top5: float | None = None

    @property
    def mean_loss(self) -> float:
        return sum(self.losses) / max(1, len(self.losses))

    @property
    def accuracy(self) -> float:
        return self.num_correct / max(1, self.num_samples)

    @property
    def score(self) -> float:
        """Accuracy on the validation data, if there are any; below 0 for an
        epoch that has diverged."""
        losses = (self.mean_loss, self.val_loss or 0.0)
        if not all(map(math.isfinite, losses)):
            return -1.0
        if self.val_accuracy is None:
            return self.accuracy
        return self.val_accuracy


@dataclass
class History:
    """Results of all epochs of a training run.

    Attributes:
        epochs: results of each epoch.
        checkpoints: what the checkpoints have cost; None without any.
    """

    epochs: list[EpochResult] = field(default_factory=list)
    checkpoints: CheckpointStats | None = None

    @property
    def losses(self) -> list[float]:
        return [loss for epoch in self.epochs for loss in epoch.losses]

    @property
    def seconds(self) -> float:
        return sum(epoch.seconds for epoch in self.epochs)

    @property
    def best_epoch(self) -> int:
        """The first epoch with the highest accuracy; validation's, if any."""
        scores = [epoch.score for epoch in self.epochs]
        return scores.index(max(scores))

    def has_stalled(self, num_epochs: int | None) -> bool:
        """True if the best epoch was ``num_epochs`` ago, or more."""
        if num_epochs is None or not self.epochs:
            return False
        return len(self.epochs) - 1 - self.best_epoch >= num_epochs


@dataclass(frozen=True)
class CheckpointPlaces:
    """Places of the checkpoints of a run; see :class:`.CheckpointManager`.

    Attributes:
        local: folder, or file; None for none.
        remote: ``swift://container/prefix``; None for none.
        every_steps: steps between two checkpoints within an epoch; None for
            30 seconds.
    """

    local: Path | None = None
    remote: str | None = None
    every_steps: int | None = None


def train_tail(
    job: TransferJob,
    *,
    epochs: int,
    recipe: Recipe | None = None,
    early_stop: int | None = None,
    on_epoch: Callable[[int, EpochResult], None] = lambda number, result: None,
    on_samples: Callable[[int, int], None] = lambda number, samples: None,
    on_resume: Callable[[History, int], None] = lambda history, samples: None,
    checkpoints: CheckpointPlaces | None = None,
    num_nodes: int = 1,
    partial: PartialBackward | None = None,
    queue: Path | None = None,
    seed: int = 0,
) -> History:
    """Trains ``job.tail`` with cross entropy.

    If the job's data has a split ``val``, it is evaluated after each epoch.

    On this worker alone, or on those of torchrun or of a rendezvous: see
    :class:`.VirtualNodes`.  They write checkpoints together, and resume from
    the newest one.

    Args:
        job: loads features and labels.
        epochs: number of epochs, including those of the checkpoint.
        recipe: optimizer, learning rate and loss; None for the default.
        early_stop: end after so many epochs without a better accuracy.
        on_epoch: called after each epoch with its number (from 0) and result.
        on_samples: called after each batch with the epoch's number and its
            samples so far.
        on_resume: called first if there is a checkpoint, with the results of
            its finished epochs, and the samples of the unfinished one.
        checkpoints: places of checkpoints, which are written at intervals,
            after each epoch and on an interrupt; None for none.
        num_nodes: number of virtual nodes of all workers.
        partial: lets nodes train only the last layers, in turn.
        queue: socket of the device's queue; None for a device of its own.
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
    recipe = recipe or Recipe()
    nodes = VirtualNodes(
        job.tail,
        num_nodes,
        seed=seed,
        partial=partial,
        queue=None
        if queue is None
        else DeviceQueue(queue, steps=epochs * len(job.train_loader)),
        strict=False,
    )
    # Several workers end one after another.
    is_deferred = checkpoints is not None and nodes.is_alone
    deferral = defer_interrupts() if is_deferred else nullcontext(Event())
    with deferral as stop_requested:
        run = _Run(job, recipe, epochs, checkpoints, nodes, stop_requested)
        with run.checkpoints or nullcontext():
            if run.resume():
                on_resume(run.history, run.num_samples)
            while (epoch := len(run.history.epochs)) < epochs:
                if run.history.has_stalled(early_stop):
                    break
                run.train_epoch(epoch, on_samples)
                if nodes.is_behind:
                    # The results so far have come from the other workers.
                    continue
                # First, so that a checkpoint has no epoch of which the
                # caller could not save what it wanted.
                on_epoch(epoch, run.history.epochs[-1])
                run.save()
                if stop_requested.is_set():
                    raise KeyboardInterrupt
    return run.history


class _Run:
    """State of a training run: everything that a checkpoint saves."""

    def __init__(
        self,
        job: TransferJob,
        recipe: Recipe,
        epochs: int,
        places: CheckpointPlaces | None,
        nodes: VirtualNodes,
        stop_requested: Event,
    ) -> None:
        self._job, self._nodes = job, nodes
        self._stop_requested = stop_requested
        self._recipe, self._epochs = recipe, epochs
        self._optimizer = recipe.optimizer_of(job.tail.parameters())
        self._num_taken = 0
        self._set_schedule()
        self.history = History()
        self._current = EpochResult()
        self._saved_at = time.time()
        self._every_steps = places.every_steps if places else None
        self.checkpoints: CheckpointManager | None = None
        if places is not None:
            self.checkpoints = CheckpointManager(
                {**self._shared, "data": job, "nodes": nodes},
                local=places.local,
                remote=places.remote,
                connection=job.pipeline.data.connection,
            )
            self.history.checkpoints = self.checkpoints.stats

    def resume(self) -> bool:
        """Goes on from the newest checkpoint; False if there is none."""
        if self.checkpoints is None or not self.checkpoints.restore():
            return False
        if len(self.history.epochs) != self._job.epoch:
            raise ClientError(
                "bad_state",
                f"the checkpoint has results of {len(self.history.epochs)} "
                f"epochs, but its data is in epoch {self._job.epoch}",
            )
        return True

    def _set_schedule(self) -> None:
        """Makes the schedule go on after the steps that were taken."""
        self._schedule = self._recipe.schedule_of(
            self._optimizer,
            len(self._job.train_loader),
            self._epochs,
            self._num_taken,
        )

    @property
    def _shared(self) -> dict[str, Any]:
        """State that workers send each other."""
        return {
            "tail": self._job.tail,
            "optimizer": self._optimizer,
            "results": self,
        }

    @property
    def num_samples(self) -> int:
        """Trained samples of the current epoch."""
        return self._current.num_samples

    def train_epoch(
        self,
        epoch: int,
        on_samples: Callable[[int, int], None],
    ) -> None:
        """Trains the rest of an epoch.

        Args:
            epoch: its number.
            on_samples: see :func:`train_tail`.
        """
        self._job.tail.train()
        started = time.monotonic() - self._current.seconds
        self._job.train_loader.set_epoch(epoch)
        for step in self._nodes.steps(self._job.train_loader, self._shared):
            self._take_step(step)
            self._current.seconds = time.monotonic() - started
            on_samples(epoch, self._current.num_samples)
            # After the last step the job is already in the next epoch.
            if self._job.epoch == epoch:
                self._after_step(step)
        if not self._nodes.is_behind:
            self._validate()
            self._finish_epoch()

    def _after_step(self, step: Step) -> None:
        is_due = (
            # A clock may be set back.
            not 0 <= step.time - self._saved_at < SAVE_SECONDS
            if self._every_steps is None
            else (step.number + 1) % self._every_steps == 0
        )
        if self._stop_requested.is_set() or is_due:
            self._saved_at = step.time
            self.save()
        if self._stop_requested.is_set():
            raise KeyboardInterrupt

    def _finish_epoch(self) -> None:
        self.history.epochs.append(self._current)
        self._current = EpochResult()

    def _take_step(self, step: Step) -> None:
        smoothing = self._recipe.label_smoothing
        for features, labels in step:
            with self._autocast():
                outputs = self._outputs(features)
                loss = cross_entropy(
                    outputs, labels, label_smoothing=smoothing
                )
            step.backward(loss)
            step.add((outputs.argmax(1) == labels).sum())
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        self._num_taken += 1
        if step.num_samples:
            self._current.losses.append(step.loss)
        self._current.num_correct += int(step.added)
        self._current.num_samples += step.num_samples

    def _autocast(self) -> torch.autocast:
        dtype = self._recipe.autocast
        device = self._job.frozen.device.type
        return torch.autocast(device, dtype, enabled=dtype is not None)

    def _outputs(self, features: torch.Tensor) -> torch.Tensor:
        """Returns ``[n, classes]``."""
        outputs = self._job.tail(features)
        # Models of transformers return several fields.
        logits: torch.Tensor = getattr(outputs, "logits", outputs)
        return logits

    def _validate(self) -> None:
        if VAL not in self._job.pipeline.data.splits:
            return
        self._job.tail.eval()
        try:
            loss, correct, top5, count = self._validation_sums()
        except WorkerLostError as error:
            self._nodes.recover(error)
            return self._validate()
        finally:
            self._job.tail.train()
        count = max(1.0, count)
        self._current.val_loss = loss / count
        self._current.val_accuracy = correct / count
        self._current.val_top5 = top5 / count

    def _validation_sums(self) -> list[float]:
        """Sums over all workers: loss, right first and five, samples."""
        sums = torch.zeros(4, dtype=torch.float64)
        with torch.no_grad():
            for step in self._nodes.steps(self._job.val_loader):
                for features, labels in step:
                    with self._autocast():
                        outputs = self._outputs(features).float()
                    first = outputs.topk(min(TOP_K, outputs.shape[1])).indices
                    is_right = first == labels[:, None]
                    loss = cross_entropy(outputs, labels, reduction="sum")
                    sums += torch.tensor(
                        [
                            loss.item(),
                            is_right[:, 0].sum().item(),
                            is_right.sum().item(),
                            len(labels),
                        ]
                    )
        return self._nodes.sum(sums).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Results so far, which other workers get with the tail."""
        return {
            "epochs": [asdict(epoch) for epoch in self.history.epochs],
            "begun": asdict(self._current),
            # Workers save at the same steps.
            "saved_at": self._saved_at,
            "num_taken": self._num_taken,
            "optimizer": self._recipe.optimizer,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with results; called after the optimizer has its state.

        Raises:
            ClientError: ``bad_state`` if it is of another optimizer.
        """
        # Older checkpoints have neither.
        optimizer = state.get("optimizer", "sgd")
        if optimizer != self._recipe.optimizer:
            raise ClientError(
                "bad_state",
                f"the checkpoint is of the optimizer {optimizer!r}, but this "
                f"run uses {self._recipe.optimizer!r}; give --optimizer "
                f"{optimizer}, or another --resume",
            )
        self.history.epochs[:] = [
            EpochResult(**epoch) for epoch in state["epochs"]
        ]
        self._current = EpochResult(**state["begun"])
        self._saved_at = state["saved_at"]
        self._num_taken = state.get("num_taken", len(self.history.losses))
        self._set_schedule()

    def save(self) -> None:
        """Writes a checkpoint, if there is a place for it."""
        if self.checkpoints is not None:
            self.checkpoints.save()
