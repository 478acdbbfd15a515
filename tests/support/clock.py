"""A clock that the test sets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Returns ``now`` when it is called."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now
