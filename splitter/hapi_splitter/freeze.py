"""Finding the freeze point in a ``torch.fx`` trace of a model."""

from __future__ import annotations

import difflib
import operator as operator_module
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from hapi_protocol.errors import FreezeError
from hapi_splitter.movable import (
    MOVABLE_FUNCTIONS,
    MOVABLE_METHODS,
    MOVABLE_MODULES,
)

_BATCHES = (2, 3)
_MAX_SUGGESTIONS = 5


@dataclass(frozen=True)
class FreezePoint:
    """All nodes up to ``index`` are frozen.

    Args:
        name: the module that was asked for.
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
        sample_shape: of one sample, float32.

    Raises:
        FreezeError: ``cannot_trace``.
    """

    def __init__(self, model: nn.Module, sample_shape: Sequence[int]) -> None:
        self._model = model
        self.sample_shape = tuple(sample_shape)
        try:
            self._graph = fx.Tracer().trace(model)
        except Exception as error:  # tracing runs the user's own code
            raise FreezeError(
                "cannot_trace",
                f"torch.fx cannot trace {type(model).__name__}: {error}. "
                "Move branches that depend on values into a module of "
                "their own behind the freeze point",
            ) from error
        self._nodes = [n for n in self._graph.nodes if n.op != "output"]
        self._check_signature()

    def example(self) -> torch.Tensor:
        """A batch of two samples where the model is."""
        return torch.randn(
            _BATCHES[0], *self.sample_shape, device=self._device
        )

    @property
    def _device(self) -> torch.device:
        first = next(self._model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def _check_signature(self) -> None:
        inputs = [n for n in self._nodes if n.op == "placeholder"]
        required = [n for n in inputs if not n.args]
        if len(required) > 1 or not inputs:
            raise FreezeError(
                "cannot_trace",
                f"{type(self._model).__name__} takes {len(required)} "
                "tensors; a model of one batch of samples is needed",
            )

    @cached_property
    def _values(self) -> list[dict[fx.Node, Any]]:
        """Every node's value for each of two batch sizes."""
        return [self._propagate(batch) for batch in _BATCHES]

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

    def _propagate(self, batch: int) -> dict[fx.Node, Any]:
        """Every node's value for one batch size, without computing it."""
        module = fx.GraphModule(self._model, self._graph)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        example = torch.empty(batch, *self.sample_shape, device=self._device)
        recorder = _Recorder(module, mode)
        try:
            recorder.propagate(example)
        except Exception as error:  # the user's own code again
            raise FreezeError(
                "cannot_trace",
                f"{type(self._model).__name__} does not run on a batch of "
                f"samples of shape {self.sample_shape}: {error}",
            ) from error
        return recorder.found

    # Which names there are

    @cached_property
    def _ends(self) -> dict[str, int]:
        """Position of the last node of each module that is called."""
        ends: dict[str, int] = {}
        for index, node in enumerate(self._nodes):
            stack = node.meta.get("nn_module_stack") or {}
            for path, _ in stack.values():
                if path:
                    ends[path] = index
            if node.op == "call_module":
                ends[str(node.target)] = index
        return ends

    def freeze_point(self, name: str) -> FreezePoint:
        """The freeze point of a module.

        Raises:
            FreezeError: ``unknown_freeze`` or ``cannot_freeze``.
        """
        if name not in self._ends:
            known = name in dict(self._model.named_modules())
            problem = "is never called" if known else "is not in the model"
            raise FreezeError(
                "unknown_freeze",
                f"freeze {name!r}: that module {problem}; valid names near "
                f"it: {self._suggestions(name)}",
            )
        index = self._advance(self._ends[name])
        if index is None:
            live = self._live(self._ends[name])
            tensors = ", ".join(self._describe(node) for node in live)
            raise FreezeError(
                "cannot_freeze",
                f"freeze {name!r}: {len(live)} tensors are needed behind it "
                f"({tensors}) and only one can travel; valid names near it: "
                f"{self._suggestions(name)}",
            )
        self._check_shared(name, index)
        return FreezePoint(name, index, self._nodes[index].name)

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
        linear = [i for i, m in trained.items() if isinstance(m, nn.Linear)]
        others = [i for i, m in trained.items() if list(m.parameters())]
        return max(linear or others, default=0)

    def _suggestions(self, name: str) -> str:
        valid = [
            n
            for n, end in self._ends.items()
            if self._advance(end) is not None
        ]
        near = difflib.get_close_matches(
            name, valid, _MAX_SUGGESTIONS, cutoff=0.0
        )
        return ", ".join(near) or "there are none"

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
            node: max((positions[user] for user in node.users), default=-1)
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
            for value, batch in zip(values, _BATCHES, strict=True)
            if isinstance(value, torch.Tensor)
        )
        return live[0] if batched else None

    def _is_size(self, node: fx.Node) -> bool:
        return all(
            isinstance(found.get(node), int | float | str | bool)
            for found in self._values
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
                f"needs other tensors than the last ({tensors})",
            )
        return crossing

    def size_of(self, node: fx.Node) -> tuple[Any, Any] | None:
        """A size's values for the two batch sizes, None for no size."""
        if not self._is_size(node):
            return None
        return self._values[0][node], self._values[1][node]


class _Recorder(FakeTensorProp):
    """Remembers the value of every node."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module, mode)
        self.found: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.found[n] = result
        return result
