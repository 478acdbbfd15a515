"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(
    holds: Callable[[], object],
    seconds: float = 20.0,
    message: Callable[[], str] = lambda: "timeout",
) -> None:
    """Waits for a condition; fails with ``message`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, message()
        time.sleep(0.01)
