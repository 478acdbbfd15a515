"""What a job counts."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class JobStats:
    """Figures of a job so far.

    Attributes:
        bytes: of all request and response bodies of the job's connection,
            since it began, but the package's; see
            :class:`hapi_client.traffic.TrafficCount` for what counts.
        package_bytes: sent to store the model package; 0 if it was there.
        retries: requests that were repeated.
        fallbacks: spans that were streamed because push-down failed, or left
            out a sample that can be decoded here.
        skipped: samples left out under ``on_error="skip"``.
        saturated: features that the encoding clipped.
        cached: samples whose features the store had kept.
        samples: delivered in batches.
        samples_by_cut: that the loop was given or will be, by the cut at
            which they came; 0 for those that were streamed.
        seconds: spent inside loaders, the training step included.
    """

    bytes: int = 0
    package_bytes: int = 0
    retries: int = 0
    fallbacks: int = 0
    skipped: int = 0
    saturated: int = 0
    cached: int = 0
    samples: int = 0
    samples_by_cut: Mapping[int, int] = field(default_factory=dict)
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
        cached: int = 0,
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
                cached=old.cached + cached,
                samples=old.samples + samples,
                seconds=old.seconds + seconds,
            )

    def came(self, cut: int, samples: int) -> None:
        """Notes good samples of a span."""
        with self._lock:
            by_cut = dict(self._stats.samples_by_cut)
            by_cut[cut] = by_cut.get(cut, 0) + samples
            self._stats = replace(self._stats, samples_by_cut=by_cut)

    def snapshot(self) -> JobStats:
        with self._lock:
            return self._stats
