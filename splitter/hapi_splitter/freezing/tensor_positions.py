"""Positions in a model's forward at which a tensor is taken or replaced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hapi_splitter.freezing.model_run import is_operation
from hapi_splitter.freezing.stand_ins import TensorForm
from hapi_splitter.freezing.structures import flatten, unflatten


@dataclass(frozen=True)
class TensorPosition:
    """A tensor in a model's forward.

    Args:
        module: dotted name; "" is the model.
        call: number of the module's call in the forward.
        is_end: True for a result of the call, False for an argument.
        indexes: its positions among the flattened values.
        form: form of the tensor.
        number: number of the tensor in the record.
        operations: 0, or the tensor is a result of the operation that is so
            many operations after that begin or end.
    """

    module: str
    call: int
    is_end: bool
    indexes: tuple[int, ...]
    form: TensorForm
    number: int
    operations: int = 0


Act = Callable[[torch.Tensor], torch.Tensor | None]
"""Takes the tensor at a position; what it returns is there instead."""


def watch(
    model: nn.Module, position: TensorPosition, act: Act, stack: ExitStack
) -> None:
    """Calls a function at a position of the forwards until the stack closes.

    Args:
        model: the model that runs.
        position: where.
        act: gets the tensor. It may raise to leave the forward.
        stack: removes the hooks.
    """

    def replaced(values: Any) -> Any:
        leaves, spec = flatten(values)
        other = act(leaves[position.indexes[0]]) if leaves else None
        if other is None:
            return None
        for index in position.indexes:
            leaves[index] = other
        return unflatten(leaves, spec)

    mode = _OperationMode(position.operations, replaced)
    call = -1

    def reached(values: Any) -> Any:
        nonlocal call
        call += 1
        if call != position.call:
            return None
        if position.operations:
            mode.start()
            return None
        return replaced(values)

    module = model.get_submodule(position.module)
    if position.is_end:
        handle = module.register_forward_hook(
            lambda _, args, result: reached(result)
        )
    else:
        handle = module.register_forward_pre_hook(
            lambda _, args, kwargs: reached((args, kwargs)),
            prepend=True,
            with_kwargs=True,
        )
    stack.callback(handle.remove)
    if position.operations:
        stack.enter_context(mode)


class _OperationMode(TorchFunctionMode):
    """Counts operations and replaces the result of the last one."""

    def __init__(self, count: int, replaced: Callable[[Any], Any]) -> None:
        super().__init__()
        self._count = count
        self._left = 0
        self._replaced = replaced

    def start(self) -> None:
        self._left = self._count

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._left and is_operation(func, result):
            self._left -= 1
            if not self._left:
                other = self._replaced(result)
                return result if other is None else other
        return result
