"""Amazon's S3 connector for PyTorch, through Swift's S3 API."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from benchmarks.opponents.opponent import Batches, Opponent
from benchmarks.opponents.tars import samples
from benchmarks.opponents.training import (
    Decoder,
    Options,
    Place,
    Sample,
    collate,
)
from s3torchconnector import (
    S3ClientConfig,
    S3IterableDataset,
    S3MapDataset,
    S3Reader,
    S3ReaderConstructor,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset

REGION = "us-east-1"
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
READERS = {
    "sequential": S3ReaderConstructor.sequential,
    "ranged": S3ReaderConstructor.range_based,
}


def connection(place: Place, reader: str) -> dict[str, Any]:
    """Arguments of a dataset; credentials go to the environment."""
    os.environ.update(zip(SECRETS, (place.user, place.key), strict=True))
    return {
        "region": REGION,
        "endpoint": place.endpoint,
        "s3client_config": S3ClientConfig(force_path_style=True),
        "reader_constructor": READERS[reader](),
    }


class TarSamples(IterableDataset[Sample]):
    """Images and labels of the tars that a worker has its share of.

    Args:
        tars: yields a reader of each.
        decode: of an image.
        ahead: whether the next tar is asked for while one is read.
    """

    def __init__(
        self, tars: S3IterableDataset, decode: Decoder, *, ahead: bool
    ) -> None:
        self._tars = tars
        self._decode = decode
        self._ahead = ahead

    def __iter__(self) -> Iterator[Sample]:
        readers = _ahead(self._tars) if self._ahead else self._tars
        for reader in readers:
            for _, jpeg, label in samples(reader):
                yield self._decode(jpeg), label


def _ahead(readers: Any) -> Iterator[S3Reader]:
    before = None
    for reader in chain(readers, [None]):
        if reader is not None:
            reader.prefetch()
        if before is not None:
            yield before
        before = reader


class S3Tars(Opponent):
    """The tar shards, streamed sample by sample."""

    PACKAGES: ClassVar = ("s3torchconnector", "s3torchconnectorclient")
    GRID: ClassVar[list[Options]] = [
        {"num_workers": num_workers, "ahead": ahead, "channels_last": layout}
        for num_workers, ahead in ((0, True), (1, True), (1, False), (2, True))
        for layout in (False, True)
    ]

    def batches(self, epoch: int) -> Batches:
        shards = list(self.place.shards)
        random.Random(epoch).shuffle(shards)
        tars = S3IterableDataset.from_objects(
            [f"s3://{self.place.container}/{shard}" for shard in shards],
            enable_sharding=True,
            **connection(self.place, "sequential"),
        )
        yield from DataLoader(
            TarSamples(tars, self.decode, ahead=self.options["ahead"]),
            batch_size=self.task.batch_size,
            num_workers=self.options["num_workers"],
            collate_fn=collate,
        )


class Images(Dataset[Sample]):
    """Single images, by number.

    Args:
        objects: yields a reader of each.
        labels: of each.
        decode: of an image.
        together: whether all of a batch are asked for at once.
    """

    def __init__(
        self,
        objects: S3MapDataset,
        labels: Sequence[int],
        decode: Decoder,
        *,
        together: bool,
    ) -> None:
        self._objects = objects
        self._labels = labels
        self._decode = decode
        self._together = together

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, numbers: Sequence[int]) -> list[Sample]:
        """A batch; DataLoader calls this."""
        readers = [self._objects[number] for number in numbers]
        if self._together:
            for reader in readers:
                reader.prefetch()
        return [
            (self._decode(reader.read()), self._labels[number])
            for reader, number in zip(readers, numbers, strict=True)
        ]


class S3Images(Opponent):
    """Single photographs, in an order that is random anew in each epoch."""

    PACKAGES: ClassVar = ("s3torchconnector", "s3torchconnectorclient")
    GRID: ClassVar[list[Options]] = [
        *(
            {"num_workers": count, "together": True, "channels_last": layout}
            for count in (0, 1, 2)
            for layout in (False, True)
        ),
        {"num_workers": 2, "together": False, "channels_last": True},
        {"num_workers": 2, "together": True, "channels_last": True}
        | {"reader": "ranged"},
    ]

    def batches(self, epoch: int) -> Batches:
        labels: Mapping[str, int] = self.place.labels
        keys = sorted(labels)
        objects = S3MapDataset.from_objects(
            [f"s3://{self.place.images}/{key}.jpg" for key in keys],
            **connection(self.place, self.options.get("reader", "sequential")),
        )
        yield from DataLoader(
            Images(
                objects,
                [labels[key] for key in keys],
                self.decode,
                together=self.options["together"],
            ),
            batch_size=self.task.batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(epoch),
            num_workers=self.options["num_workers"],
            collate_fn=collate,
        )
