"""Turns a part of a program into a runnable ``torch.fx`` module.

Packages are purely functional; running them so would allocate a buffer per
call and costs up to a fifth of the speed (densenet121). Here dead buffers
are reused: an operator overwrites its input where nothing else will read
that memory, where it belongs to neither the caller nor the model, and where
the result has the same shape and dtype. Names in the generated module are
made from ids only.
"""

from __future__ import annotations

import linecache
import operator as operator_module
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx import graph_module

from hapi_splitter.graph.batch_independence import Value
from hapi_splitter.graph.buffer_reuse import BufferReuse
from hapi_splitter.graph.operators import operators
from hapi_splitter.graph.program import (
    Affine,
    Argument,
    Call,
    Program,
    Ref,
)
from hapi_splitter.graph.shapes import arrange

META_CALL = "hapi_call"
"""Key of a ``torch.fx`` node's ``meta``: the id of the tensor it yields."""

BATCH_NORM = "aten._native_batch_norm_legit_no_training.default"
LINEAR = "aten.linear.default"
_CONVOLUTION = "aten.conv2d.default"


def lower(
    program: Program,
    values: Sequence[Value],
    weights: Mapping[int, torch.Tensor],
    start: int,
    stop: int,
) -> fx.GraphModule:
    """A module that computes tensor ``stop`` from tensor ``start``.

    Args:
        program: a checked program.
        values: result of :func:`hapi_splitter.graph.shapes.infer`.
        weights: by id, below 0 for those of folded calls; shared with the
            module, not copied.
        start: the id whose tensor is the module's input ``[B, ...]``; no
            call after it may read data that is not derived from it.
        stop: the id whose tensor is the output.

    The module reads its input and weights only; its output may share
    memory with its input.
    """
    nodes = needed(program, start, stop)
    reuse = BufferReuse(program, values, nodes, start, stop)
    return _Lowering(weights, start).module(program, nodes, stop, reuse)


def needed(program: Program, start: int, stop: int) -> list[int]:
    """Ids of the calls between ``start`` and ``stop``, in order."""
    nodes: set[int] = set()
    pending = [stop]
    while pending:
        node = pending.pop()
        if node == start or node in nodes or node < program.first_call:
            continue
        nodes.add(node)
        pending.extend(program.call(node).refs())
    return sorted(nodes)


def _free_with_last_use(module: fx.GraphModule) -> None:
    """Weights and source go when nobody holds the module any more.

    The graph of a ``GraphModule`` refers back to it, so that its tensors
    would stay until the cycle is collected; and ``torch.fx`` keeps the source
    of each for the life of the process.
    """
    module.graph.owning_module = None
    source = type(module).forward.__code__.co_filename
    weakref.finalize(module, _forget_source, source).atexit = False


def _forget_source(filename: str) -> None:
    loader = getattr(graph_module, "_loader", None)
    getattr(loader, "eval_cache", {}).pop(filename, None)
    linecache.cache.pop(filename, None)


class _Lowering:
    """Emits one ``torch.fx`` graph."""

    def __init__(
        self, weights: Mapping[int, torch.Tensor], start: int
    ) -> None:
        self._weights = weights
        self._graph = fx.Graph()
        self._root = nn.Module()
        self._start = start
        self._nodes = {start: self._graph.placeholder("batch")}
        self._size: fx.Node | None = None

    def module(
        self,
        program: Program,
        nodes: Sequence[int],
        stop: int,
        reuse: BufferReuse,
    ) -> fx.GraphModule:
        for node in nodes:
            call = program.call(node)
            self._nodes[node] = self._emit(call, reuse.target(node))
            self._nodes[node].meta[META_CALL] = node
        self._graph.output(self._tensor(stop))
        module = fx.GraphModule(self._root, self._graph, "FrozenRange")
        _free_with_last_use(module)
        return module.eval()

    def _emit(self, call: Call, target: int | None) -> fx.Node:
        operator = operators()[call.op]
        if call.op == BATCH_NORM:
            return self._batch_norm(call)
        args = call.args
        if target is not None and args[0] != Ref(target):
            args = (args[1], args[0], *args[2:])
        positional, by_name = arrange(
            operator, [self._argument(argument) for argument in args]
        )
        if call.op == LINEAR:
            # A strided input would be multiplied sample by sample: attention
            # with its batch in the middle took 1.4 times as long.
            positional[0] = self._graph.call_function(
                torch.ops.aten.contiguous.default, (positional[0],)
            )
        function = (
            operator.overload()
            if target is None
            else operator.inplace_overload()
        )
        return self._graph.call_function(function, tuple(positional), by_name)

    def _batch_norm(self, call: Call) -> fx.Node:
        # The same kernel without the two statistics nobody reads.
        *tensors, momentum, eps = (self._argument(a) for a in call.args)
        return self._graph.call_function(
            torch.ops.aten.batch_norm.default,
            (*tensors, False, momentum, eps, False),
        )

    def _argument(self, argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return self._tensor(argument.node)
        if isinstance(argument, Affine):
            return self._batch_size(argument)
        if isinstance(argument, tuple):
            return [self._argument(item) for item in argument]
        return argument

    def _tensor(self, node: int) -> fx.Node:
        if node not in self._nodes:
            name = f"weight_{node}" if node > 0 else f"folded_{-node}"
            self._root.register_buffer(name, self._weights[node])
            self._nodes[node] = self._graph.get_attr(name)
        return self._nodes[node]

    def _batch_size(self, size: Affine) -> Any:
        if size.batch == 0:
            return size.constant
        if self._size is None:
            start = self._nodes[self._start]
            with self._graph.inserting_after(start):
                self._size = self._graph.call_function(
                    torch.ops.aten.sym_size.int, (start, 0)
                )
        scaled = self._size
        if size.batch != 1:
            scaled = self._graph.call_function(
                operator_module.mul, (scaled, size.batch)
            )
        if size.constant:
            scaled = self._graph.call_function(
                operator_module.add, (scaled, size.constant)
            )
        return scaled


def arranged(
    program: Program,
    weights: Mapping[int, torch.Tensor],
    device: torch.device,
    copy: bool = False,
) -> dict[int, torch.Tensor]:
    """Returns the weights on a device, in its fastest memory format.

    On a CPU weights of two-dimensional convolutions are ``channels_last``: the
    channels of a pixel are next to one another. Such a convolution reads and
    writes such images, and oneDNN need not rearrange them before and after
    each call; most other kernels keep the format of their input. All other
    weights, and all on other devices, are contiguous.

    Args:
        program: its calls read the weights.
        weights: by id; they are not changed.
        device: the device that computes.
        copy: whether weights that need no conversion are copied, too.
    """
    last = set()
    if device.type == "cpu":
        convolutions = [c for c in program.calls if c.op == _CONVOLUTION]
        last = {call.refs()[1] for call in convolutions}
    formats = (torch.contiguous_format, torch.channels_last)
    return {
        node: weight.to(device, memory_format=formats[node in last], copy=copy)
        for node, weight in weights.items()
    }
