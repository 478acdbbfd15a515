"""The trainable part of a model after the freeze point."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx, nn


class Tail(nn.Module):
    """A module with the user's own submodules after the freeze point.

    They are the same objects under the same names, so that an optimiser or a
    ``state_dict`` of the whole model includes what is trained here. Tracing
    fixes arguments such as ``training=self.training``, so there is one trace
    per mode and :meth:`forward` uses that of the current mode.

    Args:
        model: the user's model.
        training: graph of the tail traced in training mode.
        evaluation: graph of the tail traced in eval mode.
    """

    def __init__(
        self, model: nn.Module, training: fx.Graph, evaluation: fx.Graph
    ) -> None:
        super().__init__()
        for target in _targets((training, evaluation)):
            self._adopt(model, target)
        self._forwards = {
            True: _forward(model, training),
            False: _forward(model, evaluation),
        }
        self.train(model.training)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Computes the output from features ``[B, *shape]``."""
        result: torch.Tensor = self._forwards[self.training](self, features)
        return result

    def _adopt(self, model: nn.Module, target: str) -> None:
        """Adds a module, parameter or buffer under its name in the model."""
        *parents, name = target.split(".")
        owner: nn.Module = self
        for parent in parents:
            model = model.get_submodule(parent)
            if parent not in owner._modules:
                owner.add_module(parent, nn.Module())
            owner = owner.get_submodule(parent)
        value = getattr(model, name)
        is_buffer = isinstance(value, torch.Tensor)
        if is_buffer and not isinstance(value, nn.Parameter):
            persistent = name not in model._non_persistent_buffers_set
            owner.register_buffer(name, value, persistent=persistent)
        else:
            setattr(owner, name, value)


def _targets(graphs: Iterable[fx.Graph]) -> list[str]:
    targets = {
        str(node.target)
        for graph in graphs
        for node in graph.nodes
        if node.op in ("call_module", "get_attr")
    }
    # Modules precede their submodules.
    return sorted(targets, key=lambda target: (target.count("."), target))


def _forward(model: nn.Module, graph: fx.Graph):  # type: ignore[no-untyped-def]
    return type(fx.GraphModule(model, graph, "Tail")).forward
