"""Computes the values of a trace's nodes on fake tensors."""

from __future__ import annotations

import operator as operator_module
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from hapi_protocol.errors import FreezeError
from hapi_splitter.inputs.sample_format import SampleForm

BATCHES = (2, 3)
"""Two batch sizes, to see which sizes grow with the batch."""


def propagate(
    model: nn.Module, graph: fx.Graph, form: SampleForm, batch: int
) -> dict[fx.Node, Any]:
    """Returns every node's value for one batch size; tensors have no data.

    Raises:
        FreezeError: ``cannot_trace`` if the model does not run.
    """
    recorder = _Recorder(
        fx.GraphModule(model, graph),
        FakeTensorMode(allow_non_fake_inputs=True),
    )
    example = form.zeros(batch, _device_of(model))
    try:
        recorder.propagate(example)
    except Exception as error:  # the user's own code
        raise FreezeError(
            "cannot_trace",
            f"{type(model).__name__} does not run on a batch of samples of "
            f"shape {form.shape}: {error}",
        ) from error
    return recorder.found


def example_for(model: nn.Module, form: SampleForm) -> torch.Tensor:
    """Returns a batch of two samples on the model's device."""
    if not form.dtype.is_floating_point:
        return form.zeros(BATCHES[0], _device_of(model))
    return torch.randn(BATCHES[0], *form.shape, device=_device_of(model))


def _device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def source_of(node: fx.Node) -> fx.Node | None:
    """Returns the structure from which a node reads a field or item."""
    takes = node.target in (getattr, operator_module.getitem)
    if takes and len(node.all_input_nodes) == 1:
        return node.all_input_nodes[0]
    return None


def add_field(node: fx.Node, found: dict[fx.Node, Any]) -> None:
    """Adds the value of a node that reads a field of a known structure."""
    structure = found[node.all_input_nodes[0]]
    if not isinstance(structure, torch.Tensor):
        assert callable(node.target)
        found[node] = node.target(structure, *node.args[1:])


class _Recorder(FakeTensorProp):
    """Records the value of every node."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module, mode)
        self.found: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.found[n] = result
        return result
