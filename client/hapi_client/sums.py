"""Records of amounts that add up, and thread-safe totals of them."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

from typing_extensions import Self


class Sums:
    """Base of frozen dataclasses of amounts, which are added by field.

    Fields are numbers, other :class:`Sums`, and mappings to numbers.  Of any
    other field, the sum has the later value.
    """

    def __add__(self, more: Self) -> Self:
        return self._with(more, 1)

    def __sub__(self, earlier: Self) -> Self:
        return self._with(earlier, -1)

    def _with(self, other: Self, sign: int) -> Self:
        amounts = vars(other)
        return type(self)(
            **{
                name: _sum(amount, amounts[name], sign)
                for name, amount in vars(self).items()
            }
        )


def _sum(one: Any, other: Any, sign: int) -> Any:
    if isinstance(one, (int, float)):
        return one + sign * other
    if isinstance(one, Sums):
        return one._with(other, sign)
    if isinstance(one, dict):
        return {k: one.get(k, 0) + sign * other.get(k, 0) for k in one | other}
    return other


T = TypeVar("T", bound=Sums)


class Total(Generic[T]):
    """Total of the amounts that are added.

    Args:
        kind: class of the total.
    """

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self._amounts = dict(vars(kind()))

    def add(self, **amounts: Any) -> None:
        """Adds to fields of the total, by their names."""
        for name, more in amounts.items():
            self._amounts[name] = _sum(self._amounts[name], more, 1)

    def count(self) -> T:
        """Returns the total."""
        return self._kind(**self._amounts)


class ThreadTotal(Total[T]):
    """Total of what threads add, and each thread's own share of it."""

    def __init__(self, kind: type[T]) -> None:
        super().__init__(kind)
        self._lock = threading.RLock()
        self._local = threading.local()

    def add(self, **amounts: Any) -> None:
        self._share().add(**amounts)
        with self._lock:
            super().add(**amounts)

    def count(self) -> T:
        with self._lock:
            return super().count()

    @property
    def of_thread(self) -> T:
        """The current thread's own share of the total."""
        return self._share().count()

    def _share(self) -> Total[T]:
        if not hasattr(self._local, "share"):
            self._local.share = Total(self._kind)
        share: Total[T] = self._local.share
        return share
