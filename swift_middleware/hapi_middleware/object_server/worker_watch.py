"""Tells operators in which state the worker of an object server is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hapi_middleware.metrics import FilterMetrics
from hapi_middleware.places.computer import BUSY
from hapi_protocol.backend import STEP_MODEL
from hapi_protocol.errors import PACKAGE_REFUSED, HapiError
from hapi_protocol.printable import printable

LOG_SECONDS = 60.0
"""Shortest time between two lines on one state."""
_AWAY, _BUSY, _DEGRADED = "away", "busy", "degraded"


@dataclass(eq=False)
class WorkerWatch:
    """Counts the errors of a worker, and logs the changes of its state.

    Args:
        metrics: metrics of the filter.
        logger: Swift's.
        clock: monotonic seconds.
    """

    metrics: FilterMetrics
    logger: Any
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._state = ""
        self._logged: dict[str, float] = {}

    def failed(self, address: str, step: str, error: HapiError) -> None:
        """Notes an error of the worker.

        Args:
            address: address of this object server.
            step: the step that failed.  A package that cannot be validated
                says nothing of the worker.
            error: any error; most are not of the worker's state.
        """
        state = _state_of(error)
        is_package = step == STEP_MODEL and state == _AWAY
        if not state or is_package:
            return
        self.metrics.count(f"worker_{state}")
        if state != self._state and self._may_log(state):
            self.logger.error(
                "hapi_object: the worker of %s is %s: %s",
                address,
                state,
                printable(error.message),
            )
        self._state = state

    def works(self, address: str) -> None:
        """Notes that the worker has granted a job."""
        if self._state and self._may_log(""):
            self.logger.warning(
                "hapi_object: the worker of %s, which was %s, takes jobs",
                address,
                self._state,
            )
        self._state = ""

    def _may_log(self, state: str) -> bool:
        now = self.clock()
        is_new = now - self._logged.get(state, float("-inf")) > LOG_SECONDS
        if is_new:
            self._logged[state] = now
        return is_new


def _state_of(error: HapiError) -> str:
    if error.details.get(PACKAGE_REFUSED):
        return _DEGRADED
    if error.code == "worker_unavailable":
        return _AWAY
    return _BUSY if error.code in BUSY else ""
