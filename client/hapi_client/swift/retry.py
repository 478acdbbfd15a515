"""When to try again, and when to stop pushing down (pure).

Numbers in, decisions out: clock and randomness come from the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

from hapi_protocol.errors import HapiError

RETRYABLE_STATUSES = frozenset({408, 429, 498, 500, 502, 503, 504})
"""498 is what Swift's ratelimit middleware answers."""
_RETRYABLE_CODES = frozenset({"truncated", "not_connected"})


def is_retryable(error: HapiError) -> bool:
    """Whether the same request may succeed when repeated."""
    return error.code in _RETRYABLE_CODES or error.status in RETRYABLE_STATUSES


@dataclass(frozen=True)
class Backoff:
    """Exponential backoff with full jitter, ``Retry-After`` obeyed.

    Attributes:
        attempts: tries in all, the first among them.
        first_seconds: upper bound of the first wait; doubles each time.
        most_seconds: upper bound of a wait without ``Retry-After``.
        most_retry_after_seconds: longer wishes of a server are cut to it.
    """

    attempts: int = 4
    first_seconds: float = 0.5
    max_seconds: float = 8.0
    max_retry_after_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; at least 1")

    def delay_seconds(
        self, failures: int, retry_after: float | None, random: float
    ) -> float:
        """Seconds to wait before the next try.

        Args:
            failures: tries that failed so far, from 1 on.
            retry_after: seconds the server asked for, if it did.
            random: a number drawn uniformly from [0, 1).
        """
        if retry_after is not None:
            asked = max(0.0, min(retry_after, self.max_retry_after_seconds))
            # Jitter above, never below, what the server asked for: its
            # callers must not all come back in the same instant.
            return asked * (1 + random / 4)
        bound = self.first_seconds * 2.0 ** min(failures - 1, 30)
        return min(bound, self.max_seconds) * random
