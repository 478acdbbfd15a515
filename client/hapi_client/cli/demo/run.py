"""Trains the same tail twice: with raw reads, and with push-down."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hapi_client.caching.cache_config import CacheConfig
from hapi_client.cli.demo.data import photograph_folder, write_shards
from hapi_client.data.index import load_index
from hapi_client.data.upload import upload
from hapi_client.job.options import JobConfig, PlanConfig
from hapi_client.job.transfer_job import TransferJob
from hapi_client.loading.read_config import ReadConfig
from hapi_client.model.frozen_region import FREEZE, STREAM, FrozenRegion
from hapi_client.model.torchvision_registry import build_model
from hapi_client.progress import Reporter
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import LabelError
from hapi_training.loop import History, train_tail

LOSS_TOLERANCE = 1e-4
"""Largest relative difference between equal loss curves, for tails without
BatchNorm."""

BATCH_NORM_FACTOR = 10.0
"""A tail with BatchNorm amplifies rounding: its tolerance is this multiple of
the difference of two streaming runs with different forward batches."""

OTHER_FORWARD_SAMPLES = 5
"""Samples per forward pass of the second streaming run."""

CACHE = CacheConfig(memory_bytes=0)
"""The demo compares routes: features of one run must not serve the other."""

LOCATION = Location("hapi-demo", "train")
BATCH_SIZE = 32
LEARNING_RATE = 0.002


@dataclass(frozen=True)
class DemoPlan:
    """Settings of the demo.

    Attributes:
        model: name in ``torchvision.models``.
        freeze: last frozen module.
        epochs: number of epochs of each run.
        cut: cut of the push-down run, as for a job.
        encoding: encoding of the features of the push-down run.
        seed: seed of weights and sample order, the same in both runs.
        data: tar files of the user; empty for the photographs.
    """

    model: str = "resnet18"
    freeze: str = "layer4"
    epochs: int = 3
    cut: int | str = FREEZE
    encoding: str = "float32"
    seed: int = 0
    data: Sequence[Path] = ()


@dataclass(frozen=True)
class RunResult:
    """One of the two runs.

    Attributes:
        name: ``streaming`` or ``push-down``.
        bytes: over the wire, without the package.
        package_bytes: size of the model package, which is sent once.
        seconds: training time from the first request.
        losses: losses of each batch.
        accuracy: accuracy of the last epoch, on the training data.
        cut: number or name of the cut.
        fallbacks: spans that were read raw because push-down failed.
        has_batch_norm: True if the tail has BatchNorm.
        num_epochs: number of epochs.
    """

    name: str
    bytes: int
    package_bytes: int
    seconds: float
    losses: tuple[float, ...]
    accuracy: float
    cut: int | str
    fallbacks: int
    has_batch_norm: bool = False
    num_epochs: int = 1


@dataclass(frozen=True)
class DemoResult:
    """Both runs.

    Attributes:
        streaming: cut 0.
        pushdown: the requested cut.
        other_streaming: cut 0 with another number of samples per forward
            pass; only for a tail with BatchNorm.
    """

    streaming: RunResult
    pushdown: RunResult
    other_streaming: RunResult | None = None

    @property
    def max_loss_difference(self) -> float:
        return largest_difference(self.streaming.losses, self.pushdown.losses)

    @property
    def tolerance(self) -> float:
        """Largest relative difference between equal loss curves."""
        if self.other_streaming is None:
            return LOSS_TOLERANCE
        rounding = largest_difference(
            self.streaming.losses, self.other_streaming.losses
        )
        return max(LOSS_TOLERANCE, BATCH_NORM_FACTOR * rounding)

    @property
    def curves_agree(self) -> bool:
        return self.max_loss_difference <= self.tolerance


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


def check_plan(plan: DemoPlan) -> None:
    """Splits the model once, before anything is started.

    Raises:
        HapiError: naming a wrong model, freeze, cut or encoding, or the
            missing package with the photographs.
    """
    PlanConfig(encoding=plan.encoding)
    if not plan.data:
        photograph_folder()
    model, _ = build_model(plan.model, num_classes=2, seed=plan.seed)
    region = FrozenRegion(model, plan.freeze, None, torch.device("cpu"))
    region.cut_number(plan.cut)


def run_demo(
    connection: Connection, plan: DemoPlan, reporter: Reporter
) -> DemoResult:
    """Stores the data set and trains the same tail twice.

    Raises:
        HapiError: if the upload or a run fails.
    """
    with tempfile.TemporaryDirectory(prefix="hapi-demo-") as folder:
        shards = list(plan.data)
        if not shards:
            reporter.note("cropping photographs of scikit-image to JPEGs")
            shards = write_shards(Path(folder))
        upload(connection, LOCATION, shards, reporter)
    run = _Runner(connection, plan, reporter)
    streaming = run("streaming", STREAM)
    other = None
    if streaming.has_batch_norm:
        options = ReadConfig(forward_samples=OTHER_FORWARD_SAMPLES)
        other = run("streaming again", STREAM, options)
    return DemoResult(streaming, run("push-down", plan.cut), other)


class _Runner:
    """Trains the tail once per call, each time from the same weights."""

    def __init__(
        self, connection: Connection, plan: DemoPlan, reporter: Reporter
    ) -> None:
        self._connection = connection
        self._plan = plan
        self._reporter = reporter
        self._num_classes = _num_classes(connection)

    def __call__(
        self,
        name: str,
        cut: int | str,
        read: ReadConfig | None = None,
    ) -> RunResult:
        plan, note = self._plan, self._reporter.note
        model, _ = build_model(
            plan.model, num_classes=self._num_classes, seed=plan.seed
        )
        note(f"{name}: splitting {plan.model} at {plan.freeze}")
        with TransferJob(
            model,
            freeze=plan.freeze,
            data=str(LOCATION),
            batch_size=BATCH_SIZE,
            seed=plan.seed,
            config=JobConfig(
                cut=cut,
                plan=PlanConfig(encoding=plan.encoding),
                read=read or ReadConfig(),
                cache=CACHE,
                connection=self._connection,
            ),
        ) as job:
            history = train_tail(
                job,
                epochs=plan.epochs,
                learning_rate=LEARNING_RATE,
                on_epoch=lambda number, result: note(
                    f"{name}: epoch {number}, loss "
                    f"{result.mean_loss:.4f}, {result.seconds:.1f} s"
                ),
            )
            return _result(name, job, history)


def _num_classes(connection: Connection) -> int:
    labels = [
        row.label
        for shard in load_index(connection, LOCATION).shards
        for row in shard.rows
    ]
    largest = max((each for each in labels if each is not None), default=-1)
    if largest < 0:
        raise LabelError(
            "missing_label",
            "the demo's data has no labels; shards need .cls members",
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
        has_batch_norm=any(
            isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
            for module in job.tail.modules()
        ),
        num_epochs=len(history.epochs),
    )
