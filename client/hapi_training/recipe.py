"""``Recipe``: how ``hapi train`` trains; its optimizers and schedules.

Importing it does not import torch, since options are checked before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hapi_protocol.errors import ClientError

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LambdaLR

OPTIMIZERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"momentum": 0.9}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "rmsprop": ("RMSprop", {"momentum": 0.9}),
}
"""Classes of torch.optim by name, with what is not torch's default."""
SCHEDULES = ("none", "cosine", "step")
STEP_FACTOR = 0.1
NUM_STEPS = 3
"""Equal parts of a ``step`` schedule, as in torchvision's references for 90
epochs: the rate falls to a tenth twice."""


@dataclass(frozen=True)
class Recipe:
    """Optimizer, learning rate and loss of a training run.

    Attributes:
        learning_rate: highest learning rate.
        optimizer: name in :data:`OPTIMIZERS`.
        weight_decay: of all parameters, as the optimizer defines it.
        schedule: ``"none"`` for a constant rate; ``"cosine"`` to 0 at the
            end of the last epoch; ``"step"`` to a tenth after each third.
        warmup_epochs: epochs in which the rate grows linearly from 0, and by
            which the schedule begins later.
        label_smoothing: of the training loss, from 0 to 1.
        autocast: dtype in which the tail computes where torch's autocast
            allows it; None for that of the features.

    Raises:
        ClientError: ``bad_configuration`` naming the value and what is
            allowed.
    """

    learning_rate: float = 0.01
    optimizer: str = "sgd"
    weight_decay: float = 0.0
    schedule: str = "none"
    warmup_epochs: float = 0.0
    label_smoothing: float = 0.0
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("optimizer", self.optimizer, tuple(OPTIMIZERS)),
            ("schedule", self.schedule, SCHEDULES),
        ):
            if value not in allowed:
                raise _bad(name, value, f"give one of {', '.join(allowed)}")
        for name in ("learning_rate", "weight_decay", "warmup_epochs"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise _bad(name, value, "give a number of at least 0")
        if not 0 <= self.label_smoothing <= 1:
            raise _bad(
                "label_smoothing",
                self.label_smoothing,
                "give a number from 0 to 1",
            )

    def optimizer_of(
        self, parameters: Iterable[torch.nn.Parameter]
    ) -> torch.optim.Optimizer:
        """Makes the optimizer of parameters."""
        import torch

        name, more = OPTIMIZERS[self.optimizer]
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(
            parameters,
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            **more,
        )
        return optimizer

    def schedule_of(
        self,
        optimizer: torch.optim.Optimizer,
        steps_per_epoch: int,
        epochs: int,
        num_taken: int = 0,
    ) -> LambdaLR:
        """Makes the schedule; its ``step`` is called after each step.

        The rate of a step follows from its number alone, so that a run can
        go on with other ``epochs``, and a worker that joins needs no state.

        Args:
            optimizer: result of :meth:`optimizer_of`.
            steps_per_epoch: steps of a whole epoch.
            epochs: epochs of the whole run.
            num_taken: steps that were taken before.
        """
        from torch.optim.lr_scheduler import LambdaLR

        warmup = self.warmup_epochs * steps_per_epoch
        length = max(1.0, epochs * steps_per_epoch - warmup)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            # Beyond the end only after the last step.
            part = min(1.0, (step - warmup) / length)
            if self.schedule == "cosine":
                return (1 + math.cos(math.pi * part)) / 2
            if self.schedule == "step":
                return STEP_FACTOR ** int(NUM_STEPS * (step - warmup) / length)
            return 1.0

        for group in optimizer.param_groups:
            group |= {
                "lr": self.learning_rate,
                "initial_lr": self.learning_rate,
                "weight_decay": self.weight_decay,
            }
        return LambdaLR(optimizer, factor, last_epoch=num_taken - 1)


def _bad(name: str, value: Any, remedy: str) -> ClientError:
    return ClientError("bad_configuration", f"{name} is {value!r}; {remedy}")
