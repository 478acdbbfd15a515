"""Decoding and training step that all opponents share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from swiftclient.client import get_auth
from torch import nn
from torch.fx.experimental.optimization import fuse
from torchvision.io import ImageReadMode, decode_jpeg

from benchmarks.networks import build, split
from benchmarks.opponents.preset import MEAN, STD, Preset

LEARNING_RATE = 1e-4
MOMENTUM = 0.9


@dataclass(frozen=True)
class Task:
    """Network, freeze point and image sizes of a training.

    ``freeze`` is ``backbone`` or ``inner``; ``resize_size`` are pixels of the
    shorter side, ``crop_size`` of both sides of the network's input.
    """

    model: str
    freeze: str
    batch_size: int
    resize_size: int
    crop_size: int


@dataclass(frozen=True)
class Place:
    """Location of the photographs, stored in several formats.

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
        cache_folder: on the client's disk, for the libraries' caches.
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


def log_in(place: Place) -> tuple[str, str]:
    """URL of the account, and a token, by Swift's v1 login."""
    url, token = get_auth(place.auth_url, place.user, place.key)
    return str(url), str(token)


class Decoder:
    """Decodes, resizes and crops a JPEG to uint8 ``[3, H, W]``.

    Whole batches are converted to floats later, so that only a quarter of the
    bytes move between threads or processes.
    """

    def __init__(self, task: Task) -> None:
        self._preset = Preset(task.resize_size, task.crop_size)

    def __call__(self, jpeg: bytes | bytearray) -> torch.Tensor:
        data = torch.frombuffer(writable(jpeg), dtype=torch.uint8)
        return self._preset.pixels(decode_jpeg(data, ImageReadMode.RGB))


def writable(data: bytes | bytearray) -> bytearray:
    """A writable view of the data; torch warns about read-only buffers."""
    return data if isinstance(data, bytearray) else bytearray(data)


Sample = tuple[torch.Tensor, int]


def collate(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images ``[batch, 3, H, W]`` and labels ``[batch]``."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


class Trainer:
    """Computes features and trains the tail.

    Args:
        task: what is trained.
        channels_last: memory format of weights and images.
        device: that computes all of it.

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
        self._memory_format = (
            torch.channels_last if channels_last else torch.contiguous_format
        )
        frozen, tail = split(task.model, task.freeze, build(task.model))
        self.frozen = folded(frozen).to(
            device, memory_format=self._memory_format
        )
        self.tail = tail.train().to(device, memory_format=self._memory_format)
        self._optimizer = torch.optim.SGD(
            self.tail.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )
        self._criterion = nn.CrossEntropyLoss()
        self._shift = self._by_channel(MEAN)
        self._scale = self._by_channel(STD)

    def _by_channel(self, values: Sequence[float]) -> torch.Tensor:
        tensor = torch.tensor(values, device=self._device)
        return tensor.view(-1, 1, 1) * 255

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """Features, ``[batch, …]``, of uint8 images."""
        with torch.no_grad():
            # Bytes are a quarter of the floats to copy to a GPU.
            sent = images.to(self._device, non_blocking=True)
            pixels = sent.to(torch.float32).sub_(self._shift)
            # Normalising is faster on contiguous channels.
            features: torch.Tensor = self.frozen(
                pixels.div_(self._scale).contiguous(
                    memory_format=self._memory_format
                )
            )
        return features

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
    """Folds each batch norm into the convolution before it."""
    if any(isinstance(module, nn.BatchNorm2d) for module in frozen.modules()):
        frozen = fuse(frozen)
    return frozen


Options = Mapping[str, Any]
