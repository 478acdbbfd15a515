"""The client's part of the frozen region."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hapi_client.connection import Connection
from hapi_client.packages import package_name, upload_package
from hapi_protocol.encodings import Encoding, allowed_encodings
from hapi_protocol.errors import AnnotationError, ClientError
from hapi_protocol.headers import ModelPath
from hapi_splitter.choice import Freeze
from hapi_splitter.numerics import exact_numerics
from hapi_splitter.package import write_package
from hapi_splitter.trace import split
from hapi_splitter.transforms import ImageTransform, decode_image

AUTO = "auto"
FREEZE = "freeze"
STREAM = "stream"
IMAGENET_TRANSFORM = ImageTransform(resize_size=256, crop_size=224)
"""torchvision's usual evaluation transform, the default."""

FORWARD_SAMPLES_CPU = 8
"""Samples of one forward on the CPU.  Larger batches compute no faster and
lose time: activations over 32 MB are mapped anew each time by the C library,
and their page faults cost ResNet-18 a quarter of its seconds at 64."""

FORWARD_SAMPLES_DEVICE = 64
"""Samples of one forward on an accelerator."""


class FrozenRegion:
    """A split model: what runs here after each cut, and the tail.

    Args:
        model: the whole network, or ``(frozen, tail)``.
        freeze: as for :func:`hapi_splitter.trace.split`.
        transform: ``ImageTransform``, a torchvision preset, or None.
        device: of the tail and of what runs here.
        forward_samples: of one forward here; None for what suits the
            device.

    Attributes:
        tail: the trainable rest.
        freeze: what is frozen, in words.
        local: the region as it runs fastest on the device, with weights
            of its own there.
        forward_samples: of one forward here.
        num_cuts: cut ``num_cuts`` is the whole region.

    Raises:
        FreezeError: naming the value and valid names.
    """

    def __init__(
        self,
        model: torch.nn.Module | tuple[torch.nn.Module, torch.nn.Module],
        freeze: Freeze | None,
        transform: Any,
        device: torch.device,
        forward_samples: int | None = None,
    ) -> None:
        self._transform = _image_transform(transform)
        parts = split(model, freeze, transform=self._transform)
        # The package is written from the CPU, before anything moves.
        self._graph = parts.frozen
        self.local = parts.frozen.to(device, fast=True)
        self.tail: torch.nn.Module = parts.tail.to(device)
        self.freeze = parts.freeze
        self.device = device
        on_cpu = device.type == "cpu"
        self.forward_samples = forward_samples or (
            FORWARD_SAMPLES_CPU if on_cpu else FORWARD_SAMPLES_DEVICE
        )
        self._suffixes: dict[int, torch.nn.Module] = {}

    @property
    def num_cuts(self) -> int:
        return self._graph.num_cuts

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one transformed image."""
        return tuple(self._graph.input_shape)

    def decode(self, image: bytes) -> torch.Tensor:
        """A transformed image, ``[C, H, W]`` float32 on the CPU.

        Raises:
            SampleError: when it cannot be decoded, the same text on
                every tier.
        """
        return self._transform(decode_image(image))

    def cut_number(self, cut: int | str) -> int:
        """What a user's ``cut`` means, but for :data:`AUTO`.

        Raises:
            ClientError: ``bad_configuration`` naming what is allowed.
        """
        if cut == FREEZE:
            return self.num_cuts
        if cut == STREAM:
            return 0
        if type(cut) is int and 0 <= cut <= self.num_cuts:
            return cut
        raise ClientError(
            "bad_configuration",
            f"cut is {cut!r}; this frozen region has cuts 1 to "
            f"{self.num_cuts}, 'freeze' is the last of them, 0 or 'stream' "
            "pushes nothing down, and 'auto' plans",
        )

    def finish(self, cut: int, features: torch.Tensor) -> torch.Tensor:
        """From features at ``cut`` to features at the freeze point.

        Args:
            cut: 0 for transformed images.
            features: ``[n, *shape at cut]`` float32 on the CPU.

        Returns:
            ``[n, *shape at the freeze point]`` float32 on the device, in
            one piece: a tail may view them in another shape.
        """
        if cut not in self._suffixes:
            self._suffixes[cut] = self.local.suffix(cut)
        suffix = self._suffixes[cut]
        with exact_numerics(self.device):
            pieces = [
                suffix(piece.to(self.device))
                for piece in torch.split(features, self.forward_samples)
            ]
        found = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return found.contiguous()

    def store(
        self,
        connection: Connection,
        container: str,
        progress: Callable[[BinaryIO, str, int], BinaryIO] | None = None,
    ) -> tuple[ModelPath, int]:
        """Stores the package unless it is there.

        Returns:
            Its :class:`ModelPath`, and the bytes sent for it.
        """
        with tempfile.TemporaryDirectory(prefix="hapi-package-") as folder:
            path = Path(folder) / "model.hapi"
            info = write_package(self._graph, path)
            return upload_package(
                connection, container, path, info.digest, progress
            )

    def is_stored(self, connection: Connection, container: str) -> bool:
        """Whether the package is in the store already."""
        name = package_name(self._graph.digest)
        return connection.head(container, name) is not None

    @property
    def parameter_bytes(self) -> int:
        """Of the region's weights, nearly all of the package."""
        return self._graph.parameter_bytes

    def cut_shape(self, cut: int) -> tuple[int, ...]:
        """Of one sample's features at a cut, from 1 on."""
        return tuple(self._graph.cuts[cut - 1].shape)


def _image_transform(transform: Any) -> ImageTransform:
    if transform is None:
        return IMAGENET_TRANSFORM
    if isinstance(transform, ImageTransform):
        return transform
    try:
        return ImageTransform.from_preset(transform)
    except (TypeError, ValueError) as error:
        raise ClientError(
            "bad_configuration",
            f"{error}; give weights.transforms() or an ImageTransform",
        ) from error


def checked_encodings(encoding: str | None, floor: str) -> tuple[str, ...]:
    """Canonical texts of the encodings that a plan may choose from.

    Args:
        encoding: the only one, if not None.
        floor: else, what it allows.

    Raises:
        ClientError: ``bad_configuration`` for an unknown one.
    """
    try:
        if encoding is not None:
            return (str(Encoding.parse(encoding)),)
        return allowed_encodings(floor)
    except (AnnotationError, ValueError) as error:
        message = getattr(error, "message", str(error))
        raise ClientError("bad_configuration", message) from error
