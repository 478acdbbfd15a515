"""A training job that compares each epoch with features computed before.

``python -m benchmarks.testbed.checked_job``: answers ``prepare`` and
``epoch``.  Samples are numbered by the digits that their keys begin with.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torchvision.models.resnet import BasicBlock, ResNet

from benchmarks.testbed.remote import serve
from hapi_client import (
    CacheConfig,
    Connection,
    Credentials,
    HapiError,
    ImageTransform,
    JobConfig,
    ReadConfig,
    TransferJob,
)
from hapi_client.data.indexing import update_index
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.shards import iter_samples
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.freezing.split_model import split
from hapi_splitter.inputs.image_decode import decode_image

TRANSFORM = ImageTransform(resize_size=128, crop_size=112)
RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""Largest differences of features with and without push-down."""
BATCH_SIZE = 16
STEP_SECONDS = 0.2
"""Duration of a training step."""
COUNTERS = ("samples", "retries", "fallbacks", "bytes")


def number_of(key: str) -> int:
    return int(key.rpartition("/")[2].partition("-")[0])


class CheckedJob:
    """Answers the questions of the run."""

    def __init__(self) -> None:
        self._expected: dict[int, torch.Tensor] = {}
        self._job: TransferJob | None = None

    def prepare(
        self,
        login: list[str],
        data: list[str],
        tars: list[str],
        freeze: str,
        cut: str | int,
        seed: int,
    ) -> int:
        """Indexes the data and makes the job; returns the samples."""
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=1000).eval()
        frozen = split(model, freeze, transform=TRANSFORM).frozen
        for tar in tars:
            self._expected |= _local_features(frozen, Path(tar))
        connection = Connection(Credentials.v1(*login))
        for location in data:
            update_index(connection, parse_location(location))
        self._job = TransferJob(
            model,
            freeze=freeze,
            data=data,
            batch_size=BATCH_SIZE,
            transform=TRANSFORM,
            labels=number_of,
            seed=seed,
            config=JobConfig(
                cut=cut,
                read=ReadConfig(num_threads=2),
                cache=CacheConfig(memory_bytes=0, split_directory=""),
                connection=connection,
            ),
        )
        return len(self._expected)

    def epoch(self, number: int) -> dict[str, Any]:
        """Reads one epoch; counts what is not as it must be."""
        assert self._job is not None
        before = self._job.stats
        seen: dict[int, int] = dict.fromkeys(self._expected, 0)
        wrong, error = 0, ""
        try:
            for features, labels in self._job.pipeline.loader(number):
                for feature, label in zip(
                    features, labels.tolist(), strict=True
                ):
                    seen[label] = seen.get(label, 0) + 1
                    wrong += not self._is_equal(label, feature)
                time.sleep(STEP_SECONDS)
        except HapiError as failure:
            error = f"{type(failure).__name__} {failure.code}: {failure}"
        stats = self._job.stats - before
        counts = list(seen.values())
        return {
            "error": error,
            "wrong": wrong,
            "missing": 0 if error else counts.count(0),
            "double": sum(count > 1 for count in counts),
            **{name: getattr(stats, name) for name in COUNTERS},
            # The rest were read raw.
            "pushed": sum(
                count for cut, count in stats.samples_by_cut.items() if cut
            ),
        }

    def _is_equal(self, label: int, feature: torch.Tensor) -> bool:
        expected = self._expected.get(label)
        return expected is not None and torch.allclose(
            feature, expected, rtol=RELATIVE, atol=ABSOLUTE
        )


def _local_features(frozen: FrozenGraph, tar: Path) -> dict[int, torch.Tensor]:
    prefix = frozen.prefix(frozen.num_cuts)
    digests = {}
    with tar.open("rb") as file, torch.inference_mode():
        for sample in iter_samples(file, name=tar.name):
            image = decode_image(sample.members["jpg"])
            pixels = TRANSFORM.sample(image, sample.key, None)
            digests[number_of(sample.key)] = prefix(pixels[None])[0]
    return digests


def main() -> None:
    job = CheckedJob()
    serve({"prepare": job.prepare, "epoch": job.epoch})


if __name__ == "__main__":
    main()
