"""Transfer learning on CIFAR-10 with torch alone; imports nothing of HAPI.

A ResNet-18 learns five classes; the layers after its freeze point then learn
the other five.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision.io import ImageReadMode, decode_jpeg

PIXELS = 32
NETWORK = "resnet18"
OLD_CLASSES, NEW_CLASSES = range(5), range(5, 10)
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
BATCH_SAMPLES = 64
PRETRAIN_RATE = 3e-3
TAIL_RATE = 0.01
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
EVALUATION_BATCH = 250


@dataclass(frozen=True)
class Examples:
    """Inputs of a network or of its tail, and their classes from 0 on."""

    values: torch.Tensor
    labels: torch.Tensor

    def only(self, classes: range, most: int | None = None) -> Examples:
        """Examples of consecutive classes, at most ``most``."""
        first, last = classes[0], classes[-1]
        chosen = (self.labels >= first) & (self.labels <= last)
        rows = chosen.nonzero()[:most, 0]
        return Examples(self.values[rows], self.labels[rows] - first)

    def epoch(self, generator: torch.Generator) -> Iterator[Examples]:
        """Batches in random order, without an incomplete last one."""
        size = min(BATCH_SAMPLES, len(self.labels))
        order = torch.randperm(len(self.labels), generator=generator)
        for rows in order.split(size):
            if len(rows) == size:
                yield Examples(self.values[rows], self.labels[rows])


def examples_of(tars: Sequence[Path], name: str) -> Examples:
    """Normalised images ``[N, 3, 32, 32]``, and labels of ``.cls`` files.

    Args:
        tars: of CIFAR-10.
        name: ``train`` or ``test``, part of the names of the tars to read.

    Raises:
        ValueError: there is no image.
    """
    images, labels = [], []
    for path in tars:
        members = _members(path) if name in path.name else {}
        for file, data in members.items():
            key, _, extension = file.rpartition(".")
            if extension == "jpg":
                pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                images.append(decode_jpeg(pixels, ImageReadMode.RGB))
                labels.append(int(members[f"{key}.cls"]))
    if not images:
        raise ValueError(f"there are no images in cifar10-{name}-*.tar")
    values = torch.stack(images).float() / 255
    mean, std = (torch.tensor(rgb)[:, None, None] for rgb in (MEAN, STD))
    return Examples((values - mean) / std, torch.tensor(labels))


def _members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {
            member.name: file.read()
            for member in tar
            if (file := tar.extractfile(member)) is not None
        }


def pretrained(examples: Examples, epochs: int, seed: int) -> nn.Module:
    """A network trained on these examples, mirrored at random."""
    torch.manual_seed(seed)
    model: nn.Module = torchvision.models.get_model(
        NETWORK, weights=None, num_classes=len(OLD_CLASSES)
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PRETRAIN_RATE, weight_decay=WEIGHT_DECAY
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

    def mirrored(
        values: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        flipped = torch.rand(len(values), generator=generator) < 0.5
        return torch.where(
            flipped[:, None, None, None], values.flip(3), values
        )

    _train(model, optimizer, examples, epochs, seed, mirrored, schedule.step)
    return model.eval()


def with_new_head(model: Any, seed: int) -> Any:
    """Replaces the last layer by an untrained one."""
    torch.manual_seed(seed)
    model.fc = nn.Linear(model.fc.in_features, len(NEW_CLASSES))
    return model


def features_of(frozen: nn.Module, examples: Examples) -> Examples:
    """Output of the frozen layers."""
    with torch.inference_mode():
        features = [
            frozen(part) for part in examples.values.split(EVALUATION_BATCH)
        ]
    # A tensor of inference mode cannot be saved for a backward pass.
    return Examples(torch.cat(features).clone(), examples.labels)


def train_tail(
    tail: nn.Module, examples: Examples, epochs: int, seed: int
) -> None:
    """Trains a tail on features, in an order that the seed decides."""
    optimizer = torch.optim.SGD(
        tail.parameters(), lr=TAIL_RATE, momentum=MOMENTUM
    )
    _train(tail, optimizer, examples, epochs, seed)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: Examples,
    epochs: int,
    seed: int,
    augment: Callable[..., torch.Tensor] = lambda values, _: values,
    after_epoch: Callable[[], None] = lambda: None,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for batch in examples.epoch(generator):
            logits = model(augment(batch.values, generator))
            loss = nn.functional.cross_entropy(logits, batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        after_epoch()


def accuracy_of(model: nn.Module, examples: Examples) -> float:
    """Fraction of correctly classified examples."""
    model.eval()
    with torch.no_grad():
        scores = [model(p) for p in examples.values.split(EVALUATION_BATCH)]
    right = torch.cat(scores).argmax(1) == examples.labels
    return float(right.float().mean())
