"""Models by name: torchvision's, or a function of the user's own."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.model.torchvision_registry import build_model
from hapi_protocol.errors import ClientError
from hapi_splitter.freezing.split_model import default_freeze
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.inputs.sample_format import InputTransform

Model: TypeAlias = torch.nn.Module | tuple[torch.nn.Module, torch.nn.Module]

RESIZE_BY_CROP = 256 / 224
"""Of ImageNet's usual evaluation transform."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        name: in ``torchvision.models``, or ``MODULE:FUNCTION``: called
            without arguments, it yields a module or ``(frozen, tail)``.
        weights: name of published weights, for torchvision's.
        checkpoint: a state dict, likewise.
    """

    name: str
    weights: str | None = None
    checkpoint: Path | None = None

    @property
    def is_random(self) -> bool:
        """Whether nobody has said where weights come from."""
        return (
            ":" not in self.name
            and self.weights is None
            and self.checkpoint is None
        )

    def build(self) -> Model:
        """
        Raises:
            ClientError: ``bad_configuration`` naming the value.
        """
        return self.build_with_transform()[0]

    def build_with_transform(self) -> tuple[Model, Any]:
        """And the transform of its published weights; None without any.

        Raises:
            ClientError: ``bad_configuration`` naming the value.
        """
        if ":" in self.name:
            if self.weights is not None or self.checkpoint is not None:
                raise ClientError(
                    "bad_configuration",
                    f"model {self.name!r} makes its own weights; --weights "
                    "and --checkpoint go with models of torchvision only, so "
                    "load yours in that function",
                )
            return _own_model(self.name), None
        return build_model(
            self.name,
            num_classes=None,
            seed=0,
            weights=self.weights,
            checkpoint=self.checkpoint,
        )


def load_region(
    source: ModelSource,
    freeze: str | None,
    transform: InputTransform,
    device: str,
) -> FrozenRegion:
    """The split model of a command line.

    Args:
        source: of the model.
        freeze: a module, several separated by commas, or None for all but
            the last linear layer.
        transform: from what is stored to what the model takes.
        device: of this machine.

    Raises:
        HapiError: naming what is wrong and the remedy.
    """
    model = source.build()
    chosen = parse_freeze(model, freeze, transform)
    return FrozenRegion(model, chosen, transform, parse_device(device))


def imagenet_transform(size: int) -> ImageTransform:
    """ImageNet's evaluation, for squares of so many pixels."""
    return ImageTransform(
        resize_size=round(size * RESIZE_BY_CROP), crop_size=size
    )


def parse_array(text: str) -> ArrayTransform:
    """What ``--array`` means: ``1x64x100``, or ``128:int64``.

    Raises:
        ClientError: ``bad_configuration`` naming what is allowed.
    """
    sizes, _, dtype = text.partition(":")
    try:
        shape = tuple(int(size) for size in sizes.split("x"))
        return ArrayTransform(shape, dtype or "float32")
    except ValueError as error:
        raise ClientError(
            "bad_configuration",
            f"array is {text!r:.80}: {error}; give sizes, and a type if it "
            "is not float32: 1x64x100, or 128:int64",
        ) from error


def parse_freeze(
    model: Model, freeze: str | None, transform: InputTransform
) -> Any:
    """What ``--freeze`` means: a module, several separated by commas, or
    all but the last linear layer.

    Raises:
        FreezeError: when the model has no such place.
    """
    if not isinstance(model, torch.nn.Module):
        return freeze
    if freeze is None:
        return default_freeze(model, transform=transform)
    if "," in freeze:
        return [name.strip() for name in freeze.split(",")]
    return freeze


def parse_device(name: str) -> torch.device:
    """
    Raises:
        ClientError: ``bad_configuration`` for one that is not there.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ClientError(
            "bad_configuration", f"device is {name!r}: {error}"
        ) from error
    return device


def _own_model(text: str) -> Model:
    """Runs the user's own function, on the user's own machine.

    With a fixed seed: the same random weights are the same package.
    """
    torch.manual_seed(0)
    module_name, _, function_name = text.partition(":")
    # As python -m does: what lies in the present folder can be imported.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module_name), function_name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ClientError(
            "bad_configuration",
            f"model {text!r} cannot be made: {error}; give MODULE:FUNCTION, "
            "a function without arguments",
        ) from error
    parts = made if isinstance(made, tuple) else (made,)
    if len(parts) in (1, 2) and all(
        isinstance(each, torch.nn.Module) for each in parts
    ):
        model: Model = made
        return model
    raise ClientError(
        "bad_configuration",
        f"model {text!r} is {type(made).__name__}; it must be a torch module, "
        "or a pair of them (frozen, tail)",
    )
