"""One training run twice: streamed, and pushed down."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hapi_protocol.errors import LabelError

from hapi_client.connection import Connection
from hapi_client.demo_data import write_shards
from hapi_client.frozen import STREAM
from hapi_client.job import TransferJob
from hapi_client.location import Location
from hapi_client.progress import Reporter
from hapi_client.training import History, build_model, train_tail
from hapi_client.upload import upload

LOSS_TOLERANCE = 1e-4
"""Largest relative difference of two loss curves that counts as equal, for
tails without BatchNorm."""

LOCATION = Location("hapi-demo", "train")
BATCH_SIZE = 32
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class DemoPlan:
    """What the demo trains.

    Attributes:
        model: name in ``torchvision.models``.
        freeze: last frozen module.
        epochs: of each run.
        cut: of the push-down run; None for the whole region.
        encoding: of its features.
        seed: of weights and order, the same in both runs.
        data: tar files of the user; none for the photographs.
    """

    model: str = "resnet18"
    freeze: str = "layer4"
    epochs: int = 3
    cut: int | None = None
    encoding: str = "float32"
    seed: int = 0
    data: Sequence[Path] = ()


@dataclass(frozen=True)
class RunResult:
    """One of the two runs.

    Attributes:
        name: ``streaming`` or ``push-down``.
        bytes: over the wire, without the package.
        package_bytes: sent once for the model package.
        seconds: of the training, from the first request on.
        losses: of each batch.
        accuracy: of the last epoch, on the training data.
        cut: that was used.
        fallbacks: spans streamed though they should have been pushed.
    """

    name: str
    bytes: int
    package_bytes: int
    seconds: float
    losses: tuple[float, ...]
    accuracy: float
    cut: int
    fallbacks: int


@dataclass(frozen=True)
class DemoResult:
    """Both runs."""

    streaming: RunResult
    pushdown: RunResult

    @property
    def max_loss_difference(self) -> float:
        return largest_difference(self.streaming.losses, self.pushdown.losses)

    @property
    def curves_agree(self) -> bool:
        return self.max_loss_difference <= LOSS_TOLERANCE


def largest_difference(
    first: Sequence[float], second: Sequence[float]
) -> float:
    """Largest ``|a - b| / max(|a|, |b|)``; infinite for unequal lengths."""
    if len(first) != len(second):
        return math.inf
    pairs = zip(first, second, strict=True)
    differences = [abs(a - b) / (max(abs(a), abs(b)) or 1.0) for a, b in pairs]
    if any(map(math.isnan, differences)):
        return math.inf
    return max(differences, default=0.0)


def run_demo(
    connection: Connection, plan: DemoPlan, reporter: Reporter
) -> DemoResult:
    """Stores the data set and trains the same tail twice.

    Raises:
        HapiError: of the upload or of a run.
    """
    with tempfile.TemporaryDirectory(prefix="hapi-demo-") as folder:
        shards = list(plan.data)
        if not shards:
            reporter.note("cutting photographs of scikit-image into JPEGs")
            shards = write_shards(Path(folder))
        upload(connection, LOCATION, shards, reporter)
    run = _runner(connection, plan, reporter)
    return DemoResult(
        streaming=run("streaming", STREAM), pushdown=run("push-down", plan.cut)
    )


def _runner(
    connection: Connection, plan: DemoPlan, reporter: Reporter
) -> Callable[[str, int | str | None], RunResult]:
    def run(name: str, cut: int | str | None) -> RunResult:
        # The same seed gives both runs the same weights and head.
        model, _ = build_model(
            plan.model, num_classes=_num_classes(connection), seed=plan.seed
        )
        reporter.note(f"{name}: splitting {plan.model} at {plan.freeze}")
        with TransferJob(
            model,
            freeze=plan.freeze,
            data=str(LOCATION),
            batch_size=BATCH_SIZE,
            cut=cut,
            encoding=plan.encoding,
            seed=plan.seed,
            connection=connection,
        ) as job:
            history = train_tail(
                job,
                epochs=plan.epochs,
                learning_rate=LEARNING_RATE,
                on_epoch=lambda number, result: reporter.note(
                    f"{name}: epoch {number}, loss {result.mean_loss:.4f}, "
                    f"{result.seconds:.1f} s"
                ),
            )
            return _result(name, job, history)

    return run


def _num_classes(connection: Connection) -> int:
    from hapi_client.index import load_index

    labels = [
        row.label
        for shard in load_index(connection, LOCATION).shards
        for row in shard.rows
    ]
    largest = max((each for each in labels if each is not None), default=-1)
    if largest < 0:
        raise LabelError(
            "missing_label", "the demo's shards need .cls members"
        )
    return max(2, largest + 1)


def _result(name: str, job: TransferJob, history: History) -> RunResult:
    stats = job.stats
    return RunResult(
        name=name,
        bytes=stats.bytes,
        package_bytes=stats.package_bytes,
        seconds=history.seconds,
        losses=tuple(history.losses),
        accuracy=history.epochs[-1].accuracy,
        cut=job.cut,
        fallbacks=stats.fallbacks,
    )
