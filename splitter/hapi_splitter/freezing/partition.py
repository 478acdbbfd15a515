"""Builds the two graphs on either side of a freeze point."""

from __future__ import annotations

import operator as operator_module
from typing import Any

from torch import fx

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.freeze_point import FreezePoint, ModelTrace


class ModesDifferError(FreezeError):
    """Training mode runs other operations before the freeze point."""


def frozen_module(trace: ModelTrace, point: FreezePoint) -> fx.GraphModule:
    """Returns the part before the freeze point; it yields one tensor."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in trace.nodes[: point.index + 1]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[trace.boundary(point)])
    return fx.GraphModule(trace.model, graph)


def tail_graph(trace: ModelTrace, point: FreezePoint) -> fx.Graph:
    """Returns the graph after the freeze point; its input is the features.

    Sizes computed before it become numbers, or multiples of the features'
    batch size.
    """
    graph = fx.Graph()
    features = graph.placeholder("features")
    copies: dict[fx.Node, Any] = {trace.boundary(point): features}

    def copied(node: fx.Node) -> Any:
        if node not in copies:
            copies[node] = _recomputed(trace, graph, features, node)
        return copies[node]

    for node in trace.nodes[point.index + 1 :]:
        if trace.is_field(node):
            copies[node] = _recomputed(trace, graph, features, node)
        else:
            copies[node] = graph.node_copy(node, copied)
    graph.output(fx.map_arg(trace.result, copied))
    return graph


def _recomputed(
    trace: ModelTrace, graph: fx.Graph, features: fx.Node, node: fx.Node
) -> Any:
    if node.op == "get_attr":
        return graph.node_copy(node)
    size = trace.size_of(node)
    assert size is not None, "the freeze point has one live tensor"
    small, large = size
    if small == large:
        return small
    slope = large - small
    with graph.inserting_after(features):
        batch = graph.call_method("size", (features, 0))
    with graph.inserting_after(batch):
        scaled = graph.call_function(operator_module.mul, (batch, slope))
    with graph.inserting_after(scaled):
        return graph.call_function(
            operator_module.add, (scaled, small - 2 * slope)
        )


def same_point(
    trace: ModelTrace, other: ModelTrace, point: FreezePoint
) -> FreezePoint:
    """Returns the freeze point in ``other``, a trace in training mode.

    Raises:
        ModesDifferError: ``cannot_freeze``.
    """
    for mine, theirs in zip(
        trace.nodes[: point.index + 1], other.nodes, strict=False
    ):
        if (mine.op, mine.target) != (theirs.op, theirs.target):
            raise ModesDifferError(
                "cannot_freeze",
                f"freeze {point.name!r}: before it the model runs "
                f"{mine.name!r} in eval mode and {theirs.name!r} in training "
                "mode; freeze before it",
            )
    other.take_values(trace, point)
    return point
