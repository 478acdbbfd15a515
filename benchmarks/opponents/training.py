"""Images and a training step, as a careful user writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from benchmarks.opponents.networks import split
from benchmarks.preset import MEAN, STD, Preset
from torch import nn
from torch.fx.experimental.optimization import fuse
from torchvision.io import ImageReadMode, decode_jpeg

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
    """Bytes of a JPEG to what is cropped of it, uint8 ``[3, H, W]``.

    It is torchvision's preset for classification up to where that makes
    floats.  The rest is done for whole batches, and a quarter of the bytes go
    from thread to thread, or from process to process.
    """

    def __init__(self, task: Task) -> None:
        self._preset = Preset(task.resize_size, task.crop_size)

    def __call__(self, jpeg: bytes | bytearray) -> torch.Tensor:
        data = torch.frombuffer(writable(jpeg), dtype=torch.uint8)
        return self._preset.pixels(decode_jpeg(data, ImageReadMode.RGB))


def writable(data: bytes | bytearray) -> bytearray:
    """The same; torch warns of tensors of what must not change."""
    return data if isinstance(data, bytearray) else bytearray(data)


Sample = tuple[torch.Tensor, int]


def collate(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images ``[batch, 3, H, W]`` and labels ``[batch]``."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


class Trainer:
    """The frozen part, the tail and its optimizer.

    Args:
        task: what is trained.
        channels_last: memory format of weights and images.
        device: of all of it.

    Attributes:
        loss: of the last batch.
    """

    loss: torch.Tensor

    def __init__(
        self,
        task: Task,
        *,
        channels_last: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self._device = torch.device(device)
        self._layout = (
            torch.channels_last if channels_last else torch.contiguous_format
        )
        frozen, tail = split(task.model, task.freeze, task.crop_size)
        self.frozen = folded(frozen).to(device, memory_format=self._layout)
        self.tail = tail.train().to(device, memory_format=self._layout)
        self._optimizer = torch.optim.SGD(
            self.tail.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )
        self._criterion = nn.CrossEntropyLoss()
        self._shift = self._by_channel(MEAN)
        self._scale = self._by_channel(STD)

    def _by_channel(self, values: Sequence[float]) -> torch.Tensor:
        found = torch.tensor(values, device=self._device)
        return found.view(-1, 1, 1) * 255

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """Of the frozen part, ``[batch, …]``, for images of uint8."""
        with torch.no_grad():
            # Bytes are what goes to a GPU: a quarter of what floats are.
            sent = images.to(self._device, non_blocking=True)
            pixels = sent.to(torch.float32).sub_(self._shift)
            # Channels are normalised while each lies in one piece.
            found: torch.Tensor = self.frozen(
                pixels.div_(self._scale).contiguous(memory_format=self._layout)
            )
        return found

    def step(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        """Trains the tail on one batch."""
        device = self._device
        loss = self._criterion(
            self.tail(features.to(device)), labels.to(device)
        )
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.loss = loss.detach()


def folded(frozen: nn.Module) -> nn.Module:
    """The same, with each batch norm in the convolution before it."""
    if any(isinstance(each, nn.BatchNorm2d) for each in frozen.modules()):
        frozen = fuse(frozen)
    return frozen


Options = Mapping[str, Any]
