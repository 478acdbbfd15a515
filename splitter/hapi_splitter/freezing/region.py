"""The frozen region as a module: a model's own call up to the freeze point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from hapi_protocol.errors import cannot_freeze
from hapi_splitter.freezing.stand_ins import TensorForm
from hapi_splitter.freezing.tensor_positions import TensorPosition, watch
from hapi_splitter.graph.operators import HALVES

_MAX_INTEGER = 1 << 24
Inputs = Callable[[torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]
"""Converts a batch of samples to a model's arguments."""


def cast_input(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    """Converts floating-point samples for a model of 16 bits.

    They get the dtype of its first floating-point parameter if that is
    bfloat16 or float16; other samples stay as they are.
    """
    parameters = (p for p in model.parameters() if p.is_floating_point())
    first = next(parameters, samples)
    if first.dtype in HALVES and samples.is_floating_point():
        return samples.to(first.dtype)
    return samples


def autocasts() -> list[torch.autocast]:
    """Returns the autocasts that are on.

    They have to be entered in a forward, since the exporter sees no others.
    """
    return [
        torch.autocast(kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]


class CastInput(nn.Module):
    """Calls a model on float32 samples, in the autocasts of the split."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._autocasts = autocasts()

    def forward(self, samples: torch.Tensor) -> Any:
        with ExitStack() as stack:
            for autocast in self._autocasts:
                stack.enter_context(autocast)
            return self.model(cast_input(self.model, samples))


class Region(nn.Module):
    """Runs a model until its freeze point and returns what is sent.

    The model's call is left at once, so that what follows need not be
    exportable.

    Args:
        model: the user's model.
        positions: tensors that are sent, that of the freeze point last.
        inputs: returns the model's arguments from samples.
    """

    def __init__(
        self,
        model: nn.Module,
        positions: Sequence[TensorPosition],
        inputs: Inputs,
    ) -> None:
        super().__init__()
        self.model = model
        self._positions = tuple(positions)
        self._inputs = inputs
        self._autocasts = autocasts()

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that is sent, ``[B, *shape]``."""
        args, kwargs = self._inputs(samples)
        taken: dict[TensorPosition, torch.Tensor] = {}
        with ExitStack() as stack:
            for position in self._positions:
                watch(self.model, position, self._take(position, taken), stack)
            stack.enter_context(_ModuleStack())
            for autocast in self._autocasts:
                stack.enter_context(autocast)
            try:
                self.model(*args, **kwargs)
            except _Reached:
                return packed(
                    [taken[position] for position in self._positions]
                )
        raise RuntimeError(f"{self._positions[-1].module!r} did not run")

    def _take(
        self,
        position: TensorPosition,
        taken: dict[TensorPosition, torch.Tensor],
    ) -> Any:
        def take(tensor: torch.Tensor) -> None:
            taken[position] = tensor
            if position == self._positions[-1]:
                raise _Reached

        return take


class _Reached(BaseException):
    """Leaves the model's call; no ``except Exception`` may catch it."""


class _ModuleStack:
    """Restores the exporter's list of running modules after a block.

    ``torch.export`` expects every module's call to return.
    """

    def __enter__(self) -> None:
        # Imported here, because that takes a third of a second.
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        tracer = getattr(get_proxy_mode(), "tracer", None)
        self._stack = getattr(tracer, "module_stack", None)
        self._before = dict(self._stack or {})
        if tracer is not None:  # for messages that name a line
            tracer._record_forward_stack_traces_only = False

    def __exit__(self, _: object, error: Any, __: object) -> None:
        if self._stack is not None:
            if error is not None and self._stack:
                path, _ = [*self._stack.values()][-1]
                error.failed_in = path.removeprefix("_export_root.")
            self._stack.clear()
            self._stack.update(self._before)


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins several tensors ``[B, ...]`` to one ``[B, n]``; one stays as is.

    They become float32, which holds integers below 2**24.
    """
    if len(tensors) == 1:
        return tensors[0]
    rows = [tensor.reshape(tensor.shape[0], -1) for tensor in tensors]
    return torch.cat([row.to(torch.float32) for row in rows], 1)


def sent_shape(positions: Sequence[TensorPosition]) -> tuple[int, ...]:
    """Returns the shape of one sample of what :func:`packed` returns."""
    shapes = [position.form.sample_shape for position in positions]
    if len(shapes) == 1:
        return shapes[0]
    return (sum(torch.Size(shape).numel() for shape in shapes),)


def unpacked(
    features: torch.Tensor, positions: Sequence[TensorPosition]
) -> list[torch.Tensor]:
    """Separates what :func:`packed` joined."""
    if len(positions) == 1:
        return [features]
    forms = [position.form for position in positions]
    sizes = [torch.Size(form.sample_shape).numel() for form in forms]
    parts = torch.split(features, sizes, 1)
    return [
        _converted(part, form).reshape(-1, *form.sample_shape)
        for part, form in zip(parts, forms, strict=True)
    ]


def _converted(part: torch.Tensor, form: TensorForm) -> torch.Tensor:
    """Returns a part in its own dtype.

    Raises:
        FreezeError: ``cannot_freeze`` for integers that float32 rounds.
    """
    if not form.dtype.is_floating_point and part.abs().max() >= _MAX_INTEGER:
        raise cannot_freeze(
            f"the model reads an integer of {part.abs().max():.0f} after the "
            f"freeze point; it travels as float32, which is exact below "
            f"{_MAX_INTEGER} only; freeze after the layers that read it",
        )
    return part.to(form.dtype)
