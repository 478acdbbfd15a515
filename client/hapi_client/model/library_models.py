"""Builds models of timm and of Hugging Face transformers by name."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hapi_client.model.torchvision_registry import (
    from_checkpoint,
    unknown_name,
)
from hapi_protocol.errors import ClientError

TIMM = "timm/"
"""Prefix of timm's models, as in their names on its hub."""


def is_transformers_name(name: str) -> bool:
    """True for ``owner/name``, or a folder that ``save_pretrained`` wrote."""
    return "/" in name or Path(name, "config.json").exists()


def build_timm(
    name: str, num_classes: int | None, weights: str | None, path: Path | None
) -> tuple[torch.nn.Module, Any]:
    """Builds a model of timm, and its evaluation transform.

    Args:
        name: its name, with or without the tag of weights.
        num_classes: outputs of the head; None for that of the weights.
        weights: tag of published weights, or ``DEFAULT``; None for none.
        path: file with a state dict of the model; None for none.

    Raises:
        ClientError: ``bad_configuration`` naming the value.
    """
    timm = _library("timm", name)
    if weights not in (None, "DEFAULT"):
        name = f"{name.partition('.')[0]}.{weights}"
    if name.partition(".")[0] not in timm.list_models():
        raise unknown_name(
            f"timm has no model {name!r}", name, timm.list_models()
        )
    head = {} if num_classes is None else {"num_classes": num_classes}
    try:
        model = timm.create_model(name, pretrained=weights is not None, **head)
    except (OSError, RuntimeError, ValueError) as error:
        raise _unusable(f"{TIMM}{name}", error) from error
    if path is not None:
        model = from_checkpoint(
            lambda **sizes: timm.create_model(name, **sizes), path
        )
    config = timm.data.resolve_model_data_config(model)
    return model, timm.data.create_transform(**config, is_training=False)


def build_transformers(
    name: str, num_classes: int | None, weights: str | None
) -> tuple[torch.nn.Module, Any]:
    """Builds an image classifier of transformers, with its weights.

    Args:
        name: ``owner/name`` on Hugging Face's hub, or a folder.
        num_classes: outputs of a new head; None for that of the weights.
        weights: None or ``DEFAULT``, since the name is that of weights.

    Returns:
        The model and its image processor.

    Raises:
        ClientError: ``bad_configuration`` naming the value.
    """
    transformers = _library("transformers", name)
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise ClientError(
            "bad_configuration", f"model is {name!r}; there is no such folder"
        )
    if weights not in (None, "DEFAULT"):
        raise ClientError(
            "bad_configuration",
            f"weights is {weights!r}, but {name!r} names weights; leave it "
            "out",
        )
    # Else transformers may ask on the terminal to run code of the folder.
    trust: dict[str, Any] = {"trust_remote_code": False}
    head: dict[str, Any] = {}
    if num_classes is not None:
        head = {"num_labels": num_classes, "ignore_mismatched_sizes": True}
    try:
        return (
            transformers.AutoModelForImageClassification.from_pretrained(
                name, **trust, **head
            ),
            transformers.AutoImageProcessor.from_pretrained(name, **trust),
        )
    except Exception as error:  # the files may contain anything
        raise _unusable(name, error) from error


def _library(library: str, name: str) -> Any:
    try:
        return import_module(library)
    except ImportError as error:
        raise ClientError(
            "bad_configuration",
            f"model is {name!r}, which needs {library}; install it by "
            f"pip install {library}",
        ) from error


def _unusable(name: str, error: Exception) -> ClientError:
    text = os.linesep.join(str(error).splitlines()[:2])
    return ClientError(
        "bad_configuration",
        f"model {name!r} cannot be built: {text}; give another name, or a "
        "file or folder of this machine",
    )
