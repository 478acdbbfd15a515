"""Finds the freeze point in the record of a model's forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import nn

from hapi_protocol.errors import FreezeError, cannot_freeze
from hapi_splitter.freezing.boundaries import (
    Boundaries,
    FreezePoint,
    indexes_of,
)
from hapi_splitter.freezing.freeze_selector import FreezeSpec, nearest, similar
from hapi_splitter.freezing.model_tensors import ModelTensors


class FreezePoints:
    """The freeze points of a model, by what its user asks for.

    Attributes:
        boundaries: where its frozen part can end.
        tensors: its parameters and buffers.
    """

    def __init__(self, boundaries: Boundaries) -> None:
        self.boundaries = boundaries
        self._model, self._run = boundaries.model, boundaries.run
        self.tensors = ModelTensors(self._model, self._run)

    def find(self, spec: FreezeSpec) -> list[FreezePoint]:
        """Returns the freeze points of a specification, the best first.

        The others end earlier or send more tensors.

        Raises:
            FreezeError: ``unknown_freeze`` or ``cannot_freeze``.
        """
        ends = self._spec_ends(spec)
        end = max(ends.values())
        points = self.boundaries.after(end)
        if spec.exact and not self._sends_exactly(spec, points):
            self.tensors.check_exact(spec, ends, end, self._nearest)
        if not points:
            live = ", ".join(map(self._describe, self._run.live(end)))
            raise cannot_freeze(
                f"freeze {spec.text!r}: the tensors that are needed after it "
                f"({live or 'none'}) cannot be sent as batches of samples; "
                f"nearest valid freeze points: {self._nearest(end)}",
            )
        step = points[-1].step
        self.tensors.check_shared(spec.text, step)
        self.tensors.check_trainable(spec.text, step, self.automatic)
        return points

    def automatic(self) -> str:
        """Returns the deepest module before all trainable parameters.

        Raises:
            FreezeError: ``cannot_freeze`` if there is none.
        """
        first = self.tensors.first_trainable()
        model = type(self._model).__name__
        if first is None:
            raise cannot_freeze(
                f"freeze 'auto': no parameter that {model} uses has "
                "requires_grad, so that there is nothing to train; set it on "
                "those to train, or name a module",
            )
        deepest = self._deepest(first)
        if deepest is None:
            raise cannot_freeze(
                f"freeze 'auto': no module of {model} ends before its first "
                "trainable parameter is used; set requires_grad_(False) on "
                "those to freeze, or name a module",
            )
        return deepest

    def _spec_ends(self, spec: FreezeSpec) -> dict[str, int]:
        ends = {}
        for name in spec.names:
            if name in self._ends:
                ends[name] = self._ends[name]
            elif name in self._run.reads and self.tensors.is_of_container(
                name
            ):
                ends[name] = self._run.reads[name][1]
            elif not spec.from_function:
                raise self._unknown(name)
            num_calls = len(self._run.spans.get(name, ()))
            if num_calls > 1 and not spec.exact:
                raise cannot_freeze(
                    f"freeze {name!r}: it runs {num_calls} times in one "
                    "forward; name a module that runs once, such as "
                    f"{self._nearest(ends[name])}",
                )
        if not ends:
            raise self._unknown(spec.names[0])
        return ends

    @cached_property
    def _modules(self) -> Mapping[str, nn.Module]:
        return dict(self._model.named_modules(remove_duplicate=False))

    def _unknown(self, name: str) -> FreezeError:
        if name in dict(self._model.named_parameters(remove_duplicate=False)):
            owner = name.rpartition(".")[0]
            problem = f"this parameter belongs to {owner!r}; name {owner!r}"
        else:
            reason = "is never called"
            if isinstance(self._modules.get(name), torch.jit.ScriptModule):
                reason = "is compiled by torch.jit, which hides its calls"
            problem = (
                f"that module {reason}; "
                "similar valid names: "
                f"{similar(name, self._valid, self._model)}"
            )
        return FreezeError("unknown_freeze", f"freeze {name!r}: {problem}")

    def _sends_exactly(
        self, spec: FreezeSpec, points: Sequence[FreezePoint]
    ) -> bool:
        """Returns True if a list names the tensors that are sent."""
        return len(spec.names) > 1 and any(
            {position.module for position in point.positions} == {*spec.names}
            for point in points
        )

    def default_freeze(self) -> str:
        """Returns the last freezable module before the last Linear.

        Of several with the same end, the outermost.
        """
        name = self._deepest(self._head())
        if name is None:
            raise cannot_freeze(
                f"{type(self._model).__name__} has no freeze point before its "
                "last linear layer; name a module",
            )
        return name

    def _deepest(self, limit: int) -> str | None:
        """Returns the last freezable module that ends before a step.

        It has parameters, and the fewest tensors are sent. They are several
        only if one never is enough, as with ids that a model reads again.
        """
        best: tuple[int, int, int, str] | None = None
        for points_at in (self.boundaries.single, self.boundaries.several):
            for name, end in self._ends.items():
                module = self._model.get_submodule(name)
                if end >= limit or not any(True for _ in module.parameters()):
                    continue
                points = [p for p in points_at(end) if p.step <= limit]
                if points:
                    count = min(len(point.positions) for point in points)
                    deepest = max(point.step for point in points)
                    rank = (-count, deepest, -name.count("."), name)
                    best = rank if best is None else max(best, rank)
            if best is not None:
                break
        return best and best[-1]

    def _head(self) -> int:
        """Returns the first step of the last Linear.

        Without one, that of the last module with parameters.
        """
        linear, others = [], []
        for name, spans in self._run.spans.items():
            module = self._model.get_submodule(name)
            if isinstance(module, nn.Linear):
                linear.append(spans[-1][0])
            elif any(True for _ in module.parameters(recurse=False)):
                others.append(spans[-1][0])
        return max(linear or others, default=0)

    @cached_property
    def _ends(self) -> dict[str, int]:
        """Last step of each module.

        A container that is never called (``ModuleList``) ends with its last
        module.
        """
        called = {
            name: spans[-1][1]
            for name, spans in self._run.spans.items()
            if name
        }
        ends = dict(called)
        for name, _ in self._model.named_modules():
            within = [e for n, e in called.items() if n.startswith(f"{name}.")]
            if name and within:
                ends.setdefault(name, max(within))
        return ends

    @cached_property
    def _valid(self) -> dict[str, int]:
        """Modules that can be frozen, with their ends."""
        return {
            name: end
            for name, end in self._ends.items()
            if self.boundaries.after(end)
        }

    def _nearest(self, step: int) -> str:
        return nearest(step, self._valid)

    def _describe(self, number: int) -> str:
        for event in self._run.events.values():
            indexes = indexes_of(event.values, number)
            if indexes:
                shape = list(event.values[indexes[0]].shape[1:])
                return f"{event.module or 'the input'} {shape}"
        return "a tensor computed between modules"
