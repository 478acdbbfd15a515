"""Fair queue: the account with the least service by its weight is next.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM '96) over measured
seconds.  In each queue an account has a *tag*: the seconds of work it has had,
divided by its weight.  The account with the smallest tag is next, and the tag
of the last one served is the queue's virtual time.  An account that had no
work waiting starts at the virtual time minus a small credit, if its tag is
smaller: idle accounts save up no time, nobody is charged for time that nobody
else needed, and an account whose queue is empty for a moment loses nothing.
The seconds of a piece are known only when it is done: while it runs, the
account is charged the average of its pieces, and the difference afterwards.

All queues of a worker share one :class:`Ledger`: seconds of decoding and of
all devices count in each of them, while each has its own virtual time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

DEFAULT_WEIGHT = 1.0
CREDIT_SECONDS = 0.1
"""Credit of an account that was idle, at weight 1."""
MAX_REMEMBERED_ACCOUNTS = 10_000
"""About a megabyte.  An idle account that is forgotten starts as a new one."""
_NEW_COST_WEIGHT = 0.25
"""Smoothing weight of the newest piece in an account's average."""


class _QueueTags:
    """The tags of one queue; guarded by the ledger's lock."""

    def __init__(self) -> None:
        self.tags: OrderedDict[str, float] = OrderedDict()
        self.waiting: dict[str, int] = {}
        self.virtual_time = 0.0

    def queued(self, account: str, credit: float) -> None:
        tag = self.tags.get(account, 0.0)
        if account not in self.waiting:
            tag = max(tag, self.virtual_time - credit)
        self.tags[account] = tag
        self.tags.move_to_end(account)
        self.waiting[account] = self.waiting.get(account, 0) + 1
        self._forget()

    def left(self, account: str) -> None:
        self.waiting[account] -= 1
        if not self.waiting[account]:
            del self.waiting[account]

    def charge(self, account: str, tag_seconds: float) -> None:
        if account in self.tags:
            self.tags[account] += tag_seconds

    def rescale(self, account: str, factor: float) -> None:
        ahead = self.tags[account] - self.virtual_time
        self.tags[account] = self.virtual_time + ahead * factor

    def _forget(self) -> None:
        while len(self.tags) > MAX_REMEMBERED_ACCOUNTS:
            idle = next((a for a in self.tags if a not in self.waiting), None)
            if idle is None:
                return
            del self.tags[idle]


class Ledger:
    """The seconds of service of all accounts; thread-safe.

    Args:
        weights: weights of accounts; others have :data:`DEFAULT_WEIGHT`.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._lock = threading.Lock()
        self._queues: list[_QueueTags] = []
        self._usual: OrderedDict[tuple[str, str], float] = OrderedDict()

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Sets the weights; leads and debts of accounts are rescaled."""
        with self._lock:
            before, self._weights = self._weights, dict(weights)
            for queue in self._queues:
                for account in queue.tags:
                    old = before.get(account, DEFAULT_WEIGHT)
                    queue.rescale(account, old / self._weight(account))

    def weight(self, account: str) -> float:
        """Returns the weight of an account."""
        with self._lock:
            return self._weight(account)

    def add_queue(self) -> int:
        """Adds a queue and returns its number."""
        with self._lock:
            self._queues.append(_QueueTags())
            return len(self._queues) - 1

    def queued(self, queue: int, account: str) -> None:
        """Records that a piece of work of the account was queued."""
        with self._lock:
            credit = CREDIT_SECONDS / self._weight(account)
            self._queues[queue].queued(account, credit)

    def dropped(self, queue: int, account: str) -> None:
        """Records that a queued piece will not run."""
        with self._lock:
            self._queues[queue].left(account)

    def tag(self, queue: int, account: str) -> float:
        """Returns the account's tag; the smallest is next."""
        with self._lock:
            return self._queues[queue].tags[account]

    def served(self, queue: int, account: str) -> None:
        """Records that a queued piece is taken to be run."""
        with self._lock:
            state = self._queues[queue]
            state.left(account)
            state.virtual_time = max(state.virtual_time, state.tags[account])

    def begun(self, account: str, kind: str) -> float:
        """Charges the average of a piece that starts, and returns it.

        Args:
            account: the account that is charged.
            kind: kind of work, whose pieces take similar times.
        """
        with self._lock:
            charged = self._usual.get((account, kind), 0.0)
            self._charge(account, charged)
            return charged

    def ended(
        self, account: str, kind: str, charged: float, seconds: float
    ) -> None:
        """Corrects the charge of a piece that has ended.

        Args:
            account: the account that is charged.
            kind: kind of work.
            charged: the result of :meth:`begun`.
            seconds: duration of the piece.
        """
        with self._lock:
            self._charge(account, seconds - charged)
            key = account, kind
            usual = self._usual.get(key, seconds)
            self._usual[key] = usual + _NEW_COST_WEIGHT * (seconds - usual)
            self._usual.move_to_end(key)
            while len(self._usual) > MAX_REMEMBERED_ACCOUNTS:
                self._usual.popitem(last=False)

    def _charge(self, account: str, seconds: float) -> None:
        for queue in self._queues:
            queue.charge(account, seconds / self._weight(account))

    def _weight(self, account: str) -> float:
        return self._weights.get(account, DEFAULT_WEIGHT)


@dataclass
class _AccountQueue(Generic[T]):
    """Queued work of one account."""

    urgent: deque[T] = field(default_factory=deque)
    others: deque[T] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.urgent) + len(self.others)

    def popleft(self) -> T:
        return (self.urgent or self.others).popleft()


class FairQueue(Generic[T]):
    """Queued work by account; not thread-safe.

    Args:
        ledger: decides whose work is next.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._number = ledger.add_queue()
        self._by_account: dict[str, _AccountQueue[T]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, account: str, work: T, *, urgent: bool = False) -> None:
        """Appends work to the queue of its account.

        Args:
            account: the account that is charged.
            work: the work.
            urgent: put it before all work of the account that is not urgent.
        """
        self._ledger.queued(self._number, account)
        queue = self._by_account.setdefault(account, _AccountQueue())
        (queue.urgent if urgent else queue.others).append(work)
        self._length += 1

    def pop(self, but: Set[str] = frozenset()) -> tuple[str, T] | None:
        """Returns the account to charge and its next work, or None.

        Args:
            but: accounts whose work is not taken now.
        """
        allowed = self._by_account.keys() - but if but else self._by_account
        if not allowed:
            return None
        account = min(allowed, key=self.tag)
        self._ledger.served(self._number, account)
        queue = self._by_account[account]
        work = queue.popleft()
        if not queue:
            del self._by_account[account]
        self._length -= 1
        return account, work

    def tag(self, account: str) -> float:
        """Returns the tag of an account that has queued work."""
        return self._ledger.tag(self._number, account)

    def clear(self) -> None:
        """Drops all queued work."""
        for account, queue in self._by_account.items():
            for _ in range(len(queue)):
                self._ledger.dropped(self._number, account)
        self._by_account.clear()
        self._length = 0
