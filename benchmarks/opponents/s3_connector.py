"""Amazon's S3 connector for PyTorch, through Swift's S3 API.

Its reader returns an object of less than 8 MiB when all of it has arrived, and
``prefetch`` waits for that too.  So workers read while the loop trains; a
ranged reader with a small buffer has the first sample of a tar early.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from s3torchconnector import (
    S3ClientConfig,
    S3IterableDataset,
    S3MapDataset,
    S3Reader,
    S3ReaderConstructor,
)
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.opponents.opponent import Batches, Opponent
from benchmarks.opponents.tars import samples
from benchmarks.opponents.training import (
    Decoder,
    Options,
    Place,
    Sample,
    collate,
)

REGION = "us-east-1"
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
RANGE_BYTES = 1024 * 1024
READERS = {
    "sequential": S3ReaderConstructor.sequential,
    "ranged": partial(S3ReaderConstructor.range_based, RANGE_BYTES),
}


def connection(place: Place, reader: str) -> dict[str, Any]:
    """Arguments of a dataset; sets the credentials' variables."""
    os.environ.update(zip(SECRETS, (place.user, place.key), strict=True))
    return {
        "region": REGION,
        "endpoint": place.endpoint,
        "s3client_config": S3ClientConfig(force_path_style=True),
        "reader_constructor": READERS[reader](),
    }


class TarSamples(IterableDataset[Sample]):
    """Images and labels of a worker's share of the tars.

    Args:
        tars: yields a reader of each.
        decode: of an image.
    """

    def __init__(self, tars: S3IterableDataset, decode: Decoder) -> None:
        self._tars = tars
        self._decode = decode

    def __iter__(self) -> Iterator[Sample]:
        for reader in self._tars:
            for _, jpeg, label in samples(reader):
                yield self._decode(jpeg), label


class S3Tars(Opponent):
    """Reads the tar shards, sample by sample."""

    PACKAGES: ClassVar = ("s3torchconnector", "s3torchconnectorclient")
    GRID: ClassVar[list[Options]] = [
        {"num_workers": 1, "reader": "sequential", "channels_last": True},
        {"num_workers": 2, "reader": "sequential", "channels_last": True},
        {"num_workers": 1, "reader": "ranged", "channels_last": True},
        {"num_workers": 2, "reader": "ranged", "channels_last": True},
        {"num_workers": 0, "reader": "sequential", "channels_last": True},
        {"num_workers": 1, "reader": "sequential", "channels_last": False},
    ]

    def batches(self, epoch: int) -> Batches:
        shards = list(self.place.shards)
        random.Random(epoch).shuffle(shards)
        tars = S3IterableDataset.from_objects(
            [f"s3://{self.place.container}/{shard}" for shard in shards],
            enable_sharding=True,
            **connection(self.place, self.options["reader"]),
        )
        yield from DataLoader(
            TarSamples(tars, self.decode),
            batch_size=self.task.batch_size,
            num_workers=self.options["num_workers"],
            collate_fn=collate,
        )


class Labelled:
    """Decodes the object of a reader and looks up its label.

    Args:
        decode: of an image.
        labels: of each key.
    """

    def __init__(self, decode: Decoder, labels: Mapping[str, int]) -> None:
        self._decode = decode
        self._labels = labels

    def __call__(self, reader: S3Reader) -> Sample:
        label = self._labels[reader.key.removesuffix(".jpg")]
        return self._decode(reader.read()), label


class S3Images(Opponent):
    """Reads single photographs, in a new random order in each epoch."""

    PACKAGES: ClassVar = ("s3torchconnector", "s3torchconnectorclient")
    GRID: ClassVar[list[Options]] = [
        {"num_workers": 2, "reader": "sequential", "channels_last": True},
        {"num_workers": 1, "reader": "sequential", "channels_last": True},
        {"num_workers": 4, "reader": "sequential", "channels_last": True},
        {"num_workers": 2, "reader": "ranged", "channels_last": True},
        {"num_workers": 0, "reader": "sequential", "channels_last": True},
        {"num_workers": 2, "reader": "sequential", "channels_last": False},
    ]

    def batches(self, epoch: int) -> Batches:
        labels: Mapping[str, int] = self.place.labels
        images = S3MapDataset.from_objects(
            [f"s3://{self.place.images}/{key}.jpg" for key in sorted(labels)],
            transform=Labelled(self.decode, labels),
            **connection(self.place, self.options["reader"]),
        )
        yield from DataLoader(
            images,
            batch_size=self.task.batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(epoch),
            num_workers=self.options["num_workers"],
            collate_fn=collate,
        )
