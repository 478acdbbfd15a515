"""Options of ``hapi train``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hapi_client.cli.context import OUTPUT, checked_path
from hapi_client.cli.options import (
    DATA,
    EXPERT,
    MODEL,
    PUSH_DOWN,
    TRAINING,
    JobOptions,
    LabelsOption,
    Values,
    one_of,
    option,
    swept,
)
from hapi_protocol.headers import CACHE_MODES
from hapi_training.recipe import OPTIMIZERS, SCHEDULES

SWEPT = {
    "optimizer": "optimizer",
    "lr": "learning_rate",
    "weight-decay": "weight_decay",
    "schedule": "schedule",
    "warmup": "warmup_epochs",
    "label-smoothing": "label_smoothing",
}
"""Options that a sweep may vary, and their fields, which are also those of
:class:`hapi_training.recipe.Recipe`."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(JobOptions):
    """Options of ``hapi train``."""

    classes: int | None = option(
        "Number of classes, the outputs of the new head. Default: as the "
        "index says.",
        None,
        MODEL,
        min=2,
    )
    val: str | None = option(
        "Data set to evaluate after each epoch: loss, top-1 and top-5.",
        panel=DATA,
        metavar="CONTAINER[/PREFIX]",
    )
    augment: bool = option(
        "Crop and flip training images at random; the result does not depend "
        "on where they are computed.",
        False,
        DATA,
    )
    labels: LabelsOption = None
    epochs: int = option("Number of epochs.", 1, TRAINING, min=1)
    learning_rate: Values = swept(
        "Highest learning rate. Several values here and below: a sweep.",
        0.01,
        float,
        names=("--lr",),
    )
    optimizer: Values = swept(
        "Optimizer of torch.optim: " + ", ".join(OPTIMIZERS) + ". sgd and "
        "rmsprop have momentum 0.9.",
        "sgd",
        str,
        metavar="NAME",
        choices=tuple(OPTIMIZERS),
    )
    weight_decay: Values = swept(
        "Weight decay of all trained parameters.", 0.0, float
    )
    schedule: Values = swept(
        "Learning rate: 'none' is constant, 'cosine' falls to 0, 'step' to a "
        "tenth after each third of the epochs.",
        "none",
        str,
        metavar="NAME",
        choices=SCHEDULES,
    )
    warmup_epochs: Values = swept(
        "Epochs in which the learning rate grows from 0.",
        0.0,
        float,
        names=("--warmup",),
    )
    label_smoothing: Values = swept(
        "Label smoothing of the training loss, from 0 to 1.", 0.0, float
    )
    amp: str | None = option(
        "Mixed precision: 'bf16' computes in bfloat16 where torch's autocast "
        "does, frozen layers included unless --precision says otherwise.",
        panel=TRAINING,
        autocompletion=one_of("bf16"),
        metavar="bf16",
    )
    early_stop: int | None = option(
        "Stop after so many epochs without a better top-1 on --val.",
        None,
        TRAINING,
        min=1,
    )
    batch_size: int = option("Samples per batch.", 32, TRAINING, min=1)
    seed: int = option(
        "Seed for weight initialisation, sample order and --augment.",
        0,
        TRAINING,
        min=0,
    )
    virtual_nodes: int | None = option(
        "Virtual nodes that share each batch: the model has the same bits on "
        "any number of workers up to this one. Default: 1, or 8 under "
        "torchrun and with --rendezvous.",
        None,
        TRAINING,
        min=1,
    )
    rendezvous: str | None = option(
        "Address of 'hapi rendezvous': workers that name it train together, "
        "and may come and go. Default: $HAPI_RENDEZVOUS.",
        panel=TRAINING,
        metavar="HOST:PORT",
    )
    partial_backward: int | None = option(
        "Let each virtual node train only the last layers, in turn, of this "
        "many segments: fewer seconds a step, and more steps. It divides "
        "--virtual-nodes, whose default is 8 then.",
        None,
        TRAINING,
        min=2,
    )
    device_queue: Path | None = option(
        "Socket of 'hapi device-queue': take turns with the other jobs of "
        "the device.",
        panel=TRAINING,
        metavar="SOCKET",
    )
    resume: Path | None = option(
        "Checkpoint file, or folder of the last two: resume from it, sample "
        "by sample, if it exists. It is written after each epoch, every 30 "
        "seconds or --save-steps, and on Ctrl-C. Only one run may use it at a "
        "time; a finished run continues with a larger --epochs.",
        panel=TRAINING,
        metavar="FILE.pt|FOLDER",
    )
    remote: str | None = option(
        "Upload the checkpoints there, behind the training, and resume from "
        "there if --resume has no newer one; also on other machines.",
        panel=TRAINING,
        metavar="swift://CONTAINER/PREFIX",
    )
    save_steps: int | None = option(
        "Steps between two checkpoints. Default: 30 seconds.",
        None,
        TRAINING,
        min=1,
    )
    store_cache: str = option(
        "Features cached in Swift for later epochs and runs: 'off', 'read', "
        "or 'readwrite', which stores them in your account.",
        "off",
        PUSH_DOWN,
        autocompletion=one_of(*CACHE_MODES),
    )
    cache_dir: Path | None = option(
        "Directory of this host in which features are cached for later runs, "
        "and for all ranks. Without it they are cached in memory, for later "
        "epochs.",
        panel=PUSH_DOWN,
        file_okay=False,
    )
    retry_seconds: float = option(
        "Longest wait for a Swift that does not answer, as while its proxy "
        "restarts.",
        300.0,
        PUSH_DOWN,
        min=0,
    )
    save: Path | None = option(
        "Write the trained model's state dict to this file, for its library "
        "or --checkpoint; of a sweep, that of the best run.",
        panel=OUTPUT,
        dir_okay=False,
    )
    save_best: Path | None = option(
        "Write the state dict of the best epoch by --val's top-1, or else "
        "the training accuracy, to this file, whenever there is a better one.",
        panel=OUTPUT,
        dir_okay=False,
    )
    report: Path | None = option(
        "Write time and traffic of each epoch to this file, also if the run "
        "is interrupted: figures and tables (.html), or JSON for 'hapi "
        "report'.",
        panel=OUTPUT,
        metavar="PATH.html|PATH.json",
        callback=checked_path,
    )
    augment_period_epochs: int | None = option(
        "Repeat the same --augment crops and flips after this many epochs, "
        "so that their features can be cached. Default: never.",
        panel=EXPERT,
        min=1,
    )

    @property
    def data_splits(self) -> dict[str, str]:
        """Locations by split."""
        val = {} if self.val is None else {"val": self.val}
        return {"train": self.data} | val

    @property
    def is_sweep(self) -> bool:
        """True if an option has several values."""
        return any(len(getattr(self, field)) > 1 for field in SWEPT.values())

    def recipes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields each combination: a name of what varies, and the values."""
        axes = {name: getattr(self, field) for name, field in SWEPT.items()}
        varied = [name for name, values in axes.items() if len(values) > 1]
        for values in itertools.product(*axes.values()):
            chosen = dict(zip(axes, values, strict=True))
            name = ",".join(f"{axis}={chosen[axis]}" for axis in varied)
            yield name, {SWEPT[axis]: chosen[axis] for axis in axes}
