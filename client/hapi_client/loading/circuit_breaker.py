"""Circuit breaker and concurrency limit for push-down. No I/O."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hapi_client.swift.retry import is_retryable
from hapi_protocol.errors import HapiError

_NO_ROOM_CODES = frozenset({"share_exceeded", "queue_full"})
SUCCESSES_PER_PLACE = 8


_CURED_CODES = (
    "compute_not_allowed",
    "no_hapi",
    "unknown_transform",
    "unsupported_version",
)


def can_fall_back(error: HapiError) -> bool:
    """Whether plain reads may give what push-down refuses.

    True for what concerns the storage tier's computing: its limits, its
    worker, its verdict on the package.  False for what a plain read would
    meet as well, and for requests that are wrong in themselves.
    """
    if is_retryable(error):
        return True
    # A store of an older release knows not all transforms.
    if error.code in _CURED_CODES:
        return True
    role = error.details.get("object_role")
    if error.status in (403, 404):
        return role == "model"
    return error.status in (409, 413, 422)


QUIET_SECONDS = 300.0
"""Between two fall-backs that are told of."""
REST = 4.0
"""Times what a failed try took: how long at least none follows it."""


class PushdownCircuitBreaker:
    """Decides, span by span, whether push-down is worth a try.

    After a span had to fall back, the gate is shut: spans stream at once,
    without waiting for the same failure again.  After ``pause_seconds``
    one span is let through; when it succeeds the gate opens, when it
    fails the pause doubles, up to ``max_pause_seconds``.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        pause_seconds: float = 5.0,
        max_pause_seconds: float = 60.0,
    ) -> None:
        self._clock = clock
        self._first_pause = pause_seconds
        self._most_pause = max_pause_seconds
        self._pause = pause_seconds
        self._opens_at: float | None = None
        self._told_at: float | None = None
        self._probing = False
        self._lock = threading.Lock()

    def tries(self, most: int) -> int:
        """How often this span should be pushed; its fate must be reported.

        Args:
            most: while nothing is wrong. After a fall-back one span tries
                once: all others would have to wait for it.

        Returns:
            0 while push-down rests.
        """
        with self._lock:
            if self._opens_at is None:
                return most
            if self._probing or self._clock() < self._opens_at:
                return 0
            self._probing = True
            return 1

    def is_open(self) -> bool:
        """Whether :meth:`tries` would be 0."""
        with self._lock:
            return self._opens_at is not None and (
                self._probing or self._clock() < self._opens_at
            )

    def succeeded(self) -> bool:
        """Reports a span that came; whether push-down had rested."""
        with self._lock:
            had_rested = self._opens_at is not None
            self._opens_at = None
            self._probing = False
            self._pause = self._first_pause
            return had_rested

    def failed(
        self, error: HapiError | None = None, seconds: float = 0.0
    ) -> bool:
        """Reports a fall-back.

        Args:
            error: the last one. A worker that has no room is there, and the
                next pause is no longer than this one.
            seconds: that the last try took. The pause is four times as long
                at least: who asks a worker that hangs, waits.

        Returns:
            Whether it is news: nobody was told of one for some minutes.
        """
        with self._lock:
            if self._opens_at is not None and not self._probing:
                return False  # a straggler of the failure that shut the gate
            pause = max(self._pause, REST * seconds)
            self._opens_at = self._clock() + pause
            if error is None or error.code not in _NO_ROOM_CODES:
                self._pause = min(self._pause * 2, self._most_pause)
            self._probing = False
            return self._is_news()

    def _is_news(self) -> bool:
        now, before = self._clock(), self._told_at
        if before is not None and now < before + QUIET_SECONDS:
            return False
        self._told_at = now
        return True

    def abandoned(self) -> None:
        """Reports that a span ended without telling anything."""
        with self._lock:
            self._probing = False


class PushdownConcurrency:
    """How many spans are pushed at a time: what the worker admits.

    Each refusal for want of room takes one away, down to one; a run of
    successes gives one back. Jobs that share an account's streams so find
    their parts, and none has to fall back.

    Args:
        most: spans at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = most
        self._successes = 0
        self._lock = threading.Lock()

    @property
    def limit(self) -> int:
        with self._lock:
            return self._limit

    def refused(self, error: HapiError) -> None:
        """Takes note of a failed try; only refusals for room count."""
        if error.code in _NO_ROOM_CODES:
            with self._lock:
                self._limit = max(1, self._limit - 1)
                self._successes = 0

    def succeeded(self) -> None:
        with self._lock:
            self._successes += 1
            if self._successes >= SUCCESSES_PER_PLACE * self._limit:
                self._limit = min(self._limit + 1, self._most)
                self._successes = 0
