"""Describes results of modules for any batch size, from an export."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.frontier import Shapes
from hapi_splitter.freezing.structures import flatten
from hapi_splitter.graph.export import size_of


@contextmanager
def recorded_shapes(model: nn.Module) -> Iterator[Shapes]:
    """Records results while a model is exported with a symbolic batch size.

    Unlike the records of two batch sizes, they hold for every batch size.

    Args:
        model: the model of which a part is exported.

    Yields:
        The shapes, filled when the model has been exported.
    """
    shapes: dict[tuple[str, int], list[Any]] = {}
    calls: Counter[str] = Counter()

    def begin(*_: Any) -> None:
        calls.clear()  # the exporter runs it more than once

    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(begin).remove)
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue

            def end(_: Any, __: Any, result: Any, name: str = name) -> None:
                leaves, _spec = flatten(result)
                shapes[name, calls[name]] = [
                    _described(leaf) for leaf in leaves
                ]
                calls[name] += 1

            stack.callback(module.register_forward_hook(end).remove)
        yield shapes


def _described(value: Any) -> Any:
    """Returns a shape, or a value other than a tensor, for any batch size.

    None of the user's values is equal to what has no description.
    """
    try:
        if isinstance(value, torch.Tensor):
            return tuple(size_of(size) for size in value.shape)
        if isinstance(value, torch.SymInt):
            return size_of(value)
    except FreezeError:
        return object()  # no multiple of the batch size
    return value
