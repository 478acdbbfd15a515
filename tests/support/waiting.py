"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 300.0
"""Wait for what always comes, also on two cores with a load of 12."""


def until(
    holds: Callable[[], object],
    seconds: float = SECONDS,
    message: Callable[[], str] = lambda: "timeout",
) -> None:
    """Waits for a condition; fails with ``message`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, message()
        time.sleep(0.01)
