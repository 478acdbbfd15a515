"""Who is served next: the account that has had least, by its weight.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM '96) over measured
seconds.  In each queue an account has a *tag*: the seconds of work it has had,
divided by its weight.  The account with the smallest tag is next, and the tag
of the last one served is the queue's virtual time.  An account that had
nothing waiting begins at the virtual time, less a small credit, if it lies
behind it: nobody saves up time by resting, nobody is punished for what nobody
else wanted, and one whose line runs empty for a moment loses nothing.  As the
seconds of a piece are known only when it is done, an account is charged what
its pieces usually take while one runs, and the difference afterwards.

All queues of a worker share one :class:`Ledger`: seconds of decoding and of
all devices count alike in each of them, while each has its own virtual time.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Charged(Protocol):
    """Something that an account pays for."""

    @property
    def account(self) -> str:
        """Which one."""


C = TypeVar("C", bound=Charged)

DEFAULT_WEIGHT = 1.0
CREDIT_SECONDS = 0.1
"""That an account may lie behind the others after a rest, at weight 1."""
MAX_REMEMBERED_ACCOUNTS = 10_000
_NEW_COST = 0.25
"""Of the last piece in what an account's pieces usually take."""


class _Lane:
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
    """The seconds that accounts have had; thread-safe.

    Args:
        weights: of accounts; others have :data:`DEFAULT_WEIGHT`.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._lock = threading.Lock()
        self._lanes: list[_Lane] = []
        self._usual: OrderedDict[tuple[str, str], float] = OrderedDict()

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """From now on; what accounts are ahead or behind counts anew."""
        with self._lock:
            before, self._weights = self._weights, dict(weights)
            for lane in self._lanes:
                for account in lane.tags:
                    old = before.get(account, DEFAULT_WEIGHT)
                    lane.rescale(account, old / self._weight(account))

    def weight(self, account: str) -> float:
        """Of an account."""
        with self._lock:
            return self._weight(account)

    def open_lane(self) -> int:
        """The number of a new queue."""
        with self._lock:
            self._lanes.append(_Lane())
            return len(self._lanes) - 1

    def queued(self, lane: int, account: str) -> None:
        """A piece of work of the account begins to wait."""
        with self._lock:
            credit = CREDIT_SECONDS / self._weight(account)
            self._lanes[lane].queued(account, credit)

    def dropped(self, lane: int, account: str) -> None:
        """A piece that was queued will not run."""
        with self._lock:
            self._lanes[lane].left(account)

    def tag(self, lane: int, account: str) -> float:
        """Seconds had, over the weight; the smallest is next."""
        with self._lock:
            return self._lanes[lane].tags[account]

    def served(self, lane: int, account: str) -> None:
        """A piece of the account waits no more, and will run."""
        with self._lock:
            found = self._lanes[lane]
            found.left(account)
            found.virtual_time = max(found.virtual_time, found.tags[account])

    def begun(self, account: str, kind: str) -> float:
        """A piece runs; returns what is charged for it until it is done.

        Args:
            account: that pays.
            kind: of work, whose pieces take about as long as one another.
        """
        with self._lock:
            charged = self._usual.get((account, kind), 0.0)
            self._charge(account, charged)
            return charged

    def ended(
        self, account: str, kind: str, charged: float, seconds: float
    ) -> None:
        """The piece took ``seconds``; ``charged`` is from :meth:`begun`."""
        with self._lock:
            self._charge(account, seconds - charged)
            key = account, kind
            usual = self._usual.get(key, seconds)
            self._usual[key] = usual + _NEW_COST * (seconds - usual)
            self._usual.move_to_end(key)
            while len(self._usual) > MAX_REMEMBERED_ACCOUNTS:
                self._usual.popitem(last=False)

    def _charge(self, account: str, seconds: float) -> None:
        for lane in self._lanes:
            lane.charge(account, seconds / self._weight(account))

    def _weight(self, account: str) -> float:
        return self._weights.get(account, DEFAULT_WEIGHT)


@dataclass
class _Line(Generic[T]):
    """What waits of one account."""

    urgent: deque[T] = field(default_factory=deque)
    others: deque[T] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.urgent) + len(self.others)

    def popleft(self) -> T:
        return (self.urgent or self.others).popleft()


class FairQueue(Generic[T]):
    """Work that waits, by account; not thread-safe.

    Args:
        ledger: says whose work is next.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lane = ledger.open_lane()
        self._lines: dict[str, _Line[T]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, account: str, work: T, *, urgent: bool = False) -> None:
        """Puts work at the end of its account's line.

        Args:
            account: that pays.
            work: to be done.
            urgent: before all work of the account that is not.
        """
        self._ledger.queued(self._lane, account)
        line = self._lines.setdefault(account, _Line())
        (line.urgent if urgent else line.others).append(work)
        self._length += 1

    def pop(self) -> tuple[str, T] | None:
        """The next work and the account to charge, or None."""
        if not self._lines:
            return None
        account = min(self._lines, key=self.tag)
        self._ledger.served(self._lane, account)
        line = self._lines[account]
        work = line.popleft()
        if not line:
            del self._lines[account]
        self._length -= 1
        return account, work

    def tag(self, account: str) -> float:
        """Of an account with work that waits."""
        return self._ledger.tag(self._lane, account)

    def clear(self) -> None:
        """Drops all that waits."""
        for account, line in self._lines.items():
            for _ in range(len(line)):
                self._ledger.dropped(self._lane, account)
        self._lines.clear()
        self._length = 0


def last_of_most(waiting: Sequence[C]) -> C:
    """Who is turned away when too many wait: the last of those of whose
    account most do."""
    counts = Counter(each.account for each in waiting)
    most = max(counts.values())
    return next(w for w in reversed(waiting) if counts[w.account] == most)
