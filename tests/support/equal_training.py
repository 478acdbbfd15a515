"""One training run, in all the ways that must come to the same."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hapi_client import Connection, ReadConfig, TransferJob
from hapi_client.sampling.partition import EpochPartition
from hapi_client.sampling.sampler import SamplerConfig, shuffled_order
from hapi_protocol.data_index import suited_span_samples
from hapi_splitter.inputs.image_decode import decode_image
from jobs import small_job
from networks import small_network, small_transform

DATA = {"train": "swift://equal/train", "val": "swift://equal/val"}
BATCH = 16
EPOCHS = 3
RATE = 0.05
SEED = 4
OPTIONS = ReadConfig(num_threads=2, buffer_spans=4)

Samples = list[tuple[torch.Tensor, int]]
Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


def job_of(
    connection: Connection,
    cut: Any,
    network: nn.Module | None = None,
    **options: Any,
) -> TransferJob:
    return small_job(
        options.pop("data", DATA),
        network=network,
        batch_size=BATCH,
        seed=SEED,
        connection=connection,
        cut=cut,
        **{"read": OPTIONS, "partition": EpochPartition(4, 1), **options},
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD of the parameters that are not frozen."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=RATE, momentum=0.9)


def losses_of(
    tail: nn.Module, batches_of: Callable[[int], Batches]
) -> list[float]:
    """Trains for EPOCHS epochs, each with batches of its own."""
    optimizer = optimizer_of(tail)
    return [
        loss
        for epoch in range(EPOCHS)
        for loss, _ in steps_of(tail, optimizer, batches_of(epoch))
    ]


def steps_of(
    tail: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches
) -> Iterator[tuple[float, int]]:
    """Loss and number of samples of each step."""
    tail.train()
    for features, labels in batches:
        loss = nn.functional.cross_entropy(tail(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), len(labels)


def num_correct(model: nn.Module, batches: Batches) -> int:
    model.eval()
    with torch.no_grad():
        return sum(
            int((model(images).argmax(1) == labels).sum())
            for images, labels in batches
        )


def local_spans(paths: Iterable[Path]) -> list[Samples]:
    """Transformed images and labels of shards, read without ours."""
    shards = []
    for path in paths:
        with tarfile.open(path) as archive:
            members = {
                member.name: archive.extractfile(member).read()  # type: ignore[union-attr]
                for member in archive
            }
        keys = [name[:-4] for name in members if name.endswith(".jpg")]
        transform = small_transform()
        samples = [
            (
                transform(decode_image(members[f"{key}.jpg"])),
                int(members[f"{key}.cls"]),
            )
            for key in keys
        ]
        shards.append(samples)
    return in_spans(shards)


def in_spans(shards: Sequence[Sequence[Any]]) -> list[Any]:
    """Divides the samples of shards as a data set's index does."""
    size = suited_span_samples(sum(map(len, shards)))
    return [
        samples[first : first + size]
        for samples in shards
        for first in range(0, len(samples), size)
    ]


def local_batches(
    spans: list[Samples], epoch: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """In the order of a job's epoch."""
    rules = SamplerConfig(BATCH, EpochPartition(4, 1), OPTIONS.buffer_spans)
    sizes = [len(span) for span in spans]
    order = shuffled_order(sizes, rules, seed=SEED, epoch=epoch)
    reading = order.read_plan()
    for batch in reading.batches:
        samples = [
            spans[piece.span][piece.first + row]
            for piece, row in zip(
                (reading.pieces[p] for p in batch.positions.tolist()),
                batch.rows.tolist(),
                strict=True,
            )
        ]
        images, labels = zip(*samples, strict=True)
        yield torch.stack(images), torch.tensor(labels)


class FrozenBody(nn.Module):
    """The whole network, as one fine-tunes it on local data."""

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__()
        self.network = network or small_network()
        self.network.body.requires_grad_(False)

    def train(self, mode: bool = True) -> FrozenBody:
        super().train(mode)
        self.network.body.eval()
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images)
