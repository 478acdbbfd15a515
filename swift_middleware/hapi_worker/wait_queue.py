"""Waiting of requests: for a change, or for slots that accounts share.

A free slot goes to the account with the fewest slots by its weight, and of
equals to the request that has waited longest.  A slot that an account gets
restarts the wait of its other requests, so that accounts take turns.  If too
many requests wait, the newest one of the account with the most waiting
requests is refused: one account cannot fill the queue for all others.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from hapi_protocol.errors import HapiError
from hapi_worker.peer import (
    POLL_SECONDS,
    IsDisconnected,
    always_connected,
    client_disconnected_error,
)

Clock = Callable[[], float]
"""Returns monotonic seconds."""


def wait_until(
    changed: threading.Condition,
    is_ready: Callable[[], bool],
    seconds: float,
    *,
    is_disconnected: IsDisconnected = always_connected,
    clock: Clock = time.monotonic,
) -> bool:
    """Waits until ``is_ready()``, which is also called regularly.

    Args:
        changed: notified of changes; its lock is held by the caller.
        is_ready: returns True at the end of the wait; its errors end it too.
        seconds: longest wait.
        is_disconnected: returns True if the caller waits no more.
        clock: monotonic seconds.

    Returns:
        False if it was not ready in time.

    Raises:
        AnnotationError: ``bad_request``: the caller has disconnected.
    """
    deadline = clock() + seconds
    while True:
        if is_disconnected():
            raise client_disconnected_error()
        if is_ready():
            return True
        left = deadline - clock()
        if left <= 0:
            return False
        changed.wait(min(left, POLL_SECONDS))


@dataclass(frozen=True)
class QueueLimits:
    """Numbers of requests.

    Args:
        slots: slots of all accounts.
        per_account: slots of one account.
        waiting: requests that may wait.
    """

    slots: int = 0
    per_account: int = 0
    waiting: int = 0


@dataclass(eq=False)
class _Waiter:
    account: str
    since: float
    refused: bool = False


@dataclass(eq=False)
class WaitQueue:
    """A bounded number of waiting requests, and slots; thread-safe.

    Args:
        limits: numbers of requests; they may be set at any time.
        refusal: makes the error of an account's request for which there is
            no slot, or no space in the queue.
        weight: returns the weight of an account.
        changed: guards the queue and what its requests wait for.
        clock: monotonic seconds.

    Attributes:
        taken: slots by account; read it with the lock held.
    """

    limits: QueueLimits
    refusal: Callable[[str], HapiError]
    _: KW_ONLY
    weight: Callable[[str], float] = lambda account: 1.0
    changed: threading.Condition = field(default_factory=threading.Condition)
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self._waiting: list[_Waiter] = []
        self._num_changes = 0
        self._searched: tuple[int, QueueLimits] | None = None
        self._first: _Waiter | None = None

    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    def waiting_by_account(self) -> Counter[str]:
        """Number of waiting requests by account."""
        with self.changed:
            return Counter(waiter.account for waiter in self._waiting)

    def wait(
        self,
        is_ready: Callable[[_Waiter], bool],
        seconds: float,
        account: str = "",
        is_disconnected: IsDisconnected = always_connected,
    ) -> bool:
        """Waits as :func:`wait_until`, as a request of an account.

        Raises:
            AnnotationError: ``bad_request``: the caller has disconnected.
            HapiError: the refusal: too many requests wait.
        """
        waiter = _Waiter(account, self.clock())

        def is_ready_or_refused() -> bool:
            if is_ready(waiter):
                return True
            self._refuse_excess()
            if waiter.refused:
                raise self.refusal(account)
            return False

        with self.changed:
            self._waiting.append(waiter)
            self._num_changes += 1
            try:
                return wait_until(
                    self.changed,
                    is_ready_or_refused,
                    seconds,
                    is_disconnected=is_disconnected,
                    clock=self.clock,
                )
            finally:
                if not waiter.refused:
                    self._waiting.remove(waiter)
                self._has_changed()

    def take(
        self,
        account: str,
        seconds: float,
        is_disconnected: IsDisconnected = always_connected,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits for a slot and takes it.

        Args:
            account: account that is charged.
            seconds: longest wait.
            is_disconnected: returns True if the caller waits no more.
            check: called regularly, with the lock held; its errors end the
                wait.

        Raises:
            AnnotationError: ``bad_request``: the caller has disconnected.
            HapiError: the refusal: no slot became free in time, or too many
                requests wait.
        """

        def is_next(waiter: _Waiter) -> bool:
            check()
            return self._next() is waiter

        with self.changed:
            if not self.wait(is_next, seconds, account, is_disconnected):
                raise self.refusal(account)
            self.taken[account] += 1
            self._num_changes += 1
            for waiter in self._waiting:
                if waiter.account == account:
                    waiter.since = self.clock()

    def leave(self, account: str) -> None:
        """Gives a slot back."""
        with self.changed:
            self.taken[account] -= 1
            self.taken += Counter()  # drops accounts without a slot
            self._has_changed()

    def _next(self) -> _Waiter | None:
        """Returns the request that gets a free slot, if there is one."""
        # One search serves all the requests that a change wakes.
        if self._searched != (self._num_changes, self.limits):
            self._searched = self._num_changes, self.limits
            self._first = self._search()
        return self._first

    def _search(self) -> _Waiter | None:
        def rank(waiter: _Waiter) -> tuple[float, float]:
            share = self.taken[waiter.account] / self.weight(waiter.account)
            return share, waiter.since

        if self.taken.total() >= self.limits.slots:
            return None
        share = self.limits.per_account
        allowed = (w for w in self._waiting if self.taken[w.account] < share)
        return min(allowed, key=rank, default=None)

    def _refuse_excess(self) -> None:
        if len(self._waiting) > self.limits.waiting:
            counts = self.waiting_by_account()
            # Of equals, max() takes the first one, which is the newest.
            newest = reversed(self._waiting)
            last = max(newest, key=lambda waiter: counts[waiter.account])
            self._waiting.remove(last)
            last.refused = True
            self._has_changed()

    def _has_changed(self) -> None:
        self._num_changes += 1
        self.changed.notify_all()
