"""The training loop of ``hapi train`` and ``hapi demo``."""

from __future__ import annotations

import difflib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torchvision

from hapi_client.checkpoints import (
    Checkpoint,
    check_same,
    heeding_interrupts,
    random_state,
    set_random_state,
)
from hapi_client.job import TransferJob
from hapi_protocol.errors import ClientError

MOMENTUM = 0.9
MOST_NAMES = 5
"""That an error tells."""
_NOT_OURS = (
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What parts of another form or size raise."""


@dataclass(frozen=True)
class EpochResult:
    """One epoch of training.

    Attributes:
        losses: of each batch, before its step.
        num_correct: samples whose largest output was their label.
        num_samples: of the epoch.
        seconds: of the epoch.
    """

    losses: tuple[float, ...]
    num_correct: int
    num_samples: int
    seconds: float

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
            when it is of another run; ``bad_sample`` when an epoch has no
            sample left.
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
    with checkpoint.held(), heeding_interrupts() as asked:
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
        self._begun = EpochResult((), 0, 0, 0.0)
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
            self._begun = replace(
                self._begun, seconds=time.monotonic() - started
            )
            on_samples(epoch, self._begun.num_samples)
            # Behind its last step the job stands in the next epoch already.
            if self._job.epoch == epoch:
                self._pause(asked)
        self._close(epoch)

    def _pause(self, asked: threading.Event) -> None:
        if asked.is_set():
            self._save()
            raise KeyboardInterrupt
        if self._checkpoint and self._checkpoint.is_due:
            self._save()

    def _close(self, epoch: int) -> None:
        if not self._begun.losses:
            raise ClientError(
                "bad_sample",
                f"epoch {epoch} had no sample to train on: all "
                f"{self._job.num_samples} were skipped; repair them, or name "
                "other data",
            )
        self.history.epochs.append(self._begun)
        self._begun = EpochResult((), 0, 0, 0.0)
        self._save()

    def _take_step(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        outputs = self._job.tail(features)
        loss: Any = torch.nn.functional.cross_entropy(outputs, labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        correct = int((outputs.argmax(1) == labels).sum())
        self._begun = replace(
            self._begun,
            losses=(*self._begun.losses, float(loss.detach())),
            num_correct=self._begun.num_correct + correct,
            num_samples=self._begun.num_samples + len(labels),
        )

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


def build_model(
    name: str,
    *,
    num_classes: int | None,
    seed: int,
    weights: str | None = None,
    checkpoint: Path | None = None,
) -> tuple[torch.nn.Module, Any]:
    """A torchvision model with a head of ``num_classes`` outputs.

    Args:
        name: as in ``torchvision.models``.
        num_classes: outputs of the last linear layer; None leaves the
            head as it is.
        seed: of random weights, the new head's too.
        weights: name of published weights (``DEFAULT``), which
            torchvision downloads; None for random ones.
        checkpoint: a state dict of that model, read without pickle code.

    Returns:
        The model, and the weights' transform or None.

    Raises:
        ClientError: ``bad_configuration`` naming the value.
    """
    torch.manual_seed(seed)
    try:
        builder = torchvision.models.get_model_builder(name)
    except ValueError as error:
        known = torchvision.models.list_models()
        what = f"torchvision has no model {name!r}"
        raise _unknown(what, name, known) from error
    chosen = None
    if weights is not None:
        offered = torchvision.models.get_model_weights(builder)
        if weights not in offered.__members__:
            raise _unknown(
                f"torchvision has no weights {weights!r} of {name}",
                weights,
                list(offered.__members__),
            )
        chosen = offered[weights]
    if checkpoint is None:
        model = _published(builder, chosen)
    else:
        model = _from_checkpoint(builder, checkpoint)
    if num_classes is not None:
        _replace_head(model, num_classes)
    return model, chosen.transforms() if chosen is not None else None


def _unknown(what: str, name: str, known: Sequence[str]) -> ClientError:
    near = difflib.get_close_matches(name, known, MOST_NAMES, cutoff=0.5)
    there_are = "near it are" if near else "there are"
    names = ", ".join(near or known[:MOST_NAMES])
    more = "" if near or len(known) <= MOST_NAMES else ", ..."
    return ClientError(
        "bad_configuration", f"{what}; {there_are} {names}{more}"
    )


def _published(
    builder: Callable[..., torch.nn.Module], weights: Any
) -> torch.nn.Module:
    try:
        return builder(weights=weights)
    except OSError as error:
        raise ClientError(
            "bad_configuration",
            f"the weights {weights} cannot be downloaded: {error}; give a "
            "file of them with --checkpoint",
        ) from error


def _from_checkpoint(
    builder: Callable[..., torch.nn.Module], path: Path
) -> torch.nn.Module:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        head, _ = _last_linear(builder())
        outputs = len(state[f"{head}.weight"])
        model = builder(num_classes=outputs)
        model.load_state_dict(state)
    except Exception as error:  # whatever is in the file
        raise ClientError(
            "bad_configuration",
            f"{path} is no state dict of this model: {error}",
        ) from error
    return model


def _last_linear(model: torch.nn.Module) -> tuple[str, torch.nn.Linear]:
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    if not found:
        raise ClientError(
            "bad_configuration",
            f"{type(model).__name__} has no linear layer to replace",
        )
    return found[-1]


def _replace_head(model: torch.nn.Module, num_classes: int) -> None:
    name, old = _last_linear(model)
    if old.out_features == num_classes:
        return
    parent, _, attribute = name.rpartition(".")
    setattr(
        model.get_submodule(parent),
        attribute,
        torch.nn.Linear(old.in_features, num_classes),
    )
