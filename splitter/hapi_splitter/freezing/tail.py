"""The trainable rest of a model, after the freeze point."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx, nn


class Tail(nn.Module):
    """The user's own submodules and Parameters behind the freeze point.

    They are the same objects, under the same names: an optimiser or a
    ``state_dict`` of the whole model sees what is trained here. Tracing
    fixes arguments such as ``training=self.training``, so there is one
    trace for each mode and :meth:`forward` takes that of the present one.

    Args:
        model: the user's model.
        training: graph of the tail traced in training mode.
        evaluation: the same, in eval mode.
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
        """From features ``[B, *shape]`` of the last cut to the output."""
        result: torch.Tensor = self._forwards[self.training](self, features)
        return result

    def _adopt(self, model: nn.Module, target: str) -> None:
        """Puts a module, parameter or buffer at its place in the model."""
        *parents, name = target.split(".")
        here: nn.Module = self
        for parent in parents:
            model = model.get_submodule(parent)
            if parent not in here._modules:
                here.add_module(parent, nn.Module())
            here = here.get_submodule(parent)
        value = getattr(model, name)
        if isinstance(value, nn.Module | nn.Parameter):
            setattr(here, name, value)
        elif isinstance(value, torch.Tensor):
            persistent = name not in model._non_persistent_buffers_set
            here.register_buffer(name, value, persistent=persistent)
        else:
            setattr(here, name, value)


def _targets(graphs: Iterable[fx.Graph]) -> list[str]:
    found = {
        str(node.target)
        for graph in graphs
        for node in graph.nodes
        if node.op in ("call_module", "get_attr")
    }
    # A module before what lies inside it.
    return sorted(found, key=lambda target: (target.count("."), target))


def _forward(model: nn.Module, graph: fx.Graph):  # type: ignore[no-untyped-def]
    return type(fx.GraphModule(model, graph, "Tail")).forward
