"""Finding the freeze point in a ``torch.fx`` trace of a model."""

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
    """All nodes up to ``index`` are frozen.

    Args:
        name: what was asked for.
        index: position in the trace.
        last: name of the last frozen operation.
    """

    name: str
    index: int
    last: str


class ModelTrace:
    """One trace of a model in its present mode.

    Args:
        model: a module of one tensor argument.
        form: of one sample.
        targets: as for :func:`hapi_splitter.freezing.fx_trace.trace_graph`.

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
        """Every node's value for each of two batch sizes."""
        return [
            propagate(self._model, self._graph, self._form, batch)
            for batch in BATCHES
        ]

    def take_values(self, other: ModelTrace, point: FreezePoint) -> None:
        """Takes the values before a point from a trace that agrees there.

        A model in training mode must not be run for them: even without
        computing, batch norm counts its batches in the model's own buffer.
        """
        pairs = list(
            zip(
                self._nodes[: point.index + 1],
                other._nodes[: point.index + 1],
                strict=True,
            )
        )
        self._values = [
            {mine: found[theirs] for mine, theirs in pairs}
            for found in other._values
        ]
        for found in self._values:
            for node in self._nodes[point.index + 1 :]:
                if source_of(node) in found:
                    add_field(node, found)

    # Which names there are

    @cached_property
    def _ends(self) -> dict[str, int]:
        """Position of the last node of each module that is called.

        Of one that only holds others (``ModuleList``), that of the last.
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
        """Position of the last reader of each parameter that is read."""
        return {
            str(node.target): self._last_use[node]
            for node in self._nodes
            if node.op == "get_attr"
        }

    def freeze_point(self, choice: FreezeSpec) -> FreezePoint:
        """The freeze point of what was chosen.

        Raises:
            FreezeError: ``unknown_freeze`` or ``cannot_freeze``.
        """
        ends = self._chosen_ends(choice)
        end = max(ends.values())
        if choice.exact:
            self._check_exact(choice, ends, end)
        index = self._advance(end)
        if index is None:
            live = self._live(end)
            tensors = ", ".join(self._describe(node) for node in live)
            problem = (
                f"{len(live)} tensors are needed behind it ({tensors}) and "
                "only one can travel"
                if len(live) != 1
                else f"what is needed behind it, {tensors}, is not a batch "
                "of samples in one tensor"
            )
            raise FreezeError(
                "cannot_freeze",
                f"freeze {choice.text!r}: {problem}; the nearest places that "
                f"work: {nearest(end, self._valid)}",
            )
        self._check_shared(choice.text, index)
        return FreezePoint(choice.text, index, self._nodes[index].name)

    def _chosen_ends(self, choice: FreezeSpec) -> dict[str, int]:
        ends = {}
        for name in choice.names:
            end = self._ends.get(name, self._reads.get(name))
            if end is not None:
                ends[name] = end
            elif not choice.asked:
                raise self._unknown(name)
        if not ends:
            raise self._unknown(choice.names[0])
        return ends

    def _unknown(self, name: str) -> FreezeError:
        if name in dict(self._model.named_parameters()):
            owner = name.rpartition(".")[0]
            problem = f"{owner!r} takes that parameter with it; name {owner!r}"
        else:
            known = name in dict(self._model.named_modules())
            why = "is never called" if known else "is not in the model"
            problem = (
                f"that module {why}; "
                f"valid names near it: {similar(name, self._valid)}"
            )
        return FreezeError("unknown_freeze", f"freeze {name!r}: {problem}")

    def _check_exact(
        self, choice: FreezeSpec, ends: dict[str, int], end: int
    ) -> None:
        """That nothing else with parameters runs before the end."""
        others: dict[str, int] = {}
        for index, node in enumerate(self._nodes[: end + 1]):
            found = [*self._parameters([node]).values()]
            # A function was not asked for modules without parameters.
            if not choice.asked:
                found += self._statistics(node)
            for name in found:
                if not choice.covers(name):
                    others.setdefault(choice.outside(name), index)
        if not others:
            return
        first = min(others, key=others.__getitem__)
        later = next(n for n, e in ends.items() if e >= others[first])
        names = ", ".join(repr(name) for name in others)
        remedy = (
            "freeze them too, or nothing behind them"
            if choice.asked
            else "add them to the list, or freeze nothing behind them"
        )
        raise FreezeError(
            "cannot_freeze",
            f"freeze: {later!r} is frozen, but trained modules run before "
            f"its end: {names}; {remedy}. One name freezes all that runs "
            f"before its end; the nearest: "
            f"{nearest(others[first], self._valid)}",
        )

    def default_freeze(self) -> str:
        """The module with parameters that freezes most before the last Linear.

        Of several that freeze as much, the outermost.
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
            f"{type(self._model).__name__} has no place to freeze before "
            "its last linear layer; name a module",
        )

    def _head(self) -> int:
        """Position of the last Linear, else of the last with parameters."""
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
        """The modules that can be frozen, with their ends."""
        return {
            name: end
            for name, end in self._ends.items()
            if self._advance(end) is not None
        }

    # Where a trace can be split

    def _advance(self, index: int) -> int | None:
        """The furthest valid position at or movably after ``index``."""
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
        """Nodes up to ``index`` whose values are used after it."""
        return [
            node
            for node in self._nodes[: index + 1]
            if self._last_use[node] > index and node in self._crossing
        ]

    @cached_property
    def _crossing(self) -> set[fx.Node]:
        """Nodes that have to cross where they are used behind a split."""
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
        """Whether a node takes a plain value, maybe None, from a structure.

        Its value is known; the structure need not cross for it.
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
        """What training moves though it is no parameter."""
        if node.op != "call_module":
            return []
        path = str(node.target)
        return [
            f"{path}.{name}.running_mean" if name else f"{path}.running_mean"
            for name, module in self._model.get_submodule(path).named_modules()
            if isinstance(module, _Normalisation)
            and module.running_mean is not None
        ]

    # What partition.py needs

    @property
    def nodes(self) -> Sequence[fx.Node]:
        """All nodes but the output, in order of execution."""
        return self._nodes

    @property
    def result(self) -> Any:
        """What the trace returns: a node, or nodes in a structure."""
        return next(n for n in self._graph.nodes if n.op == "output").args[0]

    @property
    def model(self) -> nn.Module:
        return self._model

    def boundary(self, point: FreezePoint) -> fx.Node:
        """The one tensor that crosses.

        Raises:
            FreezeError: ``cannot_freeze``; in training mode a model may
                read more behind the point than in eval mode.
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
        """A size's values for the two batch sizes, None for no size."""
        if not self._is_size(node):
            return None
        return self._values[0][node], self._values[1][node]


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(inner, nn.Linear) for inner in module.modules())
