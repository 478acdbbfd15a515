"""Retry policy: retryable errors and waits between attempts.

No I/O; clock and randomness are injected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hapi_client.option_checks import check_integers, check_seconds
from hapi_protocol.errors import HapiError

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_ATTEMPTS = 3
"""Attempts to read a body that breaks off."""
RETRYABLE_STATUSES = frozenset({408, 429, 498, 500, 502, 503, 504, 507})
"""Statuses of failures that may pass; 498 is Swift's ratelimit middleware."""
_OUTAGE_STATUSES = frozenset({502, 503, 504, 507})
"""Statuses of a Swift whose servers are away, such as while they restart."""
_RETRYABLE_CODES = frozenset({"truncated", "not_connected"})


def is_retryable(error: HapiError) -> bool:
    """True if the same request may succeed when repeated."""
    return error.code in _RETRYABLE_CODES or error.status in RETRYABLE_STATUSES


def is_outage(error: HapiError) -> bool:
    """True if Swift does not answer, or its servers behind the proxy.

    A server that is stopped breaks off the bodies that it is sending.
    """
    if error.code == "source_damaged":
        return False  # a 503 that other replicas have not helped
    return error.code in _RETRYABLE_CODES or error.status in _OUTAGE_STATUSES


def read_again(read: Callable[[], T]) -> T:
    """Requests and reads a body, again if it breaks off.

    Until a body begins, its request is repeated with a backoff.

    Raises:
        HapiError: of the last attempt, or one that no repeat can help.
    """
    for _ in range(MAX_ATTEMPTS - 1):
        try:
            return read()
        except HapiError as error:
            if not is_retryable(error):
                raise
            logger.info("reading again after: %s", error)
    return read()


@dataclass(frozen=True)
class Backoff:
    """Exponential backoff with full jitter that honours ``Retry-After``.

    Attributes:
        attempts: number of attempts, including the first.
        first_seconds: upper bound of the first wait; doubles each time.
        max_seconds: upper bound of a wait without ``Retry-After``.
        max_retry_after_seconds: upper bound of a ``Retry-After``.
    """

    attempts: int = 4
    first_seconds: float = 0.5
    max_seconds: float = 8.0
    max_retry_after_seconds: float = 30.0

    def __post_init__(self) -> None:
        check_integers(self, 1, "attempts")
        check_seconds(
            self, "first_seconds", "max_seconds", "max_retry_after_seconds"
        )

    def delay_seconds(
        self, failures: int, retry_after: float | None, random: float
    ) -> float:
        """Returns the seconds to wait before the next attempt.

        Args:
            failures: failed attempts so far, at least 1.
            retry_after: seconds of the server's ``Retry-After``, or None.
            random: a number drawn uniformly from [0, 1).
        """
        if retry_after is not None:
            wait = max(0.0, min(retry_after, self.max_retry_after_seconds))
            # Jitter only above the requested wait, so that clients do not
            # all return at the same instant or too early.
            return wait * (1 + random / 4)
        bound = self.first_seconds * 2.0 ** min(failures - 1, 30)
        return min(bound, self.max_seconds) * random
