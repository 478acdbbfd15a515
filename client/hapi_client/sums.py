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
            *(_sum(each, amounts[n], sign) for n, each in vars(self).items())
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


class ThreadSums(Generic[T]):
    """Total of amounts that threads add, and each thread's own share.

    Args:
        zero: the total at the beginning.
    """

    def __init__(self, zero: T) -> None:
        self._lock = threading.RLock()
        self._local = threading.local()
        self._zero = self._total = zero

    def add(self, **amounts: Any) -> None:
        """Adds to fields of the total, by their names."""
        more = type(self._zero)(**amounts)
        self._local.share = self.of_thread + more
        with self._lock:
            self._total += more

    @property
    def of_thread(self) -> T:
        """The current thread's own share of the total."""
        share: T = getattr(self._local, "share", self._zero)
        return share

    def count(self) -> T:
        """Returns the total."""
        with self._lock:
            return self._total
