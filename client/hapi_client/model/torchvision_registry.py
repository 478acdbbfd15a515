"""Builds torchvision's models by name, for the commands."""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision

from hapi_protocol.errors import ClientError

MAX_NAMES = 5
"""Maximum number of suggestions in an error message."""


def build_model(
    name: str,
    *,
    num_classes: int | None,
    seed: int,
    weights: str | None = None,
    checkpoint: Path | None = None,
) -> tuple[torch.nn.Module, Any]:
    """Builds a torchvision model with a head of ``num_classes`` outputs.

    Args:
        name: name in ``torchvision.models``.
        num_classes: outputs of the last linear layer; None keeps the head.
        seed: seed of random weights, including those of a new head.
        weights: name of published weights (``DEFAULT``), which torchvision
            downloads; None for random weights.
        checkpoint: file with a state dict of the model, which is read
            without running pickled code.

    Returns:
        The model, and the weights' transform or None.

    Raises:
        ClientError: ``bad_configuration`` naming the value.
    """
    torch.manual_seed(seed)
    try:
        builder = torchvision.models.get_model_builder(name)
    except ValueError as error:
        raise unknown_name(
            f"torchvision has no model {name!r}",
            name,
            torchvision.models.list_models(),
            "; timm/NAME is one of timm, OWNER/NAME one of Hugging Face",
        ) from error
    chosen = None
    if weights is not None:
        offered = torchvision.models.get_model_weights(builder)
        if weights not in offered.__members__:
            raise unknown_name(
                f"torchvision has no weights {weights!r} of {name}",
                weights,
                list(offered.__members__),
            )
        chosen = offered[weights]
    if checkpoint is None:
        model = _published(builder, chosen)
    else:
        model = from_checkpoint(builder, checkpoint)
    if num_classes is not None:
        replace_head(model, num_classes)
    return model, chosen.transforms() if chosen is not None else None


def unknown_name(
    problem: str, name: str, known: Sequence[str], remedy: str = ""
) -> ClientError:
    """Makes an error with similar names."""
    similar = difflib.get_close_matches(name, known, MAX_NAMES, cutoff=0.5)
    label = "similar names:" if similar else "choose from"
    names = ", ".join(similar or known[:MAX_NAMES])
    more = "" if similar or len(known) <= MAX_NAMES else ", ..."
    return ClientError(
        "bad_configuration", f"{problem}; {label} {names}{more}{remedy}"
    )


def _published(
    builder: Callable[..., torch.nn.Module], weights: Any
) -> torch.nn.Module:
    try:
        return builder(weights=weights)
    except OSError as error:
        raise ClientError(
            "bad_configuration",
            f"the weights {weights} cannot be downloaded: {error}; give a "
            "file with --checkpoint",
        ) from error


def from_checkpoint(
    builder: Callable[..., torch.nn.Module], path: Path
) -> torch.nn.Module:
    """Builds a model with a head that fits a file, and loads the file.

    Raises:
        ClientError: ``bad_configuration`` naming the file.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        head, _ = _last_linear(builder())
        outputs = len(state[f"{head}.weight"])
        model = builder(num_classes=outputs)
        model.load_state_dict(state)
    except Exception as error:  # the file may contain anything
        reason = str(error)
        if isinstance(error, KeyError):
            reason = f"it has no {error}"
        elif isinstance(error, pickle.UnpicklingError):
            # torch's own message advises to run what is in the file.
            reason = "it is no file of torch.save, or has more than tensors"
        raise ClientError(
            "bad_configuration",
            f"{path} is not a state dict of this model: {reason}; give a "
            "file such as --save writes",
        ) from error
    return model


def _last_linear(model: torch.nn.Module) -> tuple[str, torch.nn.Linear]:
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    if not layers:
        raise ClientError(
            "bad_configuration",
            f"{type(model).__name__} has no linear layer to replace",
        )
    return layers[-1]


def replace_head(model: torch.nn.Module, num_classes: int) -> None:
    """Replaces the last linear layer, unless it has as many outputs."""
    name, old = _last_linear(model)
    if old.out_features == num_classes:
        return
    parent, _, attribute = name.rpartition(".")
    setattr(
        model.get_submodule(parent),
        attribute,
        torch.nn.Linear(old.in_features, num_classes),
    )
