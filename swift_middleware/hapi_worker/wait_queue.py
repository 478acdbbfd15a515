"""Waiting of requests: for a change, or for places that accounts share.

A free place goes to the account with the fewest places by its weight, and of
equals to the request that has waited longest.  A place that an account gets
restarts the wait of its other requests, so that accounts take turns.  If too
many requests wait, the newest one of the account with the most waiting
requests is refused: one account cannot fill the queue for all others.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(eq=False)
class _Waiter:
    account: str
    since: float
    refused: bool = False


class WaitQueue:
    """A bounded number of waiting requests; thread-safe.

    Args:
        max_waiting: number of requests that may wait.
        refusal: makes the error of a request for which there is no space,
            from its account.
        changed: guards the queue and the state that its requests wait for.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        max_waiting: int,
        refusal: Callable[[str], HapiError],
        *,
        changed: threading.Condition | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.max_waiting = max_waiting
        self.changed = changed or threading.Condition()
        self._refusal = refusal
        self._clock = clock
        self._waiting: list[_Waiter] = []

    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    def waiting_by_account(self) -> Counter[str]:
        """Number of waiting requests by account."""
        with self.changed:
            return Counter(waiter.account for waiter in self._waiting)

    def wait(
        self,
        is_ready: Callable[[], bool],
        seconds: float,
        account: str = "",
        is_disconnected: IsDisconnected = always_connected,
    ) -> bool:
        """Waits as :func:`wait_until`, as a request of an account.

        Raises:
            AnnotationError: ``bad_request``: the caller has disconnected.
            HapiError: the refusal; too many requests wait.
        """
        return self._wait(
            lambda waiter: is_ready(), seconds, account, is_disconnected
        )

    def _wait(
        self,
        is_ready: Callable[[_Waiter], bool],
        seconds: float,
        account: str,
        is_disconnected: IsDisconnected,
    ) -> bool:
        waiter = _Waiter(account, self._clock())

        def is_ready_or_refused() -> bool:
            if is_ready(waiter):
                return True
            self._refuse_excess()
            if waiter.refused:
                raise self._refusal(account)
            return False

        with self.changed:
            self._waiting.append(waiter)
            try:
                return wait_until(
                    self.changed,
                    is_ready_or_refused,
                    seconds,
                    is_disconnected=is_disconnected,
                    clock=self._clock,
                )
            finally:
                if not waiter.refused:
                    self._waiting.remove(waiter)
                self.changed.notify_all()

    def _refuse_excess(self) -> None:
        if len(self._waiting) <= self.max_waiting:
            return
        counts = self.waiting_by_account()
        most = max(counts.values())
        last = next(
            w for w in reversed(self._waiting) if counts[w.account] == most
        )
        self._waiting.remove(last)
        last.refused = True
        self.changed.notify_all()


@dataclass(frozen=True)
class PlaceLimits:
    """Numbers of places, and of requests that wait for one.

    Args:
        places: places of all accounts.
        per_account: places of one account.
        waiting: requests that may wait.
    """

    places: int
    per_account: int
    waiting: int = 0


class FairPlaces(WaitQueue):
    """Places that accounts share; requests without one wait.

    Args:
        limits: numbers of places.
        refusal: makes the error of a request that gets no place, from its
            account.
        weight: returns the weight of an account.
        clock: monotonic seconds.

    Attributes:
        taken: places by account; read it with the lock held.
    """

    def __init__(
        self,
        limits: PlaceLimits,
        refusal: Callable[[str], HapiError],
        *,
        weight: Callable[[str], float] = lambda account: 1.0,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(limits.waiting, refusal, clock=clock)
        self.limits = limits
        self.taken: Counter[str] = Counter()
        self._weight = weight

    def set_limits(self, limits: PlaceLimits) -> None:
        """Sets new limits; places over them stay taken."""
        with self.changed:
            self.limits = limits
            self.max_waiting = limits.waiting
            self.changed.notify_all()

    def take(
        self,
        account: str,
        seconds: float,
        is_disconnected: IsDisconnected = always_connected,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits for a place and takes it.

        Args:
            account: account that is charged.
            seconds: longest wait.
            is_disconnected: returns True if the caller waits no more.
            check: called regularly, with the lock held; its errors end the
                wait.

        Raises:
            AnnotationError: ``bad_request``: the caller has disconnected.
            HapiError: the refusal: no place became free in time, or too many
                requests wait.
        """

        def is_next(waiter: _Waiter) -> bool:
            check()
            return self._next() is waiter

        with self.changed:
            if not self._wait(is_next, seconds, account, is_disconnected):
                raise self._refusal(account)
            self.taken[account] += 1
            for waiter in self._waiting:
                if waiter.account == account:
                    waiter.since = self._clock()

    def leave(self, account: str) -> None:
        """Gives a place back."""
        with self.changed:
            self.taken[account] -= 1
            self.taken += Counter()  # drops accounts without a place
            self.changed.notify_all()

    def _next(self) -> _Waiter | None:
        """Returns the request that gets a free place, if there is one."""
        if self.taken.total() >= self.limits.places:
            return None
        allowed = (
            waiter
            for waiter in self._waiting
            if self.taken[waiter.account] < self.limits.per_account
        )
        return min(allowed, key=self._rank, default=None)

    def _rank(self, waiter: _Waiter) -> tuple[float, float]:
        share = self.taken[waiter.account] / self._weight(waiter.account)
        return share, waiter.since
