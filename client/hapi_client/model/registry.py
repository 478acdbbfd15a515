"""Registry of models by name: of libraries, or a user's function."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.model.library_models import (
    TIMM,
    build_timm,
    build_transformers,
    is_transformers_name,
)
from hapi_client.model.split_arguments import input_transform, parse_device
from hapi_client.model.torchvision_registry import build_model, replace_head
from hapi_protocol.errors import ClientError
from hapi_splitter.freezing.split_model import default_freeze
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.inputs.named_arrays import NamedArrays
from hapi_splitter.inputs.sample_format import InputTransform

Model: TypeAlias = torch.nn.Module | tuple[torch.nn.Module, torch.nn.Module]

RESIZE_CROP_RATIO = 256 / 224
"""Ratio of the sizes in ImageNet's usual evaluation transform."""


@dataclass(frozen=True)
class ModelSource:
    """The source of a model and its weights.

    Attributes:
        name: name in ``torchvision.models``, ``timm/NAME``, ``OWNER/NAME``
            or a folder of Hugging Face transformers, or ``MODULE:FUNCTION``,
            a function without arguments that returns a module or
            ``(frozen, tail)``.
        weights: name of published weights.
        checkpoint: file with a state dict of the model.
    """

    name: str
    weights: str | None = None
    checkpoint: Path | None = None

    @property
    def is_own(self) -> bool:
        """True for a user's function."""
        return ":" in self.name

    @property
    def is_random(self) -> bool:
        """True if the weights of a library's model are random."""
        return (
            not self.is_own
            and (
                self.name.startswith(TIMM)
                or not is_transformers_name(self.name)
            )
            and self.weights is None
            and self.checkpoint is None
        )

    def build(self) -> Model:
        """Builds the model.

        Raises:
            ClientError: ``bad_configuration`` naming the value.
        """
        return self.build_with_transform()[0]

    def build_with_transform(
        self, num_classes: int | None = None, seed: int = 0
    ) -> tuple[Model, Any]:
        """Builds the model and the transform of its published weights.

        The transform is None if the library has none.

        Args:
            num_classes: outputs of the last linear layer; None keeps it, as
                that of a user's function is kept.
            seed: seed of random weights.

        Raises:
            ClientError: ``bad_configuration`` naming the value.
        """
        torch.manual_seed(seed)
        if self.is_own:
            if self.weights is not None or self.checkpoint is not None:
                raise ClientError(
                    "bad_configuration",
                    f"model {self.name!r} makes its own weights; --weights "
                    "and --checkpoint are for models of libraries only, so "
                    "load the weights in that function",
                )
            return _own_model(self.name), None
        if self.name.startswith(TIMM):
            name = self.name.removeprefix(TIMM)
            model, transform = build_timm(
                name, num_classes, self.weights, self.checkpoint
            )
        elif is_transformers_name(self.name):
            if self.checkpoint is not None:
                raise ClientError(
                    "bad_configuration",
                    f"checkpoint is {self.checkpoint}, but model "
                    f"{self.name!r} has its own weights; leave it out, or "
                    "give the folder that save_pretrained wrote as --model",
                )
            model, transform = build_transformers(
                self.name, num_classes, self.weights
            )
        else:
            return build_model(
                self.name,
                num_classes=num_classes,
                seed=seed,
                weights=self.weights,
                checkpoint=self.checkpoint,
            )
        if num_classes is not None:
            # A checkpoint may have another head.
            replace_head(model, num_classes)
        return model, transform


def load_region(
    source: ModelSource,
    freeze: str | None,
    transform: InputTransform | None,
    device: str,
) -> FrozenRegion:
    """Builds and splits the model of a command line.

    Args:
        source: source of the model.
        freeze: a module, several separated by commas, or None for all but
            the last linear layer.
        transform: transform from a stored file to the model's input; None
            for that of the published weights, or else ImageNet's.
        device: name of the client's device.

    Raises:
        HapiError: naming the invalid value and a remedy.
    """
    client_device = parse_device(device)
    model, published = source.build_with_transform()
    transform = transform or input_transform(published)
    freeze_point = parse_freeze(model, freeze, transform)
    return FrozenRegion(model, freeze_point, transform, client_device)


def imagenet_transform(size: int) -> ImageTransform:
    """Returns ImageNet's evaluation transform for ``size`` x ``size``."""
    return ImageTransform(
        resize_size=round(size * RESIZE_CROP_RATIO), crop_size=size
    )


def parse_array(text: str) -> ArrayTransform:
    """Parses ``--array``: ``1x64x100``, ``128:int64``, ``a=64,b=8:int64``.

    Raises:
        ClientError: ``bad_configuration`` naming the allowed format.
    """
    try:
        if "=" not in text:
            return _one_array(text)
        named = (part.partition("=") for part in text.split(","))
        return NamedArrays.of(
            **{name.strip(): _one_array(array) for name, _, array in named}
        )
    except ValueError as error:
        raise ClientError(
            "bad_configuration",
            f"array is {text!r:.80}: {error}; give sizes, and a type other "
            "than float32 if necessary: 1x64x100, 128:int64, or with names "
            "for several arrays: ids=128:int64,mask=128:int64",
        ) from error


def _one_array(text: str) -> ArrayTransform:
    sizes, _, dtype = text.partition(":")
    shape = tuple(int(size) for size in sizes.split("x"))
    return ArrayTransform(shape, dtype or "float32")


def parse_freeze(
    model: Model, freeze: str | None, transform: InputTransform
) -> Any:
    """Parses ``--freeze``: a module, or several separated by commas.

    None freezes all but the last linear layer.

    Raises:
        FreezeError: if the model has no such module.
    """
    if not isinstance(model, torch.nn.Module):
        return freeze
    if freeze is None:
        return default_freeze(model, transform=transform)
    if "," in freeze:
        return [name.strip() for name in freeze.split(",")]
    return freeze


def _own_model(text: str) -> Model:
    """Calls the user's own function on the user's own machine."""
    module_name, _, function_name = text.partition(":")
    # As with python -m, modules in the current folder can be imported.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        result = getattr(importlib.import_module(module_name), function_name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ClientError(
            "bad_configuration",
            f"model {text!r} cannot be built: {error}; give MODULE:FUNCTION, "
            "a function without arguments",
        ) from error
    modules = result if isinstance(result, tuple) else (result,)
    if len(modules) in (1, 2) and all(
        isinstance(module, torch.nn.Module) for module in modules
    ):
        model: Model = result
        return model
    raise ClientError(
        "bad_configuration",
        f"model {text!r} returns a value of type {type(result).__name__}; it "
        "must return a torch module, or a pair (frozen, tail)",
    )
