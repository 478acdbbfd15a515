"""Places of the packages that are received and loaded at a time.

An account may not hold all of them, because a package can take minutes to
validate.  A free place goes to the request that has waited longest, and
each place that an account gets counts as a new start for its other requests:
accounts take turns, however many packages one of them sends.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hapi_protocol.errors import UnavailableError
from hapi_worker.models.uploads import too_busy_error
from hapi_worker.peer import (
    POLL_SECONDS,
    IsDisconnected,
    always_connected,
    client_disconnected_error,
)
from hapi_worker.scheduling.fair_queue import last_of_busiest


@dataclass(eq=False)
class _Waiter:
    account: str
    since: float
    turned_away: bool = False


class UploadPlaces:
    """The places of one worker.

    Args:
        num_places: packages at a time.
        max_waiting: requests that may wait for a place.
        wait_seconds: longest wait.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        num_places: int,
        *,
        max_waiting: int,
        wait_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_places = num_places
        self._per_account = max(1, num_places - 1)
        self._max_waiting = max_waiting
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._held: Counter[str] = Counter()
        self._waiting: list[_Waiter] = []

    def num_waiting(self) -> int:
        """Number of requests that wait for a place."""
        with self._changed:
            return len(self._waiting)

    @contextmanager
    def held(
        self,
        account: str,
        is_disconnected: IsDisconnected = always_connected,
    ) -> Iterator[None]:
        """Waits for a place, and holds it during the block.

        Args:
            account: account for which the package is sent.
            is_disconnected: returns True if the caller waits no more.

        Raises:
            AnnotationError: ``bad_request``: the caller has disconnected.
            UnavailableError: ``queue_full``: no place became free in time, or
                too many requests wait, most of them this account's.
        """
        self._take(account, is_disconnected)
        try:
            yield
        finally:
            with self._changed:
                self._held[account] -= 1
                self._held += Counter()  # drops accounts without a place
                self._changed.notify_all()

    def _take(self, account: str, is_disconnected: IsDisconnected) -> None:
        waiter = _Waiter(account, self._clock())
        deadline = waiter.since + self._wait_seconds
        with self._changed:
            self._waiting.append(waiter)
            if len(self._waiting) > self._max_waiting:
                last = last_of_busiest(self._waiting)
                self._waiting.remove(last)
                last.turned_away = True
            try:
                while self._next() is not waiter:
                    left = deadline - self._clock()
                    if waiter.turned_away or left <= 0:
                        raise self._full_error()
                    if is_disconnected():
                        raise client_disconnected_error()
                    self._changed.wait(min(left, POLL_SECONDS))
                self._held[account] += 1
            finally:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                self._changed.notify_all()
            for each in self._waiting:
                if each.account == account:
                    each.since = self._clock()

    def _next(self) -> _Waiter | None:
        """Returns the request that gets a free place, if there is one."""
        if self._held.total() >= self._num_places:
            return None
        allowed = (
            each
            for each in self._waiting
            if self._held[each.account] < self._per_account
        )
        return min(allowed, key=lambda each: each.since, default=None)

    def _full_error(self) -> UnavailableError:
        return too_busy_error(
            "queue_full",
            f"{self._held.total()} models are being uploaded, and "
            f"{len(self._waiting)} wait for that; an account may upload "
            f"{self._per_account} at a time",
        )
