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
        kind: class of the total.
    """

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self._lock = threading.RLock()
        self._total = dict(vars(kind()))
        self._local = threading.local()

    def add(self, **amounts: Any) -> None:
        """Adds to fields of the total, by their names."""
        share = self._share()
        with self._lock:
            for name, more in amounts.items():
                share[name] = _sum(share[name], more, 1)
                self._total[name] = _sum(self._total[name], more, 1)

    def _share(self) -> dict[str, Any]:
        share: dict[str, Any] = vars(self._local)
        if not share:
            share.update(vars(self._kind()))
        return share

    @property
    def of_thread(self) -> T:
        """The current thread's own share of the total."""
        return self._kind(**self._share())

    def count(self) -> T:
        """Returns the total."""
        with self._lock:
            return self._kind(**self._total)
