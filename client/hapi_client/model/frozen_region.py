"""Split model on the client: frozen region, tail and package."""

from __future__ import annotations

import functools
import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hapi_client.model.client_region import ClientRegion
from hapi_client.model.package_store import find_package, upload_package
from hapi_client.model.split_arguments import (
    AUTO,
    FREEZE,
    PRECISIONS,
    STREAM,
    check_cut,
    check_precision,
    input_transform,
    parse_device,
)
from hapi_client.model.split_progress import split_progress
from hapi_client.sampling.augmentation_schedule import AugmentationSchedule
from hapi_client.swift.connection import Connection
from hapi_protocol.encodings import Encoding
from hapi_protocol.errors import ClientError, FreezeError
from hapi_protocol.headers import ModelPath
from hapi_splitter.described import Described
from hapi_splitter.freezing.freeze_selector import Freeze
from hapi_splitter.freezing.model_checks import device_of, unwrapped
from hapi_splitter.freezing.split_model import split
from hapi_splitter.freezing.tail import autocast_dtype
from hapi_splitter.inputs.augmentation import Augmentation
from hapi_splitter.package.weights import tensor_bytes
from hapi_splitter.package.writer import digest_of, write_package
from hapi_splitter.units import bytes_text

logger = logging.getLogger(__name__)


class FrozenRegion(Described, ClientRegion):
    """A split model: the frozen layers after each cut, and the tail.

    Args:
        model: the whole network, or ``(frozen, tail)``.
        freeze: freeze point, see
            :func:`hapi_splitter.freezing.split_model.split`.
        transform: ``ImageTransform``, a transform of another library (see
            :func:`split_model`), ``ArrayTransform``, or None for ImageNet's.
        device: device of the tail and of the client's frozen layers.
        forward_samples: samples of one forward pass on the client; None for
            a default that suits the device.
        augment: random augmentation of training images; None for that of
            the transform.
        augment_period_epochs: epochs after which the augmentations repeat;
            None for never.
        split_directory: see :func:`split_model`.
        exporting: called if the split is not cached, before it is made,
            which takes seconds.
        image: extension of the member that is the image; None for that of
            the transform.
        exif: ``"turn"`` or ``"ignore"`` the orientation in EXIF data; None
            for what the transform says.
        precision: see :func:`split_model`.

    Attributes:
        tail: the trainable layers.
        freeze: description of the freeze point.
        sends_integers: True if integers travel with the features.
        num_outputs: numbers that the tail yields for a sample; None if not a
            vector.

    Raises:
        FreezeError: naming the value and valid names.
        ClientError: ``bad_configuration`` naming device or transform.
    """

    def __init__(
        self,
        model: torch.nn.Module | tuple[torch.nn.Module, torch.nn.Module],
        freeze: Freeze | None,
        transform: Any,
        device: torch.device | str,
        forward_samples: int | None = None,
        augment: Augmentation | None = None,
        augment_period_epochs: int | None = None,
        split_directory: str | Path | None = None,
        exporting: Callable[[], None] = lambda: None,
        image: str | None = None,
        exif: str | None = None,
        precision: str = AUTO,
    ) -> None:
        device = parse_device(device)
        check_precision(precision)
        source = input_transform(transform, augment, image, exif)
        # Refuses a period that does not fit, before the model is split.
        AugmentationSchedule(
            source.augmentation is not None, 0, augment_period_epochs
        )
        with (
            split_progress(type(model).__name__) as progress,
            _autocast_to(precision, model),
        ):
            self._precision = str(autocast_dtype(_device_of(model)))
            parts = split(
                model,
                freeze,
                transform=source,
                cache_directory=split_directory,
                exporting=exporting,
                progress=progress,
            )
        # The package is written from the CPU, before weights move.
        super().__init__(parts.frozen, device, forward_samples)
        self.tail: torch.nn.Module = parts.tail.to(device)
        self.freeze = parts.freeze
        self._frozen_weights = parts.frozen_weights
        self.augment_period_epochs = augment_period_epochs
        self.sends_integers = parts.sends_integers
        self.num_outputs = parts.num_outputs
        self._weights = _frozen_weights(model, self.tail)

    def describe(self) -> Mapping[str, str]:
        """Returns freeze point, features, cuts and size, by name."""
        last = self.num_cuts
        shape = "x".join(map(str, self.cut_shape(last)))
        dtype = str(self.cut_dtype(last)).removeprefix("torch.")
        return {
            "frozen up to": str(self.freeze),
            "input": "x".join(map(str, self.input_shape)),
            "features": f"{shape} {dtype} for a sample",
            "cuts": str(last),
            "weights": bytes_text(self.parameter_bytes),
            "on the client": str(self.device),
        }

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """Everything that features at the freeze point depend on, as JSON.

        Unlike the digest of the package, it depends neither on the cut nor
        on the release of torch.
        """
        transform = self.transform.to_json()
        augmentation = transform.pop("augmentation", None)
        return {
            "freeze": self.freeze,
            "weights": _digest(self._weights),
            "transform": transform,
            "augmentation": augmentation,
            # "None" without autocast.
            "precision": self._precision.removeprefix("torch."),
        }

    def trainable_tail(self) -> torch.nn.Module:
        """Returns the tail, and warns if it has no trainable parameter."""
        if not any(weight.requires_grad for weight in self.tail.parameters()):
            logger.warning(
                "freeze %r leaves nothing to train: no parameter after it has "
                "requires_grad; freeze an earlier module, or train a module "
                "of your own on the features",
                self.freeze,
            )
        return self.tail

    def check_encodings(
        self, encodings: Callable[[str], Sequence[str]]
    ) -> None:
        """Refuses encodings that would change integers next to the features.

        Args:
            encodings: returns encodings from the dtype of a cut.

        Raises:
            ClientError: ``bad_configuration`` naming the encoding.
        """
        dtype = self.device_graph.cuts[-1].dtype
        for encoding in encodings(dtype) if self.sends_integers else ():
            if Encoding.parse(encoding).dtype != dtype:
                raise ClientError(
                    "bad_configuration",
                    f"encoding {encoding!r} would change integers that the "
                    "tail reads, such as a mask, and that travel with the "
                    f"features; use {dtype!r} or min_precision='lossless'",
                )

    def run_suffix(
        self, cut: int, features: torch.Tensor, batch_samples: int
    ) -> torch.Tensor:
        """Computes features, from the weights that the model was split with.

        Raises:
            FreezeError: ``cannot_freeze`` if the model's frozen weights have
                changed since it was split.
        """
        self._frozen_weights.check()
        return super().run_suffix(cut, features, batch_samples)

    def on_cpu(self) -> ClientRegion:
        """Returns the same region on the CPU, without the tail."""
        self._frozen_weights.check()
        return super().on_cpu()

    def cut_number(self, cut: int | str) -> int:
        """Returns the number of a user's ``cut``, except :data:`AUTO`.

        Raises:
            ClientError: ``bad_configuration`` naming the allowed values.
        """
        check_cut(cut, self.num_cuts)
        if cut == AUTO:
            raise ClientError(
                "bad_configuration",
                "cut 'auto' has no number: a plan chooses among all cuts",
            )
        return int({FREEZE: self.num_cuts, STREAM: 0}.get(str(cut), cut))

    def store(
        self,
        connection: Connection,
        container: str,
        progress: Callable[[BinaryIO, str, int], BinaryIO] | None = None,
    ) -> tuple[ModelPath, int]:
        """Stores the package unless :meth:`find` finds it.

        Args:
            connection: connection to the account.
            container: container of packages.
            progress: wraps (file, description, bytes) to show progress.

        Returns:
            The path of the package, and the number of bytes sent.
        """
        stored = self.find(connection, container)
        if stored is not None:
            return stored, 0
        with tempfile.TemporaryDirectory(prefix="hapi-package-") as folder:
            path = Path(folder) / "model.hapi"
            info = write_package(self._graph, path)
            if info.digest != self.digest:
                raise FreezeError(
                    "cannot_freeze",
                    "frozen weights were written to after the split; load "
                    "weights first, then split the model (again)",
                )
            return upload_package(
                connection, container, path, info.digest, progress
            )

    def find(self, connection: Connection, container: str) -> ModelPath | None:
        """Finds the package in a container, else in the model library.

        None means that it has to be uploaded.
        """
        return find_package(
            connection,
            container,
            self._graph.digest,
            lambda: self._md5,
        )

    @functools.cached_property
    def _md5(self) -> str:
        return digest_of(self._graph, "md5")

    @property
    def parameter_bytes(self) -> int:
        """Size of the region's weights, nearly that of the package."""
        return self._graph.parameter_bytes


def split_model(
    model: torch.nn.Module | tuple[torch.nn.Module, torch.nn.Module],
    freeze: Freeze | None = None,
    *,
    transform: Any = None,
    augment: Augmentation | None = None,
    augment_period_epochs: int | None = None,
    image: str | None = None,
    exif: str | None = None,
    device: torch.device | str = "cpu",
    split_directory: str | Path | None = None,
    precision: str = AUTO,
) -> tuple[FrozenRegion, torch.nn.Module]:
    """Splits a model into its frozen layers and the tail to train.

    There is no network access.  In eval mode ``tail(features)`` of features
    at the freeze point equals ``model(images)`` within rounding (relative
    1e-4; 2**-5 of the largest value in bfloat16, 2**-8 in float16).  The
    frozen layers always run in eval mode.

    Args:
        model: the whole network, with the weights to use; or two modules
            ``(frozen, tail)``.
        freeze: name of the last frozen module, e.g. ``"avgpool"``; a list of
            modules; a function ``freeze(name, module)`` that returns True
            for modules to freeze; or ``"auto"`` for all that runs before the
            first parameter with ``requires_grad``, as with PEFT.  None for
            two modules.
        transform: torchvision's ``weights.transforms()``, a ``Compose`` of
            resize, centre crop, conversion and normalisation, the evaluation
            transform of timm or open_clip, an image processor of Hugging
            Face transformers, an ``ImageTransform``, or an
            ``ArrayTransform`` for arrays; None for ImageNet's evaluation
            transform.
        augment: random augmentation of training images, equal on client and
            storage; None for none.
        augment_period_epochs: epochs after which the augmentations repeat,
            so that their features can be cached; None for never.
        image: extension of the member that is the image, such as ``"jpg"``
            or ``"left.jpg"``, if samples have several; None if they have one.
        exif: ``"turn"`` images as their EXIF data say and people see them, or
            ``"ignore"`` that, as ``ImageFolder`` does; None for what the
            transform says, else ``"ignore"``.
        device: device of the tail and of the client's frozen layers.
        split_directory: directory on this machine in which splits are cached;
            None for ``HAPI_CACHE_DIR``, else ``~/.cache/hapi``; "" for none.
        precision: in what the frozen layers compute, on client and storage:
            ``"bfloat16"`` or ``"float16"`` where torch's autocast does so,
            ``"float32"`` without autocast, or ``"auto"`` for the autocast in
            which ``split_model`` is called.

    Returns:
        The frozen region, for :class:`hapi_client.FeatureDataset`, and the
        tail, whose parameters are those of ``model``.

    Raises:
        FreezeError: naming the value and valid names.
    """
    frozen = FrozenRegion(
        model,
        freeze,
        transform,
        device,
        augment=augment,
        augment_period_epochs=augment_period_epochs,
        image=image,
        exif=exif,
        split_directory=split_directory,
        precision=precision,
    )
    return frozen, frozen.trainable_tail()


def _frozen_weights(
    model: torch.nn.Module | tuple[torch.nn.Module, torch.nn.Module],
    tail: torch.nn.Module,
) -> dict[str, torch.Tensor]:
    """Returns the part of a model's state dict that is not in its tail."""
    if not isinstance(model, torch.nn.Module):
        return unwrapped(model[0]).state_dict()
    trained = tail.state_dict()
    return {
        name: value
        for name, value in unwrapped(model).state_dict().items()
        if name not in trained
    }


def _device_of(
    model: torch.nn.Module | tuple[torch.nn.Module, torch.nn.Module],
) -> torch.device:
    return device_of(model[0] if isinstance(model, tuple) else model)


@contextmanager
def _autocast_to(
    precision: str,
    model: torch.nn.Module | tuple[torch.nn.Module, torch.nn.Module],
) -> Iterator[None]:
    """Enters the autocast of :func:`split_model`'s ``precision``."""
    if precision == AUTO:
        yield
        return
    device, dtype = _device_of(model).type, PRECISIONS[precision]
    with torch.autocast(device, dtype, enabled=dtype is not None):
        yield


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.dtype} {[*weight.shape]}\n".encode())
        digest.update(tensor_bytes(weight))
    return digest.hexdigest()
