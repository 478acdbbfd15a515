"""Traces models with one input batch by ``torch.fx``.

A *full* trace enters every module of the user. If one of them cannot be
traced, a *shallow* trace enters only those that contain frozen modules; the
others stay whole, like modules of ``torch.nn``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from hapi_protocol.errors import FreezeError


def trace_graph(model: nn.Module, targets: Sequence[str] | None) -> fx.Graph:
    """Traces a model in its current mode.

    Args:
        model: its first argument is the batch; other arguments must have
            defaults.
        targets: None for a full trace; or dotted names, to trace only the
            forwards of the modules that contain one of them.

    Raises:
        FreezeError: ``cannot_trace``.
    """
    _check_signature(model)
    try:
        return _Tracer(targets).trace(model)
    except Exception as error:  # tracing runs the user's own code
        raise FreezeError(
            "cannot_trace",
            f"torch.fx cannot trace {type(model).__name__}: {error}. Move "
            "branches that depend on values into a separate module after the "
            "freeze point",
        ) from error


def check_has_shapes(model: nn.Module) -> None:
    """Refuses lazy modules whose parameters have no shape yet.

    Raises:
        FreezeError: ``cannot_freeze`` naming the parameter.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise FreezeError(
                "cannot_freeze",
                f"{name!r} of {type(model).__name__} has no shape yet (a lazy "
                "module); run the model once on a batch, then split it",
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


class _Tracer(fx.Tracer):
    def __init__(self, targets: Sequence[str] | None) -> None:
        super().__init__()
        self._targets = targets

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if self._targets is None:
            return bool(super().is_leaf_module(m, module_qualified_name))
        inside = module_qualified_name + "."
        return not any(target.startswith(inside) for target in self._targets)

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],
        is_module: bool,
        concrete_args: Any = None,
    ) -> tuple[Callable[..., Any], list[Any]]:
        """One placeholder; other arguments keep their defaults."""
        name = _inputs(self.root)[0].name
        batch = self.create_proxy("placeholder", name, (), {})
        return root_fn, [self.root, batch]

    def create_arg(self, a: Any) -> Any:
        """Keeps the class of results such as Hugging Face's."""
        if isinstance(a, dict) and dataclasses.is_dataclass(a):
            fields = {
                field.name: self.create_arg(getattr(a, field.name))
                for field in dataclasses.fields(a)
            }
            return self.create_node("call_function", type(a), (), fields)
        return super().create_arg(a)


def _check_signature(model: nn.Module) -> None:
    inputs = _inputs(model)
    required = [p for p in inputs if p.default is inspect.Parameter.empty]
    positional = [
        p for p in inputs if p.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    if len(required) > 1 or not positional:
        raise FreezeError(
            "cannot_trace",
            f"{type(model).__name__} takes {len(required)} tensors; the model "
            "must take one batch of samples",
        )


def _inputs(model: nn.Module) -> list[inspect.Parameter]:
    """Returns the parameters of ``forward`` without self and kwargs."""
    _, *parameters = inspect.signature(type(model).forward).parameters.values()
    return [
        parameter
        for parameter in parameters
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
