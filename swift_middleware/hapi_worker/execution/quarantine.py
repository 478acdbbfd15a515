"""Quarantine of models whose micro-batches take too long.

A running pass cannot be stopped, so the model's next jobs are refused for a
while.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from hapi_protocol.errors import TooSlowError
from hapi_worker.models.loaded_model import touch

MAX_SLOW_PASSES = 3
"""Slow passes of a model within :data:`WINDOW_SECONDS` that ban it."""
WINDOW_SECONDS = 600.0
"""Slow passes further apart have other causes than the model, as a busy
host."""
BAN_SECONDS = 300.0
"""At the default of ``pass_seconds``, three slow passes cost a thread three
minutes; then it is free of the model for longer."""
MAX_MODELS = 1024
"""Models with slow passes are few; the bound is for hostile callers."""


@dataclass(eq=False)
class ModelQuarantine:
    """Counts slow passes by model; thread-safe.

    Args:
        limit_seconds: longest duration of a pass.
        clock: monotonic seconds.

    Attributes:
        total: number of slow passes of all models.
    """

    limit_seconds: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()
        self._late: OrderedDict[str, deque[float]] = OrderedDict()

    def note(self, digest: str, seconds: float) -> None:
        """Records the duration of a pass."""
        if seconds <= self.limit_seconds:
            return
        with self._lock:
            self.total += 1
            late = self._late.setdefault(digest, deque(maxlen=MAX_SLOW_PASSES))
            late.append(self.clock())
            touch(self._late, digest, MAX_MODELS)

    def check(self, digest: str) -> None:
        """Refuses a model in quarantine.

        Raises:
            TooSlowError: ``too_slow``, with the seconds left.
        """
        with self._lock:
            late = self._late.get(digest, deque())
            if len(late) < MAX_SLOW_PASSES or (
                late[-1] - late[0] > WINDOW_SECONDS
            ):
                return
            left = late[-1] + BAN_SECONDS - self.clock()
            if left <= 0:
                del self._late[digest]
                return
        raise TooSlowError(
            "too_slow",
            f"the last {MAX_SLOW_PASSES} slow micro-batches of the model "
            f"{digest[:12]} took more than {self.limit_seconds:g} s each; it "
            f"is refused for another {left:.0f} s: cut it earlier",
            retry_after=left,
            details={"limit_seconds": self.limit_seconds},
        )
