"""Who is served next: the account that has had least, by its weight.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM '96) over measured
seconds.  Each account has a *tag*: the seconds of work it has had, divided by
its weight.  The account with the smallest tag is next.  One that comes back
after a rest begins where the least served of those at work stands, less a
small credit, so that nobody saves up time by resting, and one whose line runs
empty for a moment loses nothing.  As the seconds of a piece are known only
when it is done, an account is charged what its pieces usually take while one
runs, and the difference afterwards.

All pools of a worker share one :class:`Ledger`: seconds of decoding and of
the device count alike.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

DEFAULT_WEIGHT = 1.0
CREDIT_SECONDS = 0.1
"""That an account may lie behind the others after a rest, at weight 1."""
MAX_REMEMBERED_ACCOUNTS = 10_000
_NEW_COST = 0.25
"""Of the last piece in what an account's pieces usually take."""


@dataclass
class _Entry:
    tag: float = 0.0
    num_pieces: int = 0
    usual_seconds: dict[str, float] = field(default_factory=dict)


class Ledger:
    """The seconds that accounts have had; thread-safe.

    Args:
        weights: of accounts; others have :data:`DEFAULT_WEIGHT`.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._active: dict[str, _Entry] = {}
        self._least = 0.0

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Those of work that begins from now on."""
        with self._lock:
            self._weights = dict(weights)

    def weight(self, account: str) -> float:
        """Of an account."""
        with self._lock:
            return self._weight(account)

    def queued(self, account: str) -> None:
        """A piece of work of the account begins to wait."""
        with self._lock:
            entry = self._entries.setdefault(account, _Entry())
            self._entries.move_to_end(account)
            if not entry.num_pieces:
                credit = CREDIT_SECONDS / self._weight(account)
                entry.tag = max(entry.tag, self._virtual_time() - credit)
                self._active[account] = entry
            entry.num_pieces += 1
            self._forget()

    def dropped(self, account: str) -> None:
        """A piece that was queued will not run."""
        with self._lock:
            self._leave(account)

    def tag(self, account: str) -> float:
        """Seconds had, over the weight; the smallest is next."""
        with self._lock:
            return self._entries[account].tag

    def begun(self, account: str, kind: str) -> float:
        """A piece runs; returns what is charged for it until it is done.

        Args:
            account: that pays.
            kind: of work, whose pieces take about as long as one another.
        """
        with self._lock:
            entry = self._entries[account]
            charged = entry.usual_seconds.get(kind, 0.0)
            entry.tag += charged / self._weight(account)
            return charged

    def ended(
        self, account: str, kind: str, charged: float, seconds: float
    ) -> None:
        """The piece took ``seconds``; ``charged`` is from :meth:`begun`."""
        with self._lock:
            entry = self._entries[account]
            entry.tag += (seconds - charged) / self._weight(account)
            usual = entry.usual_seconds.get(kind, seconds)
            entry.usual_seconds[kind] = usual + _NEW_COST * (seconds - usual)
            self._leave(account)

    def _weight(self, account: str) -> float:
        return self._weights.get(account, DEFAULT_WEIGHT)

    def _leave(self, account: str) -> None:
        # Before, not after: the last one at work says how far time is.
        self._virtual_time()
        entry = self._entries[account]
        entry.num_pieces -= 1
        if not entry.num_pieces:
            self._active.pop(account)

    def _virtual_time(self) -> float:
        if self._active:
            least = min(entry.tag for entry in self._active.values())
            self._least = max(self._least, least)
        return self._least

    def _forget(self) -> None:
        while len(self._entries) > MAX_REMEMBERED_ACCOUNTS:
            idle = next(
                (a for a in self._entries if a not in self._active), None
            )
            if idle is None:
                return
            del self._entries[idle]


class FairQueue(Generic[T]):
    """Work that waits, by account; not thread-safe.

    Args:
        ledger: says whose work is next.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lines: dict[str, deque[T]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, account: str, work: T, *, urgent: bool = False) -> None:
        """Puts work at the end of its account's line, or at its head."""
        self._ledger.queued(account)
        line = self._lines.setdefault(account, deque())
        if urgent:
            line.appendleft(work)
        else:
            line.append(work)
        self._length += 1

    def pop(self) -> tuple[str, T] | None:
        """The next work and the account to charge, or None."""
        if not self._lines:
            return None
        account = min(self._lines, key=self._ledger.tag)
        line = self._lines[account]
        work = line.popleft()
        if not line:
            del self._lines[account]
        self._length -= 1
        return account, work

    def clear(self) -> None:
        """Drops all that waits."""
        for account, line in self._lines.items():
            for _ in line:
                self._ledger.dropped(account)
        self._lines.clear()
        self._length = 0
