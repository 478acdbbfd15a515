"""Refuses models that cannot be split, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hapi_protocol.errors import FreezeError, cannot_freeze
from hapi_splitter.freezing.code_form import is_librarys
from hapi_splitter.user_code import failed_line

REMEDY = (
    "give the transform= of the model's inputs: an image transform, an "
    "ArrayTransform(shape, dtype), or NamedArrays of several, by the names of "
    "arguments; inputs such as masks that need certain values have to be made "
    "by the model, from its other inputs"
)


class SplitWarning(UserWarning):
    """A split trains in another way than its user may expect."""


def check_splittable(model: nn.Module) -> None:
    """Refuses parameters without data, and modules without Python code.

    Raises:
        FreezeError: ``cannot_freeze`` naming the parameter or module.
    """
    kind = type(model).__name__
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise cannot_freeze(
                f"{name!r} of {kind} has no shape yet (a lazy module); run "
                "the model once on a batch, then split it",
            )
        if tensor.is_inference() and isinstance(tensor, nn.Parameter):
            raise cannot_freeze(
                f"{name!r} of {kind} was made under torch.inference_mode(), "
                "so that torch can neither export nor train it; build the "
                "model outside of it, or replace the parameter by "
                "nn.Parameter(parameter.clone())",
            )
        # Not by its class, whose import takes most of a second.
        if hasattr(tensor, "device_mesh") or "_flat_param" in name:
            raise cannot_freeze(
                f"{name!r} of {kind} is distributed, by FSDP or tensor "
                "parallelism; split the model first, then distribute the "
                "tail: fully_shard(tail)",
            )
        if tensor.is_meta:
            raise cannot_freeze(
                f"{name!r} of {kind} has no data (it is on the meta device, "
                "as after accelerate's cpu_offload or init_empty_weights); "
                "load the model's weights to one device, then split it",
            )
    # A module of torch.export has one mode and refuses to change it.
    is_exported = isinstance(model, torch.fx.GraphModule) and "train" in vars(
        model
    )
    if is_exported or isinstance(model, torch.jit.ScriptModule):
        raise cannot_freeze(
            f"the model is a {kind}, the result of torch.jit or torch.export, "
            "which calls no modules by their Python code; give the original "
            "model",
        )


def not_running(
    name: str,
    inputs: Mapping[Any, torch.Tensor],
    error: Exception,
    remedy: str = REMEDY,
) -> FreezeError:
    """Returns the error of a model that fails on samples that are made up."""
    given = ", ".join(
        f"{key}: {len(tensor)} of {tensor.dtype}, shape "
        f"{tuple(tensor.shape[1:])}"
        for key, tensor in inputs.items()
    )
    return FreezeError(
        "cannot_trace",
        f"{name} does not run on samples that the split makes up (random "
        f"values; {given}){failed_line(error)}: "
        f"{type(error).__name__}: {str(error)[:500]}; {remedy}",
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
        raise cannot_freeze(
            f"the model is wrapped in {wrapper}; give its .module, and wrap "
            f"the tail: {wrapper}(tail)",
        )
    if isinstance(model, torch._dynamo.OptimizedModule):
        return unwrapped(model._orig_mod)
    return model


def hooks_of(module: nn.Module) -> list[Any]:
    """Returns the forward hooks and forward pre-hooks of a module."""
    return [
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
    ]


def is_users_hook(hook: Any) -> bool:
    """Returns False for those of libraries, such as of weight norms."""
    kind = getattr(hook, "__func__", hook)
    kind = kind if isinstance(kind, FunctionType) else type(kind)
    return not is_librarys(kind)


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model's first parameter, else the CPU."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
