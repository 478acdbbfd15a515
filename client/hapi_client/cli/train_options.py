"""Options of ``hapi train``."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from hapi_client.cli.context import OUTPUT, checked_path
from hapi_client.cli.options import (
    DATA,
    EXPERT,
    MODEL,
    PUSH_DOWN,
    TRAINING,
    JobOptions,
    LabelsOption,
    TorchvisionModelOption,
    one_of,
    option,
)
from hapi_protocol.headers import CACHE_MODES


@dataclass(frozen=True, kw_only=True)
class TrainOptions(JobOptions):
    """Options of ``hapi train``."""

    model: TorchvisionModelOption = "resnet18"
    classes: int = option(
        "Number of classes, the outputs of the new head.",
        MISSING,
        MODEL,
        min=2,
    )
    augment: bool = option(
        "Crop and flip training images at random; the result does not depend "
        "on where they are computed.",
        False,
        DATA,
    )
    labels: LabelsOption = None
    epochs: int = option("Number of epochs.", 1, TRAINING, min=1)
    learning_rate: float = option(
        "Learning rate of SGD.", 0.01, TRAINING, names=("--lr",), min=0.0
    )
    batch_size: int = option("Samples per batch.", 32, TRAINING, min=1)
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
        "Write the trained model's state dict to this file, for torchvision "
        "or --checkpoint.",
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
    seed: int = option(
        "Seed for weight initialisation, sample order and --augment.",
        0,
        EXPERT,
        min=0,
    )
