"""Finds the freeze point in a ``torch.fx`` trace of a model."""

from __future__ import annotations

import operator as operator_module
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase as _Normalisation

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.fake_propagation import (
    BATCHES,
    add_field,
    propagate,
    source_of,
)
from hapi_splitter.freezing.freeze_selector import FreezeSpec, nearest, similar
from hapi_splitter.freezing.fx_trace import trace_graph
from hapi_splitter.freezing.movable_ops import (
    MOVABLE_FUNCTIONS,
    MOVABLE_METHODS,
    MOVABLE_MODULES,
)
from hapi_splitter.inputs.sample_format import SampleForm

_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class FreezePoint:
    """A position in a trace up to which all nodes are frozen.

    Args:
        name: the requested freeze.
        index: position in the trace.
        last: name of the last frozen operation.
    """

    name: str
    index: int
    last: str


class ModelTrace:
    """A trace of a model in its current mode.

    Args:
        model: a module of one tensor argument.
        form: of one sample.
        targets: see :func:`hapi_splitter.freezing.fx_trace.trace_graph`.

    Raises:
        FreezeError: ``cannot_trace``.
    """

    def __init__(
        self,
        model: nn.Module,
        form: SampleForm,
        targets: Sequence[str] | None = None,
    ) -> None:
        self._model = model
        self._form = form
        self._graph = trace_graph(model, targets)
        self._nodes = [n for n in self._graph.nodes if n.op != "output"]

    @cached_property
    def _values(self) -> list[dict[fx.Node, Any]]:
        """Values of all nodes for each of two batch sizes."""
        return [
            propagate(self._model, self._graph, self._form, batch)
            for batch in BATCHES
        ]

    def take_values(self, other: ModelTrace, point: FreezePoint) -> None:
        """Copies the values before a point from another trace.

        A model in training mode must not be run to get them: batch norm would
        count the batch in the model's own buffer.
        """
        shared = list(
            zip(
                self._nodes[: point.index + 1],
                other._nodes[: point.index + 1],
                strict=True,
            )
        )
        self._values = [
            {mine: found[theirs] for mine, theirs in shared}
            for found in other._values
        ]
        for found in self._values:
            for node in self._nodes[point.index + 1 :]:
                if source_of(node) in found:
                    add_field(node, found)

    @cached_property
    def _ends(self) -> dict[str, int]:
        """Position of the last node of each module.

        A container that is never called (``ModuleList``) ends with its last
        module.
        """
        ends: dict[str, int] = {}
        for index, node in enumerate(self._nodes):
            stack = node.meta.get("nn_module_stack") or {}
            for path, _ in stack.values():
                if path:
                    ends[path] = index
            if node.op == "call_module":
                ends[str(node.target)] = index
        called = dict(ends)
        for name, _ in self._model.named_modules():
            within = [e for n, e in called.items() if n.startswith(f"{name}.")]
            if name and within:
                ends.setdefault(name, max(within))
        return ends

    @cached_property
    def _reads(self) -> dict[str, int]:
        """Position of the last reader of each parameter."""
        return {
            str(node.target): self._last_use[node]
            for node in self._nodes
            if node.op == "get_attr"
        }

    def freeze_point(self, spec: FreezeSpec) -> FreezePoint:
        """Returns the freeze point of a specification.

        Raises:
            FreezeError: ``unknown_freeze`` or ``cannot_freeze``.
        """
        ends = self._spec_ends(spec)
        end = max(ends.values())
        if spec.exact:
            self._check_exact(spec, ends, end)
        index = self._advance(end)
        if index is None:
            live = self._live(end)
            tensors = ", ".join(self._describe(node) for node in live)
            problem = (
                f"{len(live)} tensors are needed after it ({tensors}) and "
                "only one can be sent"
                if len(live) != 1
                else f"the value needed after it, {tensors}, is not a batch "
                "of samples in one tensor"
            )
            raise FreezeError(
                "cannot_freeze",
                f"freeze {spec.text!r}: {problem}; nearest valid freeze "
                f"points: {nearest(end, self._valid)}",
            )
        self._check_shared(spec.text, index)
        return FreezePoint(spec.text, index, self._nodes[index].name)

    def _spec_ends(self, spec: FreezeSpec) -> dict[str, int]:
        ends = {}
        for name in spec.names:
            end = self._ends.get(name, self._reads.get(name))
            if end is not None:
                ends[name] = end
            elif not spec.from_function:
                raise self._unknown(name)
        if not ends:
            raise self._unknown(spec.names[0])
        return ends

    def _unknown(self, name: str) -> FreezeError:
        if name in dict(self._model.named_parameters()):
            owner = name.rpartition(".")[0]
            problem = f"this parameter belongs to {owner!r}; name {owner!r}"
        else:
            is_module = name in dict(self._model.named_modules())
            reason = "is never called" if is_module else "is not in the model"
            problem = (
                f"that module {reason}; "
                f"similar valid names: {similar(name, self._valid)}"
            )
        return FreezeError("unknown_freeze", f"freeze {name!r}: {problem}")

    def _check_exact(
        self, spec: FreezeSpec, ends: dict[str, int], end: int
    ) -> None:
        """Refuses other modules with parameters before the end."""
        others: dict[str, int] = {}
        for index, node in enumerate(self._nodes[: end + 1]):
            found = [*self._parameters([node]).values()]
            # Functions are not called for modules without parameters.
            if not spec.from_function:
                found += self._statistics(node)
            for name in found:
                if not spec.covers(name):
                    others.setdefault(spec.outside(name), index)
        if not others:
            return
        first = min(others, key=others.__getitem__)
        later = next(n for n, e in ends.items() if e >= others[first])
        names = ", ".join(repr(name) for name in others)
        remedy = (
            "freeze them too, or nothing after them"
            if spec.from_function
            else "add them to the list, or freeze nothing after them"
        )
        raise FreezeError(
            "cannot_freeze",
            f"freeze: {later!r} is frozen, but trained modules run before "
            f"its end: {names}; {remedy}. A single name freezes everything "
            f"before its end; nearest: "
            f"{nearest(others[first], self._valid)}",
        )

    def default_freeze(self) -> str:
        """Returns the last freezable module before the last Linear.

        Of several with the same end, the outermost.
        """
        last = self._head()
        best: tuple[int, int, str] | None = None
        for name, end in self._ends.items():
            module = self._model.get_submodule(name)
            index = self._advance(end) if end < last else None
            trained = any(True for _ in module.parameters())
            if index is not None and index < last and trained:
                found = (index, -name.count("."), name)
                best = found if best is None else max(best, found)
        if best is not None:
            return best[2]
        raise FreezeError(
            "cannot_freeze",
            f"{type(self._model).__name__} has no freeze point before its "
            "last linear layer; name a module",
        )

    def _head(self) -> int:
        """Returns the position of the last Linear.

        Without one, that of the last module with parameters.
        """
        trained = {
            index: self._model.get_submodule(str(node.target))
            for index, node in enumerate(self._nodes)
            if node.op == "call_module"
        }
        linear = [i for i, m in trained.items() if _has_linear(m)]
        others = [i for i, m in trained.items() if list(m.parameters())]
        return max(linear or others, default=0)

    @cached_property
    def _valid(self) -> dict[str, int]:
        """Modules that can be frozen, with their ends."""
        return {
            name: end
            for name, end in self._ends.items()
            if self._advance(end) is not None
        }

    def _advance(self, index: int) -> int | None:
        """Returns the last valid position reachable over movable nodes."""
        best = index if self._sole(index) is not None else None
        for later in range(index + 1, len(self._nodes)):
            if not self._movable(self._nodes[later]):
                break
            if self._sole(later) is not None:
                best = later
        return best

    def _movable(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            module = self._model.get_submodule(str(node.target))
            return isinstance(module, MOVABLE_MODULES)
        if node.op == "call_method":
            return node.target in MOVABLE_METHODS
        return node.op == "call_function" and node.target in MOVABLE_FUNCTIONS

    def _live(self, index: int) -> list[fx.Node]:
        """Returns nodes up to ``index`` whose values are used after it."""
        return [
            node
            for node in self._nodes[: index + 1]
            if self._last_use[node] > index and node in self._crossing
        ]

    @cached_property
    def _crossing(self) -> set[fx.Node]:
        """Nodes that must be sent if they are used after a split."""
        return {
            node
            for node in self._nodes
            if node.op != "get_attr" and not self._is_size(node)
        }

    @cached_property
    def _last_use(self) -> dict[fx.Node, int]:
        positions = {node: i for i, node in enumerate(self._graph.nodes)}
        return {
            node: max(
                (positions[u] for u in node.users if not self.is_field(u)),
                default=-1,
            )
            for node in self._nodes
        }

    def _sole(self, index: int) -> fx.Node | None:
        live = self._live(index)
        if len(live) != 1:
            return None
        values = [found.get(live[0]) for found in self._values]
        if not all(isinstance(value, torch.Tensor) for value in values):
            return None
        batched = all(
            list(value.shape[:1]) == [batch]
            for value, batch in zip(values, BATCHES, strict=True)
            if isinstance(value, torch.Tensor)
        )
        return live[0] if batched else None

    def _is_size(self, node: fx.Node) -> bool:
        return all(
            node in found and isinstance(found[node], _PLAIN)
            for found in self._values
        )

    def is_field(self, node: fx.Node) -> bool:
        """Returns True if a node reads a constant plain value of a structure.

        The structure need not be sent for it.
        """
        source = source_of(node)
        return (
            source is not None
            and self._is_size(node)
            and len({found[node] for found in self._values}) == 1
            and not any(
                isinstance(found[source], torch.Tensor)
                for found in self._values
            )
        )

    def _describe(self, node: fx.Node) -> str:
        value = self._values[0].get(node)
        if isinstance(value, torch.Tensor):
            return f"{node.name} {list(value.shape[1:])}"
        return f"{node.name} ({type(value).__name__})"

    def _check_shared(self, name: str, index: int) -> None:
        frozen = self._parameters(self._nodes[: index + 1])
        trained = self._parameters(self._nodes[index + 1 :])
        shared = frozen.keys() & trained.keys()
        if shared:
            raise FreezeError(
                "cannot_freeze",
                f"freeze {name!r}: parameter {frozen[shared.pop()]!r} is "
                "used before and after it, and cannot be both frozen and "
                "trained",
            )

    def _parameters(self, nodes: Sequence[fx.Node]) -> dict[int, str]:
        found: dict[int, str] = {}
        for node in nodes:
            target = str(node.target)
            if node.op == "call_module":
                module = self._model.get_submodule(target)
                for name, parameter in module.named_parameters(target):
                    found[id(parameter)] = name
            elif node.op == "get_attr":
                value = operator_module.attrgetter(target)(self._model)
                if isinstance(value, nn.Parameter):
                    found[id(value)] = target
        return found

    def _statistics(self, node: fx.Node) -> list[str]:
        """Returns names of running statistics, which training changes."""
        if node.op != "call_module":
            return []
        path = str(node.target)
        return [
            f"{path}.{name}.running_mean" if name else f"{path}.running_mean"
            for name, module in self._model.get_submodule(path).named_modules()
            if isinstance(module, _Normalisation)
            and module.running_mean is not None
        ]

    @property
    def nodes(self) -> Sequence[fx.Node]:
        """All nodes but the output, in order of execution."""
        return self._nodes

    @property
    def result(self) -> Any:
        """The trace's result: a node, or nodes in a structure."""
        return next(n for n in self._graph.nodes if n.op == "output").args[0]

    @property
    def model(self) -> nn.Module:
        return self._model

    def boundary(self, point: FreezePoint) -> fx.Node:
        """Returns the one tensor that is sent.

        Raises:
            FreezeError: ``cannot_freeze``; in training mode a model may
                read more after the point than in eval mode.
        """
        crossing = self._sole(point.index)
        if crossing is None:
            tensors = ", ".join(map(self._describe, self._live(point.index)))
            raise FreezeError(
                "cannot_freeze",
                f"freeze {point.name!r}: in training mode the tail also "
                f"needs other tensors than the last ({tensors}); freeze "
                "before them, or build the model without auxiliary outputs",
            )
        return crossing

    def size_of(self, node: fx.Node) -> tuple[Any, Any] | None:
        """Returns a size's values for both batch sizes; None for others."""
        if not self._is_size(node):
            return None
        return self._values[0][node], self._values[1][node]


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(inner, nn.Linear) for inner in module.modules())
