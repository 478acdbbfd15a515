"""Finds positions in a forward at which its frozen part can end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from hapi_splitter.freezing.frontier import Frontier, Shapes
from hapi_splitter.freezing.model_run import (
    ALIAS,
    ModuleEvent,
    Operation,
    Recorded,
)
from hapi_splitter.freezing.run_pair import RunPair
from hapi_splitter.freezing.stand_ins import TensorForm
from hapi_splitter.freezing.tensor_positions import TensorPosition

_MOVABLE_OPERATIONS = frozenset(
    {
        "__add__",
        "__getitem__",
        "T",
        "__iadd__",
        "__radd__",
        "adaptive_avg_pool2d",
        "add",
        "add_",
        ALIAS,
        "avg_pool2d",
        "contiguous",
        "data",
        "detach",
        "elu",
        "flatten",
        "gelu",
        "hardsigmoid",
        "hardswish",
        "leaky_relu",
        "max_pool2d",
        "mT",
        "mean",
        "permute",
        "relu",
        "relu6",
        "relu_",
        "reshape",
        "sigmoid",
        "silu",
        "squeeze",
        "tanh",
        "transpose",
        "unsqueeze",
        "view",
    }
)
"""Torch functions over which the freeze point may move: deterministic, and
without parameters or numbers that training could change."""

_MOVABLE_MODULES = (
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.ReLU,
    nn.ReLU6,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.SiLU,
    nn.GELU,
    nn.Mish,
    nn.ELU,
    nn.LeakyReLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
    nn.Flatten,
    nn.Unflatten,
    nn.Identity,
)


@dataclass(frozen=True)
class FreezePoint:
    """A module event at which the frozen region ends.

    Args:
        step: step of the event in the record.
        positions: tensors that are sent; the last is of the event.
    """

    step: int
    positions: tuple[TensorPosition, ...]


class Boundaries:
    """The positions at which the frozen part of a model's forward can end.

    Args:
        model: the model of the records.
        pair: records of forwards of two batch sizes, in eval mode.

    Attributes:
        model: the model of the records.
        run: record of the first batch size.
    """

    def __init__(self, model: nn.Module, pair: RunPair) -> None:
        self.model = model
        self.run = pair.first
        self._pair = pair
        self._frontiers: dict[int, Frontier] = {}

    def frontier(self, step: int) -> Frontier:
        """Returns the module calls that end before a step."""
        if step not in self._frontiers:
            self._frontiers[step] = Frontier(self._pair, step)
        return self._frontiers[step]

    def proven_frontier(self, step: int, shapes: Shapes) -> Frontier:
        """Returns those whose results have shapes known by an export."""
        return Frontier(self._pair, step, shapes)

    def after(self, end: int) -> list[FreezePoint]:
        """Returns the freeze points at or after a step, the best first.

        Without any, those of an earlier module after which the same tensors
        are needed: an outer module may return what cannot be described, such
        as the caches of a decoder.
        """
        live = self.run.live(end)
        for step in reversed(range(end + 1)):
            if self.run.live(step) != live:
                break
            if step == end or step in self.run.events:
                points = self.single(step)[::-1] or self.several(step)
                if points:
                    return points
        return []

    def single(self, end: int) -> list[FreezePoint]:
        """Returns points with one tensor, over movable steps after an end."""
        points: list[FreezePoint] = []
        sent = None  # number of the last point's tensor
        for step in range(end, len(self.run.steps) - 1):
            event = self.run.steps[step]
            if step > end and not _is_movable(event):
                break
            live = self.run.live(step)
            position = (
                self._sole_position(step, *live) if len(live) == 1 else None
            )
            # Code after a tensor's earliest position runs on the features.
            if position is not None and live != sent:
                sent = live
                points.append(FreezePoint(step, (position,)))
            if step > end and not self._is_passable(event):
                break
        return points

    def _sole_position(self, step: int, number: int) -> TensorPosition | None:
        """Returns the position of the only tensor needed after a step."""
        event = self.run.steps[step]
        indexes = indexes_of(event.values, number)
        if not indexes or getattr(event, "name", "") == ALIAS:
            return None
        if isinstance(event, Operation):
            return self._operation_position(event, step, indexes, number)
        # An argument is replaced only inside the module that it is given to.
        end = self.run.spans[event.module][event.call][1]
        if not event.is_end and self.run.last_use[number] > end:
            return None
        return self._position(step, indexes, number)

    def _operation_position(
        self,
        operation: Operation,
        step: int,
        indexes: tuple[int, ...],
        number: int,
    ) -> TensorPosition | None:
        is_in_place = number in operation.reads
        if is_in_place and not operation.name.startswith("__i"):
            return None  # its result is not what the code goes on with
        frontier = self.frontier(step)
        form = frontier.described_result(step)[indexes[0]]
        if not isinstance(form, TensorForm) or not form.is_batch:
            return None
        anchor = max((*frontier.ends, *frontier.begins))
        event = self.run.events[anchor]
        count = sum(
            isinstance(later, Operation) and later.name != ALIAS
            for later in self.run.steps[anchor : step + 1]
        )
        return TensorPosition(
            event.module,
            event.call,
            event.is_end,
            indexes,
            form,
            number,
            count,
        )

    def _position(
        self, step: int, indexes: tuple[int, ...], number: int
    ) -> TensorPosition | None:
        """Returns a position for features; None if no batch can be sent."""
        event = self.run.events[step]
        described = self._pair.described(event)
        form = described[indexes[0]] if len(described) > indexes[0] else None
        if not isinstance(form, TensorForm) or not form.is_batch:
            return None
        return TensorPosition(
            event.module, event.call, event.is_end, indexes, form, number
        )

    def _is_passable(self, event: Operation | ModuleEvent) -> bool:
        """Returns True if the freeze point may move over a module event."""
        if isinstance(event, Operation):
            return True
        module = self.model.get_submodule(event.module)
        if module._forward_hooks or module._forward_pre_hooks:
            return False
        if event.is_end or isinstance(module, _MOVABLE_MODULES):
            return True
        has_parts = any(True for _ in module.children())
        return has_parts and "forward" not in vars(module)

    def several(self, end: int) -> list[FreezePoint]:
        """Returns points at an end from which several tensors are sent.

        They send the tensors themselves, or what the model's code computes
        them from. The one that sends less is first.
        """
        step = next(s for s in self.run.events if s >= end)
        # Code such as torch.vmap reads tensors unseen.
        live = self.run.live(step) or {
            value.number
            for value in self.run.events[step].values
            if isinstance(value, Recorded) and value.number is not None
        }
        frontier = self.frontier(step)
        root = next(iter(frontier.begins), None)
        origins = dict(frontier.ends)
        if root is not None:
            origins[root] = frontier.begins[root]
        points = []
        for numbers, events in (
            (live, {**frontier.ends, **frontier.begins}),
            (self._origins(live, origins), origins),
        ):
            positions = self._all_positions(numbers, events, step)
            if positions:
                points.append(FreezePoint(step, tuple(positions)))
        return sorted(points, key=_num_values)

    def _all_positions(
        self, numbers: Set[int], events: Mapping[int, ModuleEvent], step: int
    ) -> list[TensorPosition]:
        """Returns positions of all tensors, that of ``step`` last, or none."""
        by_number: dict[int, tuple[int, TensorPosition]] = {}
        for number in numbers:
            for begin in sorted(events):
                indexes = indexes_of(events[begin].values, number)
                if not indexes:
                    continue
                position = self._position(begin, indexes, number)
                if position is not None:
                    by_number.setdefault(number, (begin, position))
        steps = [first for first, _ in by_number.values()]
        if numbers - by_number.keys() or step not in steps:
            return []
        return [
            position
            for _, position in sorted(by_number.values(), key=itemgetter(0))
        ]

    def _origins(
        self, numbers: Set[int], events: Mapping[int, ModuleEvent]
    ) -> set[int]:
        """Returns the results of modules that tensors are computed from."""
        known = {
            value.number
            for event in events.values()
            for value in event.values
            if isinstance(value, Recorded)
        }
        pending, origins = [*numbers], set()
        seen = set()
        while pending:
            number = pending.pop()
            if number in seen:
                continue
            seen.add(number)
            if number in known:
                origins.add(number)
            else:
                pending += self._read_by_producer.get(number, ())
        return origins

    @cached_property
    def _read_by_producer(self) -> Mapping[int, frozenset[int]]:
        """For each tensor, those that the operation reads that makes it."""
        reads: dict[int, frozenset[int]] = {}
        for step in self.run.steps:
            if isinstance(step, Operation):
                for value in step.values:
                    if (
                        isinstance(value, Recorded)
                        and value.number is not None
                    ):
                        reads.setdefault(value.number, step.reads)
        return reads


def _num_values(point: FreezePoint) -> int:
    return sum(
        torch.Size(position.form.sample_shape).numel()
        for position in point.positions
    )


def indexes_of(values: Sequence[Any], number: int) -> tuple[int, ...]:
    """Returns the positions of a tensor among values."""
    return tuple(
        index
        for index, value in enumerate(values)
        if isinstance(value, Recorded) and value.number == number
    )


def _is_movable(step: Operation | ModuleEvent) -> bool:
    if isinstance(step, ModuleEvent):
        return True
    # Another tensor may be another one in training, such as noise.
    return step.name in _MOVABLE_OPERATIONS and not step.has_other_tensors
