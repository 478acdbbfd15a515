"""Images and a training step, as a careful user writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from benchmarks.opponents.networks import split
from torch import nn
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms._presets import ImageClassification

LEARNING_RATE = 1e-4
MOMENTUM = 0.9


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        model: of torchvision, by name.
        freeze: ``backbone`` or ``inner``.
        batch_size: samples of a step.
        resize_size: pixels of the shorter side.
        crop_size: pixels of both sides of what the network sees.
    """

    model: str
    freeze: str
    batch_size: int
    resize_size: int
    crop_size: int


@dataclass(frozen=True)
class Place:
    """Where the data is: the same photographs, stored in several ways.

    Attributes:
        endpoint: ``http://host:port`` of Swift and of its S3 API.
        auth_url, user, key: of Swift's v1 login; user and key are those of
            the S3 API too.
        container: of tar shards of ``<key>.jpg`` and ``<key>.cls``.
        shards: their names, in order.
        num_samples: of all shards.
        images: container of single photographs ``<key>.jpg``.
        labels: of each key.
        mds: container of the shards that mosaicml-streaming writes.
        resized: container of the same tar shards with photographs resized
            beforehand.
        cache_folder: of the client, for what libraries keep on its disk.
    """

    endpoint: str
    auth_url: str
    user: str
    key: str
    container: str
    shards: Sequence[str]
    num_samples: int
    images: str = ""
    labels: Mapping[str, int] = field(default_factory=dict)
    mds: str = ""
    resized: str = ""
    cache_folder: str = ""


class Decoder:
    """Bytes of a JPEG to what the network sees, float32 ``[3, H, W]``."""

    def __init__(self, task: Task) -> None:
        self._preset = ImageClassification(
            crop_size=task.crop_size, resize_size=task.resize_size
        )

    def __call__(self, jpeg: bytes) -> torch.Tensor:
        data = torch.frombuffer(bytearray(jpeg), dtype=torch.uint8)
        image: torch.Tensor = self._preset(
            decode_jpeg(data, ImageReadMode.RGB)
        )
        return image


class Trainer:
    """The frozen part, the tail and its optimizer.

    Args:
        task: what is trained.
        channels_last: memory format of weights and images.
    """

    def __init__(self, task: Task, *, channels_last: bool = False) -> None:
        self._layout = (
            torch.channels_last if channels_last else torch.contiguous_format
        )
        frozen, tail = split(task.model, task.freeze, task.crop_size)
        self.frozen = frozen.to(memory_format=self._layout)
        self.tail = tail.train().to(memory_format=self._layout)
        self._optimizer = torch.optim.SGD(
            self.tail.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )
        self._criterion = nn.CrossEntropyLoss()

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """Of the frozen part; ``[batch, …]``."""
        with torch.no_grad():
            found: torch.Tensor = self.frozen(
                images.contiguous(memory_format=self._layout)
            )
        return found

    def step(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        """Trains the tail on one batch."""
        loss = self._criterion(self.tail(features), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


Options = Mapping[str, Any]
