"""Refuses models that cannot be split, before anything runs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hapi_protocol.errors import FreezeError


def check_splittable(model: nn.Module) -> None:
    """Refuses parameters without data, and modules without Python code.

    Raises:
        FreezeError: ``cannot_freeze`` naming the parameter or module.
    """
    kind = type(model).__name__
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise FreezeError(
                "cannot_freeze",
                f"{name!r} of {kind} has no shape yet (a lazy module); run "
                "the model once on a batch, then split it",
            )
        if tensor.is_meta:
            raise FreezeError(
                "cannot_freeze",
                f"{name!r} of {kind} has no data (it is on the meta device, "
                "as after accelerate's cpu_offload or init_empty_weights); "
                "load the model's weights to one device, then split it",
            )
    # A module of torch.export has one mode and refuses to change it.
    is_exported = isinstance(model, torch.fx.GraphModule) and "train" in vars(
        model
    )
    if is_exported or isinstance(model, torch.jit.ScriptModule):
        raise FreezeError(
            "cannot_freeze",
            f"the model is a {kind}, the result of torch.jit or torch.export, "
            "which calls no modules by their Python code; give the original "
            "model",
        )


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the original of a compiled model, or the model itself.

    Raises:
        FreezeError: ``cannot_freeze`` for a model that is wrapped to run
            on several devices, as its tail would not be.
    """
    if isinstance(
        model, nn.DataParallel | nn.parallel.DistributedDataParallel
    ):
        wrapper = type(model).__name__
        raise FreezeError(
            "cannot_freeze",
            f"the model is wrapped in {wrapper}; give its .module, and wrap "
            f"the tail: {wrapper}(tail)",
        )
    if isinstance(model, torch._dynamo.OptimizedModule):
        return unwrapped(model._orig_mod)
    return model


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model's first parameter, else the CPU."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
