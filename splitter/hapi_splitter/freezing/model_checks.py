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
    if isinstance(model, torch.jit.ScriptModule | torch.fx.GraphModule):
        raise FreezeError(
            "cannot_freeze",
            f"the model is a {kind}, which has no Python code of its own to "
            "run after the freeze point; give the original module, or two "
            "modules (frozen, tail)",
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
    inner = model._modules.get("_orig_mod")
    if isinstance(model, torch._dynamo.OptimizedModule) and inner is not None:
        return unwrapped(inner)
    return model


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model's first parameter, else the CPU."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
