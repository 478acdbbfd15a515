"""Separates what the tail need not compute from what it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property
from typing import Any

from hapi_splitter.freezing.model_run import (
    ALIAS,
    ModelRun,
    ModuleEvent,
    Operation,
    Recorded,
)
from hapi_splitter.freezing.stand_ins import (
    PLAIN,
    Answer,
    Entry,
    ModuleResult,
    OtherTensor,
    OtherValue,
    SkippedOperation,
    SkippedStep,
    StandIn,
    TensorForm,
    VaryingValue,
    comparable,
)
from hapi_splitter.graph.program import Affine, Ref

Shapes = Mapping[tuple[str, int], Sequence[Any]]
"""By module and call: of each value of the result its shape, or itself, for
any batch size."""


class Frontier:
    """The module calls that end before a step and need not run again.

    They are the outermost ones, except those whose results cannot be
    described for any batch size; of these the modules inside are replaced.

    Args:
        runs: records of forwards of two batch sizes.
        batches: the two batch sizes.
        step: step of the freeze point, in the first record.
        shapes: what the export shows of results for any batch size; None
            before it, when two batch sizes have to do.

    Attributes:
        ends: ends of the replaced calls, by step.
        begins: begins of the calls that go on after the step, by step.
        run_modules: modules that end before the step and run nevertheless.
    """

    def __init__(
        self,
        runs: Sequence[ModelRun],
        batches: Sequence[int],
        step: int,
        shapes: Shapes | None = None,
    ) -> None:
        self._runs = runs
        self._batches = batches
        self._step = step
        self._shapes = shapes
        self.ends: dict[int, ModuleEvent] = {}
        self.begins: dict[int, ModuleEvent] = {}
        self.run_modules: set[str] = set()
        self._spans: list[tuple[int, int]] = []
        replaced_until = -1
        for begin, event in runs[0].events.items():
            if begin > step:
                break
            if event.is_end or begin < replaced_until:
                continue
            spans = runs[0].spans[event.module]
            end = spans[event.call][1]
            if end > step:
                self.begins[begin] = event
            elif spans[-1][1] <= step and self._is_describable(event.module):
                replaced_until = end
                self._spans.append((begin, end))
                self.ends[end] = runs[0].events[end]
            else:
                self.run_modules.add(event.module)

    def described(self, event: ModuleEvent) -> tuple[Any, ...]:
        """Returns an event's values for any batch size.

        Tensors are :class:`TensorForm`; what has no description is
        :data:`UNKNOWN`.
        """
        other = self._runs[1].find(event)
        if other is None or other.spec != event.spec:
            return (UNKNOWN,) * len(event.values)
        return tuple(
            _described(*pair, self._batches)
            for pair in zip(event.values, other.values, strict=True)
        )

    def described_result(self, step: int) -> tuple[Any, ...]:
        """Returns an operation's results for any batch size."""
        first, other = self._operations(step)
        if other is None:
            return (UNKNOWN,) * len(first.values)
        return tuple(
            _described(*pair, self._batches)
            for pair in zip(first.values, other.values, strict=True)
        )

    def _operations(self, step: int) -> tuple[Operation, Operation | None]:
        """Returns an operation in both records."""
        first = self._runs[0].steps[step]
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
        steps, others = (self._open_operations(run) for run in self._runs)
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
        for call, (_, end) in enumerate(self._runs[0].spans[module]):
            event = self._runs[0].events[end]
            forms = self.described(event)
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
        return list(
            dict.fromkeys(event.module for event in self.ends.values())
        )

    def kept(self, modules_with_hooks: Set[str]) -> str | None:
        """Returns the module of a tensor that would no longer be renewed.

        It is kept after the forward by code that the tail does not run, which
        is not known of the results of replaced modules.
        """
        for number in self._runs[0].kept:
            step = self._runs[0].created[number]
            for begin, end in self._spans:
                event = self._runs[0].events[end]
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
            for name, calls in self._runs[0].spans.items()
            for begin, end in calls
            if begin < step < end
        )
        return max(spans)[1]

    def stand_ins(self, event: ModuleEvent) -> tuple[Any, ...]:
        """Returns an event's values with :class:`StandIn` for tensors."""
        forms = self.described(event)
        return tuple(
            StandIn(value.number, form)
            if isinstance(form, TensorForm) and value.number is not None
            else form
            for value, form in zip(event.values, forms, strict=True)
        )

    def skipped(
        self, sent: Sequence[int]
    ) -> tuple[tuple[SkippedStep, ...], tuple[Entry, ...]]:
        """Returns what the tail does not compute, in order.

        Args:
            sent: numbers of the tensors that are sent.

        Returns:
            The steps, and where each tensor that is sent enters.
        """
        origins: dict[int, int] = {}
        steps = list(self._all_steps(origins))
        numbers = [_numbers(step) for step in steps]
        sent = [origins.get(number, number) for number in sent]
        last = {n: i for i, results in enumerate(numbers) for n in results}
        entries = [Entry(number, last.get(number, -1)) for number in sent]
        last_entry = max(entry.step for entry in entries)
        known = set(sent)
        for step, results in zip(steps, numbers, strict=True):
            if isinstance(step, SkippedOperation) and step.reads <= known:
                known |= results
        kept = [
            step
            for index, step in enumerate(steps)
            if index <= last_entry
            or isinstance(step, ModuleResult)
            or not step.reads <= known  # it runs on what is sent
        ]
        return tuple(kept), tuple(entries)

    def _all_steps(self, origins: dict[int, int]) -> Iterator[SkippedStep]:
        """Yields module results and operations outside of these modules.

        Args:
            origins: gets the tensor that another one is the same as.
        """
        spans = iter([*self._spans, (self._step + 1, self._step + 1)])
        begin, end = next(spans)
        for step, event in enumerate(self._runs[0].steps[: self._step + 1]):
            if step in self.ends:
                assert isinstance(event, ModuleEvent)
                yield ModuleResult(
                    event.module,
                    self._module_arguments(begin, origins),
                    self.stand_ins(event),
                    event.spec,
                )
                begin, end = next(spans)
            elif isinstance(event, Operation) and not begin <= step <= end:
                reads = [origins.get(n, n) for n in event.reads]
                if event.name == ALIAS:
                    origins[event.values[0].number] = reads[0]
                elif reads:
                    yield self._operation(step, origins)

    def _operation(
        self, step: int, origins: Mapping[int, int]
    ) -> SkippedOperation:
        first, other = self._operations(step)
        args: list[Any] = [VaryingValue()] * len(first.args)
        if other is not None:
            args = [
                self._argument(*pair, origins)
                for pair in zip(first.args, other.args, strict=True)
            ]
        if not all(isinstance(e, Recorded | None) for e in first.values):
            # Values of a tensor are not known, but a decision is.
            is_same = other is not None and other.values == first.values
            if type(first.values[0]) is bool and is_same:
                return SkippedOperation(
                    first.name,
                    tuple(args),
                    (Answer(first.values[0]),),
                    (None,),
                    first.spec,
                )
            args = [VaryingValue()] * len(args)
        values = [
            leaf if isinstance(leaf, Recorded) else None
            for leaf in first.values
        ]
        return SkippedOperation(
            first.name,
            tuple(args),
            tuple(
                None
                if leaf is None or leaf.number is None
                else origins.get(leaf.number, leaf.number)
                for leaf in values
            ),
            tuple(None if leaf is None else leaf.dtype for leaf in values),
            first.spec,
        )

    def _module_arguments(
        self, step: int, origins: Mapping[int, int]
    ) -> tuple[Any, ...]:
        first = self._runs[0].events[step]
        other = self._runs[1].find(first)
        if other is None or other.spec != first.spec:
            return (VaryingValue(),) * len(first.values)
        return tuple(
            self._argument(*pair, origins)
            for pair in zip(first.values, other.values, strict=True)
        )

    def _argument(
        self, first: Any, second: Any, origins: Mapping[int, int]
    ) -> Any:
        if isinstance(first, Recorded):
            if first.number is None:
                return OtherTensor()
            return Ref(origins.get(first.number, first.number))
        first, second = comparable(first), comparable(second)
        if isinstance(first, OtherValue):
            return first if first == second else VaryingValue()
        described = _described(first, second, self._batches)
        return VaryingValue() if described is UNKNOWN else described


def _equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Compares values and their types, so that 1 is not True."""
    return len(first) == len(second) and all(
        type(a) is type(b) and a == b
        for a, b in zip(first, second, strict=True)
    )


def _numbers(step: SkippedStep) -> frozenset[int]:
    if isinstance(step, SkippedOperation):
        return step.numbers
    return frozenset(
        value.number for value in step.values if isinstance(value, StandIn)
    )


UNKNOWN = object()


def _described(first: Any, second: Any, batches: Sequence[int]) -> Any:
    """Returns a value for any batch size from its values for two."""
    if isinstance(first, Recorded) and isinstance(second, Recorded):
        if len(first.shape) != len(second.shape):
            return UNKNOWN
        sizes = [
            _size(a, b, batches)
            for a, b in zip(first.shape, second.shape, strict=True)
        ]
        if None in sizes or first.dtype != second.dtype:
            return UNKNOWN
        return TensorForm(
            tuple(s for s in sizes if s is not None), first.dtype
        )
    if type(first) in PLAIN and type(first) is type(second):
        if type(first) is int and type(second) is int:
            size = _size(first, second, batches)
            return UNKNOWN if size is None else size
        return first if first == second else UNKNOWN
    return UNKNOWN


def _size(
    first: int, second: int, batches: Sequence[int]
) -> int | Affine | None:
    if first == second:
        return first
    slope, rest = divmod(second - first, batches[1] - batches[0])
    return None if rest else Affine(slope, first - slope * batches[0])
