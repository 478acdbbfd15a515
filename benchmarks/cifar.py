"""Transfer learning on CIFAR-10 with torch alone; imports nothing of HAPI.

A ResNet-18 of torchvision learns five classes, and the layers behind its
freeze point then the other five.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from benchmarks.pieces import SpanSlice, pieces_of
from torch import nn
from torchvision.io import ImageReadMode, decode_jpeg

PIXELS = 32
NETWORK = "resnet18"
OLD_CLASSES = range(5)
NEW_CLASSES = range(5, 10)
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
PRETRAIN_BATCH = 64
PRETRAIN_RATE = 3e-3
TAIL_BATCH = 64
TAIL_RATE = 0.01
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
EVALUATION_BATCH = 250


@dataclass(frozen=True)
class Examples:
    """Inputs of a network, or of its tail, and their classes from 0 on."""

    values: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, classes: range, most: int | None = None) -> Examples:
        """Those of consecutive classes, at most so many.

        Raises:
            ValueError: when there is none.
        """
        first, last = classes[0], classes[-1]
        chosen = (self.labels >= first) & (self.labels <= last)
        rows = chosen.nonzero()[:most, 0]
        if not len(rows):
            raise ValueError(f"no image of the classes {first} to {last}")
        return Examples(self.values[rows], self.labels[rows] - first)


def examples_of(tars: Sequence[Path]) -> Examples:
    """Normalised images, ``[N, 3, 32, 32]``, and labels of ``.cls``.

    Raises:
        ValueError: for a tar that lacks the label of an image, or no image.
    """
    images, labels = [], []
    for tar in tars:
        members = _members(tar)
        for name, data in members.items():
            key, _, extension = name.rpartition(".")
            if extension != "jpg":
                continue
            label = members.get(f"{key}.cls")
            if label is None:
                raise ValueError(f"{tar}: {name} has no .cls beside it")
            pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            images.append(decode_jpeg(pixels, ImageReadMode.RGB))
            labels.append(int(label))
    if not images:
        raise ValueError(f"no JPEG in {', '.join(map(str, tars))}")
    values = torch.stack(images).float() / 255
    mean, std = (torch.tensor(each)[:, None, None] for each in (MEAN, STD))
    return Examples((values - mean) / std, torch.tensor(labels))


def _members(tar: Path) -> dict[str, bytes]:
    with tarfile.open(tar) as opened:
        return {
            member.name: file.read()
            for member in opened
            if (file := opened.extractfile(member)) is not None
        }


def pretrained(examples: Examples, epochs: int, seed: int) -> nn.Module:
    """A network that has learnt these examples, mirrored at random."""
    torch.manual_seed(seed)
    model: nn.Module = torchvision.models.get_model(
        NETWORK, weights=None, num_classes=len(OLD_CLASSES)
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PRETRAIN_RATE, weight_decay=WEIGHT_DECAY
    )
    size = min(PRETRAIN_BATCH, len(examples))
    steps = epochs * (len(examples) // size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PRETRAIN_RATE, total_steps=steps
    )
    dice = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for batch in batches(examples, size, dice):
            mirrored = torch.rand(len(batch), generator=dice) < 0.5
            images = torch.where(
                mirrored[:, None, None, None],
                batch.values.flip(3),
                batch.values,
            )
            _step(model, optimizer, Examples(images, batch.labels))
            schedule.step()
    return model.eval()


def with_new_head(model: Any, seed: int) -> Any:
    """The network with a last layer that has learnt nothing; the same one."""
    torch.manual_seed(seed)
    model.fc = nn.Linear(model.fc.in_features, len(NEW_CLASSES))
    return model


def parts_of(model: nn.Module, num_frozen: int) -> tuple[nn.Module, nn.Module]:
    """The frozen layers, and those that are trained."""
    pieces: list[SpanSlice] = pieces_of(NETWORK, model)
    modules = [piece.module for piece in pieces]
    frozen = nn.Sequential(*modules[:num_frozen])
    return frozen.eval(), nn.Sequential(*modules[num_frozen:])


def features_of(frozen: nn.Module, examples: Examples) -> Examples:
    """What the frozen layers make of the examples."""
    with torch.inference_mode():
        found = [
            frozen(part) for part in examples.values.split(EVALUATION_BATCH)
        ]
    # Made outside, a tensor may be kept for a backward pass.
    return Examples(torch.cat(found).clone(), examples.labels)


def train_tail(
    tail: nn.Module, examples: Examples, epochs: int, seed: int
) -> None:
    """Trains it on features, in an order that the seed alone decides."""
    optimizer = torch.optim.SGD(
        tail.parameters(), lr=TAIL_RATE, momentum=MOMENTUM
    )
    dice = torch.Generator().manual_seed(seed)
    tail.train()
    for _ in range(epochs):
        for batch in batches(examples, min(TAIL_BATCH, len(examples)), dice):
            _step(tail, optimizer, batch)


def accuracy_of(model: nn.Module, examples: Examples) -> float:
    """Part of the examples that it gets right, 0 to 1."""
    model.eval()
    with torch.no_grad():
        scores = [model(p) for p in examples.values.split(EVALUATION_BATCH)]
    right = torch.cat(scores).argmax(1) == examples.labels
    return float(right.float().mean())


def batches(
    examples: Examples, size: int, dice: torch.Generator
) -> Iterator[Examples]:
    """An epoch in random order; what fills no batch is left out."""
    order = torch.randperm(len(examples), generator=dice)
    for rows in order.split(size):
        if len(rows) == size:
            yield Examples(examples.values[rows], examples.labels[rows])


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Examples
) -> None:
    loss = nn.functional.cross_entropy(model(batch.values), batch.labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
