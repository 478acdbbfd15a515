"""Who is served next: round robin over accounts, paid in measured seconds.

Deficit round robin (Shreedhar and Varghese, SIGCOMM '95) with the cost taken
after the work, since the seconds of a micro-batch are known only then: an
account is served while its credit is positive, pays what its work took, and
gets a quantum each time its turn comes round.  Debts stay when an account's
queue runs empty, so that one that submits piece by piece pays as well; they
are at most one piece of work, as nobody is served in debt.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")

DEFAULT_QUANTUM_SECONDS = 0.05
MAX_REMEMBERED_ACCOUNTS = 10_000


class FairQueue(Generic[T]):
    """A queue of work that is fair between accounts; not thread-safe.

    Args:
        quantum_seconds: credit an account gets when its turn comes.
    """

    def __init__(
        self, quantum_seconds: float = DEFAULT_QUANTUM_SECONDS
    ) -> None:
        self._quantum = quantum_seconds
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._credit: OrderedDict[str, float] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, account: str, work: T) -> None:
        """Puts work at the end of its account's line."""
        self._waiting.setdefault(account, deque()).append(work)
        self._length += 1

    def pop(self) -> tuple[str, T] | None:
        """The next work and the account to charge, or None."""
        if not self._waiting:
            return None
        self._skip_rounds_without_service()
        while True:
            account = next(iter(self._waiting))
            if self._credit.get(account, 0.0) > 0:
                return account, self._take(account)
            self._grant(account, self._quantum)
            self._waiting.move_to_end(account)

    def charge(self, account: str, seconds: float) -> None:
        """Takes what the work of an account has cost."""
        self._grant(account, -seconds)

    def _take(self, account: str) -> T:
        line = self._waiting[account]
        work = line.popleft()
        if not line:
            del self._waiting[account]
        self._length -= 1
        return work

    def _skip_rounds_without_service(self) -> None:
        # Without it one long batch would cost thousands of empty rounds.
        best = max(self._credit.get(name, 0.0) for name in self._waiting)
        rounds = int(-best / self._quantum)
        if rounds > 0:
            for account in self._waiting:
                self._grant(account, rounds * self._quantum)

    def _grant(self, account: str, seconds: float) -> None:
        credit = self._credit.pop(account, 0.0) + seconds
        self._credit[account] = min(credit, self._quantum)
        while len(self._credit) > MAX_REMEMBERED_ACCOUNTS:
            self._credit.popitem(last=False)
