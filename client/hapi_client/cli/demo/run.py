"""Trains the same tail twice: with raw reads, and with push-down."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn.modules.batchnorm import _BatchNorm

from hapi_client.caching.cache_config import CacheConfig
from hapi_client.cli.demo.command import DemoOptions
from hapi_client.cli.options import Values, parse_cut
from hapi_client.cli.train import load_data
from hapi_client.cli.train_options import TrainOptions
from hapi_client.cli.train_result import TrainResult
from hapi_client.cli.train_run import job_config, train
from hapi_client.data.splits import num_classes_of
from hapi_client.data.upload import PackOptions, upload
from hapi_client.job.options import PlanConfig
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.model.split_arguments import STREAM, check_cut
from hapi_client.model.torchvision_registry import build_model
from hapi_client.progress import Reporter
from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import ClientError

LOSS_TOLERANCE = 1e-4
"""Largest relative difference between equal loss curves, for tails without
BatchNorm."""

BATCH_NORM_FACTOR = 10.0
"""A tail with BatchNorm amplifies rounding: its tolerance is this multiple of
the difference of two streaming runs with different forward batches."""

OTHER_FORWARD_SAMPLES = 5
"""Samples per forward pass of the second streaming run."""

LOCATION = Location("hapi-demo", "train")
LEARNING_RATE = 0.002

PHOTOGRAPHS = (
    "astronaut.png",
    "brick.png",
    "chelsea.png",
    "coffee.png",
    "grass.png",
    "gravel.png",
    "motorcycle_left.png",
    "rocket.jpg",
)
"""Files in scikit-image's wheel; each is a class."""
CROPS = 40
"""Crops of each photograph."""
CROP_PIXELS = 256
JPEG_QUALITY = 90
SHARD_SAMPLES = 80


@dataclass(frozen=True)
class DemoResult:
    """Both runs.

    Attributes:
        streaming: cut 0.
        pushdown: the requested cut.
        tolerance: largest relative difference between equal loss curves.
    """

    streaming: TrainResult
    pushdown: TrainResult
    tolerance: float = LOSS_TOLERANCE

    @property
    def max_loss_difference(self) -> float:
        return largest_difference(
            self.streaming.history.losses, self.pushdown.history.losses
        )

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


def check_options(options: DemoOptions) -> None:
    """Splits the model once, before anything is started.

    Raises:
        HapiError: naming a wrong model, freeze, cut or encoding, or the
            missing package with the photographs.
    """
    PlanConfig(encoding=options.encoding)
    if not options.tars:
        _photograph_folder()
    model, _ = build_model(options.model, num_classes=2, seed=options.seed)
    region = FrozenRegion(model, options.freeze, None, torch.device("cpu"))
    check_cut(parse_cut(options.cut_name), region.num_cuts)


def run_demo(options: DemoOptions, reporter: Reporter) -> DemoResult:
    """Starts Swift in a temporary directory, and trains twice.

    Raises:
        ClientError: ``bad_configuration`` if Swift cannot be started.
        HapiError: if the upload or a run fails.
    """
    try:
        from hapi_cluster import Cluster, ClusterError
    except ImportError as error:
        raise ClientError(
            "bad_configuration",
            "the demo runs Swift on this machine; install it by "
            "pip install '.[demo]' in a checkout of the project",
        ) from error
    try:
        with Cluster.temporary() as cluster:
            login = Credentials.v1(cluster.auth_url, cluster.user, cluster.key)
            with Connection(login) as connection:
                return _train_twice(connection, options, reporter)
    except ClusterError as error:
        raise ClientError("bad_configuration", str(error)) from error


def _train_twice(
    connection: Connection, options: DemoOptions, reporter: Reporter
) -> DemoResult:
    with tempfile.TemporaryDirectory(prefix="hapi-demo-") as folder:
        sources = options.tars
        if not sources:
            reporter.note("cropping photographs of scikit-image to JPEGs")
            _write_photographs(Path(folder))
            sources = (Path(folder),)
        pack = PackOptions(shard_samples=SHARD_SAMPLES)
        upload(connection, LOCATION, sources, reporter, pack)
    train_options = TrainOptions(
        data=str(LOCATION),
        model=options.model,
        freeze=options.freeze,
        epochs=options.epochs,
        learning_rate=Values([LEARNING_RATE]),
        encoding=options.encoding,
        seed=options.seed,
    )

    data = load_data(train_options, connection)

    def run(
        name: str, cut: str, forward_samples: int | None = None
    ) -> TrainResult:
        reporter.note(f"{name}:")
        run_options = replace(train_options, cut=cut)
        config = job_config(run_options, connection, num_classes_of(data))
        config = replace(
            config,
            read=replace(config.read, forward_samples=forward_samples),
            # Features of one run must not serve the other.
            cache=CacheConfig(memory_bytes=0),
        )
        return train(run_options, connection, reporter, data, config)

    streaming = run("streaming", STREAM)
    tolerance = LOSS_TOLERANCE
    if any(isinstance(m, _BatchNorm) for m in streaming.job.tail.modules()):
        other = run("streaming again", STREAM, OTHER_FORWARD_SAMPLES)
        rounding = DemoResult(streaming, other).max_loss_difference
        tolerance = max(tolerance, BATCH_NORM_FACTOR * rounding)
    pushdown = run("push-down", options.cut_name)
    return DemoResult(streaming, pushdown, tolerance)


def _photograph_folder() -> Path:
    """Returns the folder with scikit-image's photographs.

    Raises:
        ClientError: ``bad_configuration`` if it is not installed.
    """
    try:
        import skimage
    except ImportError as error:
        raise ClientError(
            "bad_configuration",
            "the demo uses the photographs of scikit-image; run "
            "pip install '.[demo]' in a checkout of the project, or give tar "
            "files with --data",
        ) from error
    return Path(skimage.__file__).parent / "data"


def _write_photographs(folder: Path) -> None:
    """Writes random crops of the photographs into class folders."""
    random = np.random.default_rng(0)
    for path in (_photograph_folder() / name for name in PHOTOGRAPHS):
        (folder / path.stem).mkdir()
        with Image.open(path) as image:
            photo = image.convert("RGB")
        for number in range(CROPS):
            left = int(random.integers(photo.width - CROP_PIXELS + 1))
            top = int(random.integers(photo.height - CROP_PIXELS + 1))
            box = (left, top, left + CROP_PIXELS, top + CROP_PIXELS)
            target = folder / path.stem / f"{number:05d}.jpg"
            photo.crop(box).save(target, quality=JPEG_QUALITY)
