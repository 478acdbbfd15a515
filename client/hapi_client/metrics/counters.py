"""What a job counts."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class JobStats:
    """Figures of a job so far.

    Attributes:
        bytes: of all request and response bodies of the job's connection,
            since it began, but the package's; see
            :class:`hapi_client.swift.traffic_counters.TrafficCount` for what
            counts.
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

    def __add__(self, more: JobStats) -> JobStats:
        return self._with(more, 1)

    def __sub__(self, earlier: JobStats) -> JobStats:
        return self._with(earlier, -1)

    def _with(self, other: JobStats, sign: int) -> JobStats:
        by_cut = dict(self.samples_by_cut)
        for cut, samples in other.samples_by_cut.items():
            by_cut[cut] = by_cut.get(cut, 0) + sign * samples
        amounts = {
            name: getattr(self, name) + sign * getattr(other, name)
            for name in _AMOUNTS
        }
        return JobStats(**amounts, samples_by_cut=by_cut)


_AMOUNTS = tuple(
    each.name for each in fields(JobStats) if each.name != "samples_by_cut"
)


class JobCounters:
    """Thread-safe counters behind :class:`JobStats`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._local = threading.local()
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
        self._note(
            JobStats(
                package_bytes=package_bytes,
                retries=retries,
                fallbacks=fallbacks,
                skipped=skipped,
                saturated=saturated,
                cached=cached,
                samples=samples,
                seconds=seconds,
            )
        )

    def came(self, cut: int, samples: int) -> None:
        """Notes good samples of a span."""
        self._note(JobStats(samples_by_cut={cut: samples}))

    def _note(self, more: JobStats) -> None:
        self._local.stats = self.of_thread + more
        with self._lock:
            self._stats += more

    @property
    def of_thread(self) -> JobStats:
        """What the running thread has added."""
        stats: JobStats = getattr(self._local, "stats", JobStats())
        return stats

    def snapshot(self) -> JobStats:
        with self._lock:
            return self._stats
