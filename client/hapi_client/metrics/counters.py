"""Counters of a job."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class JobStats:
    """Totals of a job so far.

    Attributes:
        bytes: size of all request and response bodies of the job's
            connection except the package, counted as in
            :class:`hapi_client.swift.traffic_counters.TrafficCount`.
        package_bytes: bytes sent to store the model package; 0 if it was
            already stored.
        retries: repeated requests.
        fallbacks: spans read raw because push-down failed or left out a
            sample that the client can decode.
        skipped: samples left out under ``on_error="skip"``.
        saturated: features that the encoding clipped.
        cached: samples whose features came from the store's cache.
        local_hits: samples whose features were cached on this host,
            in memory or in a directory.
        local_reads: samples whose stored bytes were cached on this host.
        samples: samples delivered in batches.
        samples_by_cut: samples received for the training loop, by the cut
            of their features; 0 for raw reads.
        seconds: time spent inside loaders, training steps included.
    """

    bytes: int = 0
    package_bytes: int = 0
    retries: int = 0
    fallbacks: int = 0
    skipped: int = 0
    saturated: int = 0
    cached: int = 0
    local_hits: int = 0
    local_reads: int = 0
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

    def add(self, **amounts: Any) -> None:
        """Adds to fields of :class:`JobStats`, by their names."""
        self._add(JobStats(**amounts))

    def span_arrived(self, cut: int, samples: int) -> None:
        """Counts the decodable samples of a span."""
        self._add(JobStats(samples_by_cut={cut: samples}))

    def _add(self, more: JobStats) -> None:
        self._local.stats = self.of_thread + more
        with self._lock:
            self._stats += more

    @property
    def of_thread(self) -> JobStats:
        """The current thread's own share of the totals."""
        stats: JobStats = getattr(self._local, "stats", JobStats())
        return stats

    def snapshot(self) -> JobStats:
        with self._lock:
            return self._stats
