"""Removes in-place operators and conversions from exported graphs.

``torch.export`` records in-place operators as the module calls them. torch
removes them by retracing the graph with symbolic sizes, which takes longer
than the export itself. Most networks do not need this: an activation that
overwrites a tensor without later readers equals its functional operator, and
the memory of a result shows if a reshape or a conversion is a view or a copy.
Calls that depend on weights only are evaluated later, whatever they are, and
some operators, such as ``einsum``, are decomposed by themselves. Only other
graphs are retraced.
"""

from __future__ import annotations

import functools
import operator as operator_module
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from hapi_splitter.graph.batch_constants import is_fixed, is_size, reads
from hapi_splitter.graph.canonicalize import (
    ASSERTIONS,
    DECOMPOSED,
    RESHAPES,
    is_identity,
    is_known,
)
from hapi_splitter.graph.operators import op_names, operators

_aten = torch.ops.aten
_BATCH_NORM = "aten.batch_norm.default"
_DECOMPOSED_ALONE = op_names(
    "addcmul broadcast_to einsum expand_as mT movedim.int movedim.intlist "
    "narrow swapaxes view_as"
)
"""Operators that are made of others, all of which a retrace would show."""
_CONTIGUOUS = "aten.contiguous.default"
_DROPOUT = "aten.dropout_.default"
_CONVERSIONS = op_names("to.dtype to.dtype_layout to.device type_as")
_RESHAPES = RESHAPES | op_names("reshape_as")


def functionalize(
    exported: torch.export.ExportedProgram,
) -> torch.export.ExportedProgram:
    """Returns an equivalent program without in-place operators.

    Operators that packages can hold are not decomposed. The graph may be
    changed in place.

    Raises:
        Exception: any error of torch's tracing.
    """
    rewriter = _InPlaceRewriter(exported)
    if not rewriter.is_sound():
        retraced: torch.export.ExportedProgram
        retraced = exported.run_decompositions(_decompositions())
        return retraced
    rewriter.rewrite()
    return exported


@functools.cache
def _decompositions() -> dict[Any, Any]:
    table = torch.export.default_decompositions()
    return {
        operator: table[operator]
        for operator in table
        if str(operator) in DECOMPOSED
    }


class _InPlaceRewriter:
    """Replaces in-place calls one by one, without a retrace."""

    def __init__(self, exported: torch.export.ExportedProgram) -> None:
        graph, inputs = exported.graph, exported.graph_signature.user_inputs
        self._graph = graph
        same = _skip_dropout(graph)
        self._position = {node: i for i, node in enumerate(graph.nodes)}
        self._memory = {
            node: frozenset(same.get(at, at) for at in _memory(node))
            for node in graph.nodes
        }
        self._sized, self._fixed = _evaluated(graph, inputs)
        self._functional_ops = {
            f"aten.{row.inplace_name}": row.overload()
            for row in operators().values()
            if row.inplace_name
        } | {_DROPOUT: _aten.dropout.default}

    def is_sound(self) -> bool:
        """Returns True if :meth:`rewrite` preserves the results."""
        return all(
            self._is_supported(node)
            for node in self._graph.nodes
            if node.op not in ("placeholder", "output")
        )

    def rewrite(self) -> None:
        for node in list(self._graph.nodes):
            name = str(node.target)
            if node in self._fixed:
                continue
            if name in self._functional_ops:
                node.target = self._functional_ops[name]
            elif name in _DECOMPOSED_ALONE:
                self._decompose(node)
            elif name == _BATCH_NORM:
                _rewrite_batch_norm(node)
            elif name == _CONTIGUOUS:
                self._rewrite_contiguous(node)
            elif name in _RESHAPES:
                self._rewrite_reshape(node)
            elif name in _CONVERSIONS:
                self._rewrite_conversion(node)
        self._graph.eliminate_dead_code()

    def _is_supported(self, node: fx.Node) -> bool:
        name = str(node.target)
        if is_size(node) or node.target is operator_module.getitem:
            return True
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        if node in self._sized or node in self._fixed:
            return True  # it is evaluated
        if name == _DROPOUT and all(node.args[1:3]):
            return False
        if name in self._functional_ops:
            return self._is_write_unobserved(node)
        if name == _BATCH_NORM:
            mean, var, training = node.args[3:6]
            return not training and mean is not None and var is not None
        if name in _RESHAPES:
            return sum(not isinstance(s, int) for s in _shape(node)) <= 1
        if name in _CONVERSIONS:
            return _keeps_layout(node)
        if name in _DECOMPOSED_ALONE:
            return True
        if node.target._schema.is_mutable or name in DECOMPOSED:
            return False
        if torch.Tag.maybe_aliasing_or_mutating in node.target.tags:
            return is_identity(node)
        return name in ASSERTIONS or is_known(name)

    def _is_write_unobserved(self, node: fx.Node) -> bool:
        """Returns True if later calls read the written memory only through
        this call's result.

        All tensors must share a dtype, so that the functional operator has
        the same result dtype.
        """
        written = node.args[0]
        assert isinstance(written, fx.Node)
        dtypes = {tensor.meta["val"].dtype for tensor in _tensors(node)}
        if len(dtypes) > 1 or self._memory[node] != self._memory[written]:
            return False
        position = self._position[node]
        return all(
            self._fills_memory(other)
            and all(self._position[user] <= position for user in other.users)
            for other in list(self._position)[:position]
            if self._memory[other] & self._memory[node]
        )

    def _fills_memory(self, node: fx.Node) -> bool:
        """Returns True if a call allocates its memory or overwrites all."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        name = str(node.target)
        if name in _DECOMPOSED_ALONE:
            return False
        return (
            name in self._functional_ops
            or name == _CONTIGUOUS
            or not any(a.alias_info for a in node.target._schema.arguments)
        )

    def _decompose(self, node: fx.Node) -> None:
        """Replaces a call by those that torch decomposes it to."""
        sources = node.all_input_nodes
        traced = _traced(node)
        inputs = traced.find_nodes(op="placeholder")
        copies = dict(zip(inputs, sources, strict=True))
        with self._graph.inserting_before(node):
            result = self._graph.graph_copy(traced, copies)
        assert isinstance(result, fx.Node)
        for copy in {*copies.values()}.difference(sources):
            copy.meta = {**node.meta, "val": copy.meta["val"]}
        self._memory[result] = self._memory[node]
        node.replace_all_uses_with(result)

    def _rewrite_contiguous(self, node: fx.Node) -> None:
        (source,) = node.all_input_nodes
        if self._memory[node] == self._memory[source]:
            node.target, node.kwargs = _aten.alias.default, {}
        else:
            node.target = _aten.clone.default
            node.kwargs = {
                "memory_format": torch.contiguous_format,
                **node.kwargs,
            }

    def _rewrite_conversion(self, node: fx.Node) -> None:
        source, dtype = node.args[0], node.meta["val"].dtype
        assert isinstance(source, fx.Node)
        if self._memory[node] == self._memory[source]:
            node.target, node.kwargs = _aten.alias.default, {}
        else:
            node.target, node.kwargs = _aten._to_copy.default, {"dtype": dtype}
        node.args = (source,)

    def _rewrite_reshape(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        is_view = self._memory[node] == self._memory[source]
        if not is_view:
            with self._graph.inserting_before(node):
                source = self._copy(source, node)
        sizes = [s if isinstance(s, int) else -1 for s in _shape(node)]
        node.args, node.kwargs = (source, sizes), {}
        node.target = (_aten.view if is_view else _aten._unsafe_view).default

    def _copy(self, source: fx.Node, node: fx.Node) -> fx.Node:
        copy: fx.Node = self._graph.call_function(
            _aten.clone.default,
            (source,),
            {"memory_format": torch.contiguous_format},
        )
        copy.meta = {**node.meta, "val": source.meta["val"]}
        return copy


def _skip_dropout(graph: fx.Graph) -> dict[int, int]:
    """Replaces results of inactive dropout by its input.

    It returns its input, but torch before 2.11 exports a copy.

    Returns:
        Ids of the storages of such copies, and of what they are copies of.
    """
    same: dict[int, int] = {}
    for node in graph.nodes:
        if str(node.target) == "aten.dropout.default" and is_identity(node):
            (source,) = node.all_input_nodes
            (copy,), (original,) = _memory(node), _memory(source)
            same[copy] = same.get(original, original)
            node.replace_all_uses_with(
                source, delete_user_cb=lambda user: user.op != "output"
            )
    return same


def _traced(node: fx.Node) -> fx.Graph:
    """Returns the decomposition of a call, with its tensors as inputs."""
    # Imported here, because that takes a third of a second.
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    sources = node.all_input_nodes

    def call(*values: Any) -> Any:
        known: Any = dict(zip(sources, values, strict=True))
        given = node.args, dict(node.kwargs)
        args, kwargs = fx.map_arg(given, known.get)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    values = [source.meta["val"] for source in sources]
    # Without Python's dispatch some releases refuse symbolic sizes.
    with node.meta["val"].fake_mode, enable_python_dispatcher():
        graph: fx.Graph = make_fx(call, _decompositions())(*values).graph
    return graph


def _rewrite_batch_norm(node: fx.Node) -> None:
    tensors, (_, momentum, eps, _) = node.args[:5], node.args[5:]
    node.target = _aten._native_batch_norm_legit_no_training.default
    node.args = (*tensors, momentum, eps)


def _evaluated(
    graph: fx.Graph, inputs: Collection[Any]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Returns calls that write nothing and do not read the samples.

    The first ones depend on the batch size only, the others, with the
    weights themselves, on weights only.
    """
    sized: set[fx.Node] = set()
    fixed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and node.name not in inputs:
            fixed.add(node)
        elif not _may_write(node):
            if all(operand in sized for operand in reads(node)):
                sized.add(node)
            if is_fixed(node, fixed):
                fixed.add(node)
    return sized, fixed


def _may_write(node: fx.Node) -> bool:
    """Returns True also for norms with running statistics, of which their
    schema is silent."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    schema = node.target._schema
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, node.args, strict=False))
    return schema.is_mutable or given.get("running_mean") is not None


def _keeps_layout(node: fx.Node) -> bool:
    """Returns True if a conversion changes at most the dtype."""
    source = node.all_input_nodes[0].meta["val"]
    result = node.meta["val"]
    return bool(
        source.device == result.device
        and source.layout == result.layout
        and not any(
            isinstance(argument, torch.memory_format)
            and argument is not torch.preserve_format
            for argument in (*node.args, *node.kwargs.values())
        )
    )


def _memory(node: fx.Node) -> frozenset[int]:
    """Returns ids of the storages of a node's tensors."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return frozenset(
        value.untyped_storage()._cdata
        for value in values
        if isinstance(value, torch.Tensor)
    )


def _shape(node: fx.Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if not is_size(source)]
