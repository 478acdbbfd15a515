"""Stand-ins for the results of modules before the freeze point.

A stand-in has the shape and dtype of the module's result but takes no memory
and no computation: one NaN, expanded. If it ever reached the loss, the loss
would be NaN. See :mod:`hapi_splitter.freezing.tail`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hapi_splitter.freezing.model_run import (
    ModelRun,
    ModuleEvent,
    Operation,
    Recorded,
)
from hapi_splitter.freezing.structures import unflatten
from hapi_splitter.graph.program import Affine

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class TensorForm:
    """A tensor's shape for any batch size, and its dtype."""

    shape: tuple[int | Affine, ...]
    dtype: torch.dtype

    def sizes(self, batch: int) -> list[int]:
        return [
            size.at(batch) if isinstance(size, Affine) else size
            for size in self.shape
        ]

    @property
    def is_batch(self) -> bool:
        """True if the first dimension is the batch, and no other grows."""
        first, *others = self.shape or (0,)
        return first == Affine(1) and all(type(n) is int for n in others)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return tuple(size for size in self.shape[1:] if type(size) is int)

    def filled(
        self, value: float, batch: int, device: torch.device
    ) -> torch.Tensor:
        """Returns a tensor of one value, which takes no memory."""
        if not self.dtype.is_floating_point:
            value = 0 if value != value else int(value)
        single = torch.full((), value, dtype=self.dtype, device=device)
        return single.expand(self.sizes(batch))


@dataclass(frozen=True)
class StandIn:
    """The results of one module before the freeze point.

    Args:
        module: dotted name.
        values: flattened results of each call, tensors as
            :class:`TensorForm`.
        specs: structure of the results of each call.
        is_written: True if the model writes to the tensors.
    """

    module: str
    values: tuple[tuple[Any, ...], ...]
    specs: tuple[pytree.TreeSpec, ...]
    is_written: bool

    @property
    def is_mutable(self) -> bool:
        """True if code may change a result: each call needs its own."""
        kinds = (None, tuple)
        return self.is_written or any(s.type not in kinds for s in self.specs)

    def result(
        self, call: int, value: float, batch: int, device: torch.device
    ) -> Any:
        """Returns the result of a call, with tensors of one value."""
        leaves = [
            self._filled(each, value, batch, device)
            for each in self.values[call]
        ]
        return unflatten(leaves, self.specs[call])

    def _filled(
        self, each: Any, value: float, batch: int, device: torch.device
    ) -> Any:
        if isinstance(each, TensorForm):
            filled = each.filled(value, batch, device)
            # Expanded memory cannot be written.
            return filled.contiguous() if self.is_written else filled
        return each.at(batch) if isinstance(each, Affine) else each


class Frontier:
    """The module calls that end before a step and need not run again.

    They are the outermost ones, except those whose results cannot be
    described for any batch size; of these the modules inside are replaced.

    Args:
        runs: records of forwards of two batch sizes.
        batches: the two batch sizes.
        step: of the freeze point, in the first record.

    Attributes:
        ends: ends of the replaced calls, by step.
        begins: begins of the calls that go on after the step, by step.
        run_modules: modules that end before the step and run nevertheless.
    """

    def __init__(
        self, runs: Sequence[ModelRun], batches: Sequence[int], step: int
    ) -> None:
        self._runs = runs
        self._batches = batches
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
            return (UNKNOWN,)
        return self._all_described(event.values, other.values)

    def described_result(self, step: int) -> tuple[Any, ...]:
        """Returns an operation's results for any batch size."""
        steps = [
            run.steps[step] for run in self._runs if step < len(run.steps)
        ]
        first, *others = (
            each for each in steps if isinstance(each, Operation)
        )
        if [each.name for each in others] != [first.name]:
            return (UNKNOWN,)
        return self._all_described(first.values, others[0].values)

    def _all_described(
        self, first: Sequence[Any], second: Sequence[Any]
    ) -> tuple[Any, ...]:
        return tuple(
            _described(*pair, self._batches)
            for pair in zip(first, second, strict=True)
        )

    def _is_describable(self, module: str) -> bool:
        numbers = []
        for _, end in self._runs[0].spans[module]:
            event = self._runs[0].events[end]
            if UNKNOWN in self.described(event):
                return False
            numbers += [
                value.number
                for value in event.values
                if isinstance(value, Recorded)
            ]
        return bool(numbers) and None not in numbers

    @property
    def stand_ins(self) -> tuple[StandIn, ...]:
        by_module: dict[str, list[ModuleEvent]] = {}
        for event in self.ends.values():
            by_module.setdefault(event.module, []).append(event)
        return tuple(
            StandIn(
                module,
                tuple(self.described(event) for event in events),
                tuple(event.spec for event in events),
                any(self._is_written(event) for event in events),
            )
            for module, events in by_module.items()
        )

    def _is_written(self, event: ModuleEvent) -> bool:
        """Returns True if code that runs again writes to a result."""
        return any(
            not any(begin < step < end for begin, end in self._spans)
            for value in event.values
            if isinstance(value, Recorded)
            for step in self._runs[0].written.get(value.memory, ())
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
    if isinstance(first, _PLAIN) and type(first) is type(second):
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
