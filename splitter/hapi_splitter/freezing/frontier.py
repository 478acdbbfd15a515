"""Finds the module calls that the tail of a model need not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import Any

from hapi_splitter.freezing.model_run import (
    ModelRun,
    ModuleEvent,
    Operation,
    Recorded,
)
from hapi_splitter.freezing.run_pair import UNKNOWN, RunPair
from hapi_splitter.freezing.stand_ins import StandIn, TensorForm

Shapes = Mapping[tuple[str, int], Sequence[Any]]
"""By module and call: of each value of the result its shape, or itself, for
any batch size."""


class Frontier:
    """The module calls that end before a step and need not run again.

    They are the outermost ones, except those whose results cannot be
    described for any batch size; of these the modules inside are replaced.

    Args:
        pair: records of forwards of two batch sizes.
        step: step of the freeze point, in the first record.
        shapes: what the export shows of results for any batch size; None
            before it, when two batch sizes have to do.

    Attributes:
        pair: as given.
        step: as given.
        spans: first and last step of the replaced calls.
        ends: ends of the replaced calls, by step.
        begins: begins of the calls that go on after the step, by step.
        run_modules: modules that end before the step and run nevertheless.
    """

    def __init__(
        self, pair: RunPair, step: int, shapes: Shapes | None = None
    ) -> None:
        self.pair = pair
        self.step = step
        self._run = pair.first
        self._shapes = shapes
        self.ends: dict[int, ModuleEvent] = {}
        self.begins: dict[int, ModuleEvent] = {}
        self.run_modules: set[str] = set()
        self.spans: list[tuple[int, int]] = []
        replaced_until = -1
        for begin, event in self._run.events.items():
            if begin > step:
                break
            if event.is_end or begin < replaced_until:
                continue
            spans = self._run.spans[event.module]
            end = spans[event.call][1]
            if end > step:
                self.begins[begin] = event
            elif spans[-1][1] <= step and self._is_describable(event.module):
                replaced_until = end
                self.spans.append((begin, end))
                self.ends[end] = self._run.events[end]
            else:
                self.run_modules.add(event.module)

    def described_result(self, step: int) -> tuple[Any, ...]:
        """Returns an operation's results for any batch size."""
        first, other = self.operations(step)
        values = None if other is None else other.values
        return self.pair.describe_all(first.values, values)

    def operations(self, step: int) -> tuple[Operation, Operation | None]:
        """Returns an operation in both records."""
        first = self.pair.first.steps[step]
        assert isinstance(first, Operation)
        other = self._others.get(step)
        is_same = (
            other is not None
            and other.name == first.name
            and len(other.args) == len(first.args)
            and other.spec == first.spec
        )
        return first, other if is_same else None

    @cached_property
    def _others(self) -> Mapping[int, Operation]:
        """Operations of the second record by steps of the first.

        Within replaced modules they may differ, as in a first forward that
        fills a cache.
        """
        steps, others = map(
            self._open_operations, (self._run, self.pair.second)
        )
        return dict(zip(steps, others.values(), strict=False))

    def _open_operations(self, run: ModelRun) -> dict[int, Operation]:
        """Returns what is done outside of replaced modules, by step."""
        operations, inside = {}, 0
        for step, event in enumerate(run.steps):
            if isinstance(event, Operation):
                if not inside and event.reads:
                    operations[step] = event
            elif (event.module, event.call) in self._replaced:
                inside += -1 if event.is_end else 1
        return operations

    @cached_property
    def _replaced(self) -> frozenset[tuple[str, int]]:
        return frozenset((e.module, e.call) for e in self.ends.values())

    def _is_describable(self, module: str) -> bool:
        has_tensors = False
        for call, (_, end) in enumerate(self._run.spans[module]):
            event = self._run.events[end]
            forms = self.pair.described(event)
            for value, form in zip(event.values, forms, strict=True):
                if isinstance(value, Recorded):
                    has_tensors = True
                    if value.number is None:
                        return False
                if form is UNKNOWN:
                    return False
            if self._shapes is not None and not _equal(
                [getattr(form, "shape", form) for form in forms],
                self._shapes.get((module, call), ()),
            ):
                return False
        return has_tensors

    @property
    def replaced_modules(self) -> list[str]:
        return list(dict.fromkeys(e.module for e in self.ends.values()))

    def kept(self, modules_with_hooks: Set[str]) -> str | None:
        """Returns the module of a tensor that would no longer be renewed.

        It is kept after the forward by code that the tail does not run, which
        is not known of the results of replaced modules.
        """
        for number in self._run.kept:
            step = self._run.created[number]
            for begin, end in self.spans:
                event = self._run.events[end]
                is_result = any(
                    isinstance(value, Recorded) and value.number == number
                    for value in event.values
                )
                by_others = is_result and (
                    event.module not in modules_with_hooks
                )
                if begin < step < end and not by_others:
                    return self._innermost(step)
        return None

    def _innermost(self, step: int) -> str:
        """Returns the innermost module that runs at a step."""
        spans = (
            (begin - end, name)
            for name, calls in self._run.spans.items()
            for begin, end in calls
            if begin < step < end
        )
        return max(spans)[1]

    def stand_ins(self, event: ModuleEvent) -> tuple[Any, ...]:
        """Returns an event's values with :class:`StandIn` for tensors."""
        forms = self.pair.described(event)
        return tuple(
            StandIn(value.number, form)
            if isinstance(form, TensorForm) and value.number is not None
            else form
            for value, form in zip(event.values, forms, strict=True)
        )


def _equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Compares values and their types, so that 1 is not True."""
    return len(first) == len(second) and all(
        type(a) is type(b) and a == b
        for a, b in zip(first, second, strict=True)
    )
