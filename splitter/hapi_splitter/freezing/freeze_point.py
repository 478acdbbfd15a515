"""Finds the freeze point in the record of a model's forward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
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
from hapi_splitter.freezing.frontier import Frontier, Shapes
from hapi_splitter.freezing.model_checks import (
    SplitWarning,
    hooks_of,
    is_users_hook,
)
from hapi_splitter.freezing.model_run import Operation
from hapi_splitter.freezing.skipped_steps import SkippedSteps
from hapi_splitter.freezing.tail_call import TailPlan

_MAX_NAMES = 4


class FreezePoints:
    """The freeze points of a model, by what its user asks for."""

    def __init__(self, boundaries: Boundaries) -> None:
        self._boundaries = boundaries
        self._model, self._run = boundaries.model, boundaries.run
        self._names: dict[int, list[str]] = {}
        for named in (
            self._model.named_parameters,
            self._model.named_buffers,
        ):
            for name, tensor in named(remove_duplicate=False):
                self._names.setdefault(id(tensor), []).append(name)

    def find(self, spec: FreezeSpec) -> list[FreezePoint]:
        """Returns the freeze points of a specification, the best first.

        The others end earlier or send more tensors.

        Raises:
            FreezeError: ``unknown_freeze`` or ``cannot_freeze``.
        """
        ends = self._spec_ends(spec)
        end = max(ends.values())
        points = self._boundaries.after(end)
        if spec.exact and not self._sends_exactly(spec, points):
            self._check_exact(spec, ends, end)
        if not points:
            live = ", ".join(map(self._describe, self._run.live(end)))
            raise cannot_freeze(
                f"freeze {spec.text!r}: the tensors that are needed after it "
                f"({live or 'none'}) cannot be sent as batches of samples; "
                f"nearest valid freeze points: {nearest(end, self._valid)}",
            )
        self._check_shared(spec.text, points[-1].step)
        self._check_trainable(spec.text, points[-1].step)
        return points

    def automatic(self) -> str:
        """Returns the deepest module before all trainable parameters.

        Raises:
            FreezeError: ``cannot_freeze`` if there is none.
        """
        first = min(
            (
                self._run.reads[name][0]
                for name, parameter in self._parameters.items()
                if parameter.requires_grad and name in self._run.reads
            ),
            default=None,
        )
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

    def plan(
        self,
        point: FreezePoint,
        spec: FreezeSpec,
        shapes: Shapes,
        merged: Set[str] = frozenset(),
    ) -> TailPlan:
        """Returns the model's forward after a point, as plain values.

        Args:
            point: where the frozen part ends.
            spec: what the user asks for.
            shapes: shapes of the results of modules, as the export shows them.
            merged: names of tensors that the mode changes.

        Raises:
            FreezeError: ``cannot_freeze`` if frozen modules leave something
                behind that the tail would not renew.
        """
        frontier = self._boundaries.proven_frontier(point.step, shapes)
        self._check_kept(frontier)
        begin = next(iter(self._run.events.values()))
        steps, entries = SkippedSteps(frontier).without(
            [position.number for position in point.positions]
        )
        inside = [f"{module}." for module in frontier.replaced_modules]
        frozen = set()
        for names in self._names.values():
            reads = [self._run.reads[n] for n in names if n in self._run.reads]
            if any(last > point.step for _, last in reads):
                continue
            is_covered = spec.exact and any(map(spec.covers, names))
            is_inside = any(name.startswith(tuple(inside)) for name in names)
            if reads or is_covered or is_inside:
                frozen.update(names)
        return TailPlan(
            point.positions,
            entries,
            steps,
            frontier.stand_ins(begin),
            begin.spec,
            tuple(dict.fromkeys(e.module for e in frontier.begins.values())),
            tuple(sorted(frontier.run_modules)),
            tuple(
                name
                for name in sorted(frozen & self._parameters.keys())
                if not name.startswith(tuple(inside))
            ),
            frozenset(frozen),
            tuple(self._watched(frozen - merged, tuple(inside))),
        )

    def _watched(
        self, frozen: Set[str], inside: tuple[str, ...]
    ) -> Iterator[str]:
        """Yields the names of frozen tensors that may not change.

        The code before the freeze point may count in buffers of its own, and
        caches may be filled that nothing reads as they are.
        """
        for name in sorted(frozen):
            is_read = name in self._run.reads
            # Statistics are written without a sign of it but for this one.
            is_count = name.endswith("num_batches_tracked")
            if name in self._parameters or (
                name.startswith(inside) and (is_read or is_count)
            ):
                yield name

    def _check_kept(self, frontier: Frontier) -> None:
        """Refuses hooks and attributes of frozen modules that keep tensors,
        and warns of other hooks of the user's."""
        hooked = {
            name
            for name in frontier.replaced_modules
            if self._modules[name]._forward_hooks
        }
        kept = frontier.kept(hooked)
        if kept is not None:
            raise cannot_freeze(
                f"a tensor that {kept!r} computes is kept after the forward, "
                "by a forward hook or in an attribute, where a loss may read "
                "it; frozen modules do not run in training, so that it would "
                "stay what it was; remove the hook or the attribute, or "
                f"freeze before {kept!r}",
            )
        others = [
            name
            for replaced in frontier.replaced_modules
            for name, module in self._modules[replaced].named_modules(
                prefix=replaced
            )
            if any(map(is_users_hook, hooks_of(module)))
        ]
        if others:
            warnings.warn(
                f"hooks of the frozen module {others[0]!r} do not run in "
                "training: what they return is in the features, but what "
                "else they do is not done; remove them if a loss or a report "
                "needs that",
                SplitWarning,
                stacklevel=2,
            )

    def _spec_ends(self, spec: FreezeSpec) -> dict[str, int]:
        ends = {}
        for name in spec.names:
            if name in self._ends:
                ends[name] = self._ends[name]
            elif name in self._run.reads and self._is_of_container(name):
                ends[name] = self._run.reads[name][1]
            elif not spec.from_function:
                raise self._unknown(name)
            num_calls = len(self._run.spans.get(name, ()))
            if num_calls > 1 and not spec.exact:
                raise cannot_freeze(
                    f"freeze {name!r}: it runs {num_calls} times in one "
                    "forward; name a module that runs once, such as "
                    f"{nearest(ends[name], self._valid)}",
                )
        if not ends:
            raise self._unknown(spec.names[0])
        return ends

    def _is_of_container(self, name: str) -> bool:
        owner = self._modules[name.rpartition(".")[0]]
        return owner is self._model or any(True for _ in owner.children())

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

    def _check_exact(
        self, spec: FreezeSpec, ends: dict[str, int], end: int
    ) -> None:
        """Refuses other modules with parameters before the end."""
        others: dict[str, int] = {}
        for step, event in enumerate(self._run.steps[: end + 1]):
            if not isinstance(event, Operation):
                continue
            for name in sorted(event.parameters):
                is_statistic = name.endswith("running_mean")
                is_parameter = name in self._parameters
                # Functions are not called for modules without parameters.
                counts = is_parameter or (
                    is_statistic and not spec.from_function
                )
                if counts and not any(map(spec.covers, self._aliases(name))):
                    others.setdefault(spec.outside(name), step)
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
        raise cannot_freeze(
            f"freeze: {later!r} is frozen, but trained modules run before "
            f"its end: {names}; {remedy}. A single name freezes everything "
            f"before its end; nearest: "
            f"{nearest(others[first], self._valid)}",
        )

    def _aliases(self, name: str) -> list[str]:
        return next(names for names in self._names.values() if name in names)

    @cached_property
    def _parameters(self) -> Mapping[str, nn.Parameter]:
        return dict(self._model.named_parameters(remove_duplicate=False))

    def _check_shared(self, freeze: str, step: int) -> None:
        for names in self._names.values():
            reads = [self._run.reads[n] for n in names if n in self._run.reads]
            if not reads or names[0] not in self._parameters:
                continue
            is_both = min(reads)[0] <= step < max(r for _, r in reads)
            if is_both and self._parameters[names[0]].requires_grad:
                raise cannot_freeze(
                    f"freeze {freeze!r}: parameter {names[0]!r} is used "
                    "before and after it, and cannot be both frozen and "
                    "trained; freeze elsewhere, or set requires_grad_(False) "
                    "on it",
                )

    def _check_trainable(self, freeze: str, step: int) -> None:
        """Refuses trainable parameters among parameters that are not.

        A model whose parameters all have ``requires_grad`` says nothing about
        what to train, also not if only its position tables are fixed.
        """
        trainable, has_frozen = [], False
        for name, parameter in self._parameters.items():
            if self._run.reads.get(name, (step + 1, 0))[0] > step:
                continue
            if parameter.requires_grad:
                trainable.append(name)
            else:
                has_frozen |= not self._is_table(name)
        if not trainable or not has_frozen:
            return
        try:
            earlier = f"freeze {self.automatic()!r}, the last module before it"
        except FreezeError:
            earlier = "freeze nothing"
        shown = ", ".join(map(repr, trainable[:_MAX_NAMES]))
        more = len(trainable) - _MAX_NAMES
        raise cannot_freeze(
            f"freeze {freeze!r}: {len(trainable)} trainable parameters are "
            f"used before its end and would not be trained ({shown}"
            f"{f' and {more} more' if more > 0 else ''}); {earlier}, or set "
            "requires_grad_(False) on them",
        )

    def _is_table(self, name: str) -> bool:
        owner = self._model.get_submodule(name.rpartition(".")[0])
        return isinstance(owner, nn.Embedding) or self._is_of_container(name)

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
        for points_at in (self._boundaries.single, self._boundaries.several):
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
            if self._boundaries.after(end)
        }

    def _describe(self, number: int) -> str:
        for event in self._run.events.values():
            indexes = indexes_of(event.values, number)
            if indexes:
                shape = list(event.values[indexes[0]].shape[1:])
                return f"{event.module or 'the input'} {shape}"
        return "a tensor computed between modules"
