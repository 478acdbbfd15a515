"""Describes values of a forward for any batch size, from records of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hapi_splitter.freezing.model_run import ModelRun, ModuleEvent, Recorded
from hapi_splitter.freezing.stand_ins import PLAIN, TensorForm
from hapi_splitter.graph.program import Affine

UNKNOWN = object()
"""Stands for what has no description."""


@dataclass(frozen=True)
class RunPair:
    """Two records of a forward, of two batch sizes.

    Args:
        first: record of the first batch size; steps and numbers are its own.
        second: record of the second batch size.
        batches: the two batch sizes.
    """

    first: ModelRun
    second: ModelRun
    batches: tuple[int, int]

    def described(self, event: ModuleEvent) -> tuple[Any, ...]:
        """Returns an event's values for any batch size.

        Tensors are :class:`TensorForm`; what has no description is
        :data:`UNKNOWN`.
        """
        return self.describe_all(event.values, self.other_values(event))

    def other_values(self, event: ModuleEvent) -> tuple[Any, ...] | None:
        """Returns an event's values in the second record, if it is there."""
        other = self.second.find(event)
        if other is None or other.spec != event.spec:
            return None
        return other.values

    def describe_all(
        self, first: Sequence[Any], second: Sequence[Any] | None
    ) -> tuple[Any, ...]:
        """Returns values for any batch size from those in both records."""
        if second is None:
            return (UNKNOWN,) * len(first)
        pairs = zip(first, second, strict=True)
        return tuple(self.describe(*pair) for pair in pairs)

    def describe(self, first: Any, second: Any) -> Any:
        """Returns a value for any batch size."""
        if isinstance(first, Recorded) and isinstance(second, Recorded):
            if len(first.shape) != len(second.shape):
                return UNKNOWN
            sizes = [*map(self._size, first.shape, second.shape)]
            if None in sizes or first.dtype != second.dtype:
                return UNKNOWN
            shape = tuple(size for size in sizes if size is not None)
            return TensorForm(shape, first.dtype)
        if type(first) not in PLAIN or type(first) is not type(second):
            return UNKNOWN
        if type(first) is int:
            size = self._size(first, second)
            return UNKNOWN if size is None else size
        return first if first == second else UNKNOWN

    def _size(self, first: int, second: int) -> int | Affine | None:
        if first == second:
            return first
        before, after = self.batches
        slope, rest = divmod(second - first, after - before)
        return None if rest else Affine(slope, first - slope * before)
