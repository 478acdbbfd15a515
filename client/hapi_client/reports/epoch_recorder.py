"""Sums time, traffic and samples of one epoch while it runs.

:mod:`hapi_client.metrics.window_collector` measures the whole job in windows
for the planner; a recorder belongs to one loader and covers its whole epoch.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from hapi_client.data.splits import TRAIN
from hapi_client.metrics.counters import JobCounters, JobStats
from hapi_client.metrics.window_metrics import SpanMetrics
from hapi_client.reports.epoch_report import (
    DECODE,
    FETCH,
    FETCH_STAGES,
    LOOP_STAGES,
    EpochReport,
)
from hapi_client.sampling.sampler import ReadPlan
from hapi_client.swift.traffic_counters import Traffic, TrafficCount
from hapi_protocol.feature_stream import CLOCK_STAGES


@dataclass(frozen=True)
class PlanStatus:
    """The plan in use, or how samples are read without one.

    Attributes:
        label: for people.
        samples_per_second: predicted throughput; None without a plan.
        binding: resources that limit the throughput.
        num_changes: number of plans so far.
    """

    label: str = "stream"
    samples_per_second: float | None = None
    binding: tuple[str, ...] = ()
    num_changes: int = 0


class PlanChangeCounter:
    """Assigns plan changes to epochs.

    A plan made between two epochs counts for the second one. The first plan
    is made by another thread, at any time.
    """

    def __init__(self) -> None:
        # Reentrant for the same reason as the recorder's lock.
        self._lock = threading.RLock()
        self._num_running = 0
        self._num_assigned = 0

    def begin(self, num_changes: int) -> int:
        """Returns how many of the changes so far belong to earlier epochs."""
        with self._lock:
            self._num_running += 1
            if self._num_running > 1:
                return num_changes
            return min(num_changes, self._num_assigned)

    def end(self, num_changes: int) -> None:
        """Assigns the changes so far, at the end of an epoch."""
        with self._lock:
            self._num_running -= 1
            self._num_assigned = num_changes


class ProgressBar(Protocol):
    """The display of an epoch's progress.

    :mod:`hapi_client.reports.progress_bar` has one for terminals.
    """

    def add(self, samples: int) -> None: ...

    def close(self) -> None: ...


class NullProgressBar:
    """Shows nothing."""

    def add(self, samples: int) -> None:
        pass

    def close(self) -> None:
        pass


class EpochRecorder:
    """Records one epoch of training or evaluation. Thread-safe.

    Args:
        epoch: number of the training epoch; None for evaluation, which reads
            samples in the order of the index.
        split: of the data.
        plan_status: returns the present plan; called after each batch.
        start_bar: called with the number of remaining samples when the epoch
            begins.
        plans: counter of the job's plan changes.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        epoch: int | None = None,
        split: str = TRAIN,
        *,
        plan_status: Callable[[], PlanStatus] = PlanStatus,
        start_bar: Callable[[int], ProgressBar] = lambda _: NullProgressBar(),
        plans: PlanChangeCounter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epoch = epoch
        self._split = split
        self._plan_status = plan_status
        self._start_bar = start_bar
        self._plans = plans or PlanChangeCounter()
        self._clock = clock
        # Reentrant: the garbage collector may close an abandoned loop, and
        # so end its epoch, in the thread that holds the lock.
        self._lock = threading.RLock()
        self._bar: ProgressBar = NullProgressBar()
        self._expected: tuple[int, int] | None = None
        self._report: EpochReport | None = None
        self._traffic = TrafficCount()
        self._counts = JobStats()
        self._by_cut: Counter[int] = Counter()
        self._storage = dict.fromkeys(CLOCK_STAGES, 0.0)
        self._fetch = dict.fromkeys(FETCH_STAGES, 0.0)
        self._loop = dict.fromkeys(LOOP_STAGES, 0.0)
        self._storage_cpu = 0.0
        self._num_batches = self._num_samples = self._num_skipped = 0
        self._num_local_hits = 0
        self._prediction: defaultdict[str, float] = defaultdict(float)
        self._started = self._last_batch = 0.0
        self._plans_before = 0
        self._has_failed = False

    # --- the training loop's thread ---

    @contextmanager
    def running(self, read_plan: ReadPlan) -> Iterator[None]:
        """Covers the epoch: records until the context ends."""
        with self._lock:
            self._started = self._last_batch = self._clock()
            samples = sum(len(batch) for batch in read_plan.batches)
            self._expected = len(read_plan.batches), samples
            self._plans_before = self._plans.begin(
                self._plan_status().num_changes
            )
        self._bar = self._start_bar(samples)
        try:
            yield
        except Exception:
            self._has_failed = True
            raise
        finally:
            self.end()

    def end(self) -> None:
        """Ends the epoch, finished or not; further calls do nothing."""
        self._bar.close()
        with self._lock:
            # The recorder outlives the bar and what the bar refers to.
            self._bar = NullProgressBar()
            if self._expected is not None and self._report is None:
                self._predict(0)
                report = self._report = self._summed(*self._expected)
                self._plans.end(self._plans_before + report.plan_changes)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time inside to a stage of :data:`LOOP_STAGES`."""
        started = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - started
            with self._lock:
                self._loop[name] += seconds

    def record_arrival(self, cut: int, samples: int, skipped: int) -> None:
        """Counts the samples of a span that the loop will receive."""
        with self._lock:
            self._by_cut[cut] += samples
            self._num_skipped += skipped

    def record_local_hits(self, samples: int) -> None:
        """Counts samples whose features are cached on this host."""
        with self._lock:
            self._num_local_hits += samples

    def delivered(self, samples: int, local_hits: int = 0) -> None:
        """Counts a batch, before the loop receives it.

        Args:
            samples: its size.
            local_hits: samples that were not counted as such before.
        """
        with self._lock:
            self._num_batches += 1
            self._num_samples += samples
            self._num_local_hits += local_hits
            self._predict(samples)
        self._bar.add(samples)

    def _predict(self, samples: int) -> None:
        """Sums what the plan predicted for the time since the last batch."""
        now = self._clock()
        rate = self._plan_status().samples_per_second
        if rate:
            sums = self._prediction
            sums["seconds"] += now - self._last_batch
            sums["samples"] += samples
            sums["predicted_seconds"] += samples / rate
        self._last_batch = now

    # --- threads that fetch ---

    @contextmanager
    def fetching(
        self, traffic: Traffic, counters: JobCounters
    ) -> Iterator[None]:
        """Counts traffic and events of the calling thread for the epoch."""
        traffic_before, counts_before = traffic.of_thread, counters.of_thread
        try:
            yield
        finally:
            counts = counters.of_thread - counts_before
            with self._lock:
                self._traffic += traffic.of_thread - traffic_before
                self._counts += counts

    def loaded(self, report: SpanMetrics) -> None:
        """Adds the time that a span took."""
        unpacking = report.unpack_cpu_seconds
        with self._lock:
            if report.early_bytes:
                self._traffic += TrafficCount(report.early_bytes, requests=1)
            for stage, seconds in report.server_seconds.items():
                self._storage[stage] += seconds
            self._storage_cpu += report.server_cpu_seconds
            self._fetch[FETCH] += report.read_seconds
            self._fetch[FETCH] += max(0.0, report.request_seconds - unpacking)
            self._fetch[DECODE] += report.decode_cpu_seconds + unpacking

    # --- any thread ---

    @property
    def report(self) -> EpochReport | None:
        """The report so far; None before the epoch begins."""
        with self._lock:
            if self._expected is None:
                return None
            return self._report or self._summed(*self._expected)

    def _summed(
        self, expected_batches: int, expected_samples: int
    ) -> EpochReport:
        traffic, counts, now = self._traffic, self._counts, self._plan_status()
        sums = self._prediction
        predicted = None
        if sums["predicted_seconds"]:
            predicted = sums["samples"] / sums["predicted_seconds"]
        return EpochReport(
            epoch=self._epoch,
            split=self._split,
            is_finished=not self._has_failed
            and self._num_batches == expected_batches,
            samples=self._num_samples,
            expected_samples=expected_samples,
            seconds=self._clock() - self._started,
            received_bytes=traffic.received_bytes,
            sent_bytes=traffic.sent_bytes,
            requests=traffic.requests,
            storage_seconds=dict(self._storage),
            storage_cpu_seconds=self._storage_cpu,
            fetch_seconds=dict(self._fetch),
            loop_seconds=dict(self._loop),
            samples_by_cut=dict(sorted(self._by_cut.items())),
            cached_samples=counts.cached,
            local_samples=self._num_local_hits,
            retries=counts.retries + traffic.retries,
            fallbacks=counts.fallbacks,
            skipped_samples=self._num_skipped,
            saturated_features=counts.saturated,
            plan=now.label,
            plan_changes=now.num_changes - self._plans_before,
            predicted_samples_per_second=predicted,
            measured_per_predicted=sums["predicted_seconds"] / sums["seconds"]
            if predicted
            and sums["seconds"]
            and not counts.cached
            and not self._num_local_hits
            else None,
            limited_by=now.binding,
        )
