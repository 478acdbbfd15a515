"""Circuit breaker and concurrency limit of feature reads. No I/O."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hapi_client.swift.retry import is_retryable
from hapi_protocol.errors import HapiError

# Additive increase: with a limit of four, at most one request in 33 asks for
# more than the worker admits.  Twice as many would find free capacity after 64
# spans, which is a minute or an epoch.
FIRST_READS = 2
"""Feature reads until the first one has succeeded.  With 4 at once, of 250
photographs in spans of 16, the first one had come after 25 % of the epoch, as
all share the worker's two cores; with 2 after 16 % (two cores, ResNet-18)."""
SUCCESSES_PER_STEP = 8
"""Successes of each concurrent read before the limit grows by one."""
# A worker that is away all night gives twelve lines an hour.
LOG_INTERVAL_SECONDS = 300.0
"""Minimum time between two logged fallbacks."""
PAUSE_SECONDS = 5.0
"""First pause of push-down after a fallback; doubles while it keeps
failing."""
MAX_PAUSE_SECONDS = 20.0
"""Longest pause: a worker that has restarted is used again soon, and a probe
costs one span at most."""
# So failed attempts take a fifth of the time at most, however long a worker
# that hangs makes each of them wait.
MIN_PAUSE_RATIO = 4.0
"""Minimum pause, relative to the time of the failed attempt."""
_NO_CAPACITY_CODES = frozenset({"share_exceeded", "queue_full"})
_FALLBACK_CODES = (
    "compute_not_allowed",
    "no_hapi",
    "unknown_transform",
    "unsupported_version",
)


def can_fall_back(error: HapiError) -> bool:
    """Returns True if raw reads may succeed after an error of push-down.

    True for errors of computing in the store: its limits, its worker, its
    validation of the package.  False for errors that raw reads would meet as
    well, and for invalid requests.
    """
    # A store of an older release may not have all transforms.
    if is_retryable(error) or error.code in _FALLBACK_CODES:
        return True
    role = error.details.get("object_role")
    if error.status in (403, 404):
        return role == "model"
    return error.status in (409, 413, 422)


class PushdownCircuitBreaker:
    """Stops push-down after a failure, and probes it after a pause.

    After a span fell back to a raw read the breaker is open: further spans
    are read raw at once.  After a pause one span probes push-down.  Success
    closes the breaker; failure doubles the pause.  Thread-safe.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause = PAUSE_SECONDS
        self._probe_at: float | None = None
        """Time of the next probe; None while closed."""
        self._logged_at: float | None = None
        self._probing = False
        self._lock = threading.Lock()

    def attempts(self, max_attempts: int) -> int:
        """Returns how often to request a span's features.

        If not 0, the caller has to report the outcome by :meth:`succeeded`,
        :meth:`failed` or :meth:`abandoned`.

        Args:
            max_attempts: number of attempts while the breaker is closed.

        Returns:
            1 for a probe, 0 while the breaker is open.
        """
        with self._lock:
            if self._probe_at is None:
                return max_attempts
            if self._is_open():
                return 0
            self._probing = True
            return 1

    def is_open(self) -> bool:
        """Returns True if :meth:`attempts` would return 0."""
        with self._lock:
            return self._is_open()

    def _is_open(self) -> bool:
        return self._probe_at is not None and (
            self._probing or self._clock() < self._probe_at
        )

    def succeeded(self) -> bool:
        """Closes the breaker; returns True if it was open."""
        with self._lock:
            was_open = self._probe_at is not None
            self._probe_at = None
            self._probing = False
            self._pause = PAUSE_SECONDS
            return was_open

    def failed(
        self, error: HapiError | None = None, seconds: float = 0.0
    ) -> bool:
        """Opens the breaker after a fallback.

        Args:
            error: error of the last attempt.  If the worker has no capacity,
                the next pause is not doubled.
            seconds: duration of the last attempt, which extends the pause: a
                probe of a worker that hangs makes a span wait.

        Returns:
            True if the fallback should be logged: none was for some minutes.
        """
        with self._lock:
            if self._probe_at is not None and not self._probing:
                return False  # began before the breaker opened
            pause = max(self._pause, MIN_PAUSE_RATIO * seconds)
            self._probe_at = self._clock() + pause
            if error is None or error.code not in _NO_CAPACITY_CODES:
                self._pause = min(self._pause * 2, MAX_PAUSE_SECONDS)
            self._probing = False
            return self._may_log()

    def _may_log(self) -> bool:
        now, before = self._clock(), self._logged_at
        if before is not None and now < before + LOG_INTERVAL_SECONDS:
            return False
        self._logged_at = now
        return True

    def abandoned(self) -> None:
        """Ends a probe that neither succeeded nor failed."""
        with self._lock:
            self._probing = False


class PushdownConcurrency:
    """Limits concurrent feature reads to what the worker admits.

    Each refusal for lack of capacity lowers the limit by one, down to one; a
    number of successes raises it by one.  So jobs of one account share its
    streams without fallbacks.

    Args:
        max_reads: highest limit, and that after the first success.  Until
            then it is :data:`FIRST_READS`, because a worker shares its cores
            among requests, and the first batch waits for the first ones.
    """

    def __init__(self, max_reads: int) -> None:
        self._max_reads = max_reads
        self._limit = max_reads
        self._first = min(FIRST_READS, max_reads)
        self._successes = 0
        self._lock = threading.Lock()

    @property
    def limit(self) -> int:
        with self._lock:
            return self._first or self._limit

    def refused(self, error: HapiError) -> None:
        """Lowers the limit if the error is a lack of capacity."""
        if error.code in _NO_CAPACITY_CODES:
            with self._lock:
                self._limit = max(1, (self._first or self._limit) - 1)
                self._first = self._successes = 0

    def succeeded(self) -> None:
        with self._lock:
            self._first = 0
            self._successes += 1
            if self._successes >= SUCCESSES_PER_STEP * self._limit:
                self._limit = min(self._limit + 1, self._max_reads)
                self._successes = 0
