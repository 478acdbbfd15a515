"""Lists what the tail of a model need not compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hapi_splitter.freezing.frontier import Frontier
from hapi_splitter.freezing.model_run import (
    ALIAS,
    ModuleEvent,
    Operation,
    Recorded,
)
from hapi_splitter.freezing.run_pair import UNKNOWN
from hapi_splitter.freezing.stand_ins import (
    Answer,
    Entry,
    ModuleResult,
    OtherTensor,
    OtherValue,
    SkippedOperation,
    SkippedStep,
    StandIn,
    VaryingValue,
    comparable,
)
from hapi_splitter.graph.program import Ref


class SkippedSteps:
    """The results of replaced modules, and the operations on them.

    Args:
        frontier: the replaced modules.
    """

    def __init__(self, frontier: Frontier) -> None:
        self._frontier = frontier
        self._pair = frontier.pair
        self._aliases: dict[int, int] = {}

    def without(
        self, sent: Sequence[int]
    ) -> tuple[tuple[SkippedStep, ...], tuple[Entry, ...]]:
        """Returns what the tail does not compute, in order.

        Args:
            sent: numbers of the tensors that are sent.

        Returns:
            The steps, and where each tensor that is sent enters.
        """
        steps = list(self._all_steps())
        numbers = [_numbers(step) for step in steps]
        sent = [self._original(number) for number in sent]
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

    def _all_steps(self) -> Iterator[SkippedStep]:
        """Yields module results and operations outside of these modules."""
        after = self._frontier.step + 1
        spans = iter([*self._frontier.spans, (after, after)])
        begin, end = next(spans)
        for step, event in enumerate(self._pair.first.steps[:after]):
            if step in self._frontier.ends:
                assert isinstance(event, ModuleEvent)
                call = self._pair.first.events[begin]
                yield ModuleResult(
                    event.module,
                    self._arguments(
                        call.values, self._pair.other_values(call)
                    ),
                    self._frontier.stand_ins(event),
                    event.spec,
                )
                begin, end = next(spans)
            elif isinstance(event, Operation) and not begin <= step <= end:
                if event.name == ALIAS:
                    (read,) = map(self._original, event.reads)
                    self._aliases[event.values[0].number] = read
                elif event.reads:
                    yield self._operation(step)

    def _operation(self, step: int) -> SkippedOperation:
        first, other = self._frontier.operations(step)
        others = None if other is None else other.args
        args = self._arguments(first.args, others)
        if not all(isinstance(e, Recorded | None) for e in first.values):
            # Values of a tensor are not known, but a decision is.
            answer = first.values[0]
            is_same = other is not None and other.values == first.values
            if type(answer) is bool and is_same:
                return SkippedOperation(
                    first.name, args, (Answer(answer),), (None,), first.spec
                )
            args = (VaryingValue(),) * len(args)
        tensors = [
            leaf if isinstance(leaf, Recorded) else None
            for leaf in first.values
        ]
        return SkippedOperation(
            first.name,
            args,
            tuple(
                None if t is None else self._original(t.number)
                for t in tensors
            ),
            tuple(None if t is None else t.dtype for t in tensors),
            first.spec,
        )

    def _original(self, number: Any) -> Any:
        """Returns the number of the tensor that another one is the same as."""
        return self._aliases.get(number, number)

    def _arguments(
        self, first: Sequence[Any], second: Sequence[Any] | None
    ) -> tuple[Any, ...]:
        if second is None:
            return (VaryingValue(),) * len(first)
        pairs = zip(first, second, strict=True)
        return tuple(self._argument(*pair) for pair in pairs)

    def _argument(self, first: Any, second: Any) -> Any:
        if isinstance(first, Recorded):
            if first.number is None:
                return OtherTensor()
            return Ref(self._original(first.number))
        first, second = comparable(first), comparable(second)
        if isinstance(first, OtherValue):
            return first if first == second else VaryingValue()
        described = self._pair.describe(first, second)
        return VaryingValue() if described is UNKNOWN else described


def _numbers(step: SkippedStep) -> frozenset[int]:
    if isinstance(step, SkippedOperation):
        return step.numbers
    return frozenset(
        value.number for value in step.values if isinstance(value, StandIn)
    )
