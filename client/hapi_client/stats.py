"""What a job counts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class JobStats:
    """Figures of a job so far.

    Attributes:
        bytes: of all request and response bodies but the package's; see
            :class:`hapi_client.traffic.TrafficCount` for what counts.
        package_bytes: sent to store the model package; 0 if it was there.
        retries: requests that were repeated.
        fallbacks: spans that were streamed because push-down failed.
        skipped: samples left out under ``on_error="skip"``.
        saturated: features that the encoding clipped.
        samples: delivered in batches.
        seconds: spent inside loaders, the training step included.
    """

    bytes: int = 0
    package_bytes: int = 0
    retries: int = 0
    fallbacks: int = 0
    skipped: int = 0
    saturated: int = 0
    samples: int = 0
    seconds: float = 0.0


class JobCounters:
    """Thread-safe counters behind :class:`JobStats`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._stats = JobStats()

    def add(
        self,
        *,
        package_bytes: int = 0,
        retries: int = 0,
        fallbacks: int = 0,
        skipped: int = 0,
        saturated: int = 0,
        samples: int = 0,
        seconds: float = 0.0,
    ) -> None:
        with self._lock:
            old = self._stats
            self._stats = replace(
                old,
                package_bytes=old.package_bytes + package_bytes,
                retries=old.retries + retries,
                fallbacks=old.fallbacks + fallbacks,
                skipped=old.skipped + skipped,
                saturated=old.saturated + saturated,
                samples=old.samples + samples,
                seconds=old.seconds + seconds,
            )

    def snapshot(self) -> JobStats:
        with self._lock:
            return self._stats
