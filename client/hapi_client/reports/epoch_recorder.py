"""What one pass over the data takes, summed up while it goes on.

The meter (:mod:`hapi_client.metrics.window_collector`) measures for the
planner, window by window and for the job as a whole; a tally belongs to one
loader, and nobody takes anything out of it.
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
    """The plan of a moment, or what is done without one.

    Attributes:
        label: for people.
        samples_per_second: that are predicted; None without a plan.
        binding: resources that are in use all the time.
        num_changes: plans so far.
    """

    label: str = "stream"
    samples_per_second: float | None = None
    binding: tuple[str, ...] = ()
    num_changes: int = 0


class PlanChangeCounter:
    """Of a job's passes: a plan that is made between two is of the second.

    The first plan comes from a thread of its own, at any time.
    """

    def __init__(self) -> None:
        # As that of a tally: a forgotten loop may be closed meanwhile.
        self._lock = threading.RLock()
        self._under_way = 0
        self._so_far = 0

    def begin(self, num_changes: int) -> int:
        """How many plans are not of the pass that begins, of those so far."""
        with self._lock:
            self._under_way += 1
            if self._under_way > 1:
                return num_changes
            return min(num_changes, self._so_far)

    def end(self, num_changes: int) -> None:
        """A pass ends, after so many plans."""
        with self._lock:
            self._under_way -= 1
            self._so_far = num_changes


class Line(Protocol):
    """What is shown of a pass; see :mod:`hapi_client.reports.progress_bar`."""

    def add(self, samples: int) -> None: ...

    def close(self) -> None: ...


class NoLine:
    """Nothing is shown."""

    def add(self, samples: int) -> None:
        pass

    def close(self) -> None:
        pass


class EpochRecorder:
    """Sums of one pass; thread-safe.

    Args:
        epoch: of training; None for the index's order.
        split: of the data.
        in_force: asked for after each batch.
        open_line: called with the samples to come when the pass begins.
        plans: of all passes of the job.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        epoch: int | None = None,
        split: str = TRAIN,
        *,
        in_force: Callable[[], PlanStatus] = PlanStatus,
        open_line: Callable[[int], Line] = lambda samples: NoLine(),
        plans: PlanChangeCounter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epoch = epoch
        self._split = split
        self._in_force = in_force
        self._open_line = open_line
        self._plans = plans or PlanChangeCounter()
        self._clock = clock
        # Python's collector may close a forgotten loop in this very thread.
        self._lock = threading.RLock()
        self._line: Line = NoLine()
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
        self._prediction: defaultdict[str, float] = defaultdict(float)
        self._started = self._seen = 0.0
        self._plans_before = 0
        self._has_failed = False

    # --- the training loop's thread ---

    @contextmanager
    def running(self, reading: ReadPlan) -> Iterator[None]:
        """What happens inside is the pass."""
        with self._lock:
            self._started = self._seen = self._clock()
            samples = sum(len(batch) for batch in reading.batches)
            self._expected = len(reading.batches), samples
            self._plans_before = self._plans.begin(
                self._in_force().num_changes
            )
        self._line = self._open_line(samples)
        try:
            yield
        except Exception:
            self._has_failed = True
            raise
        finally:
            self.end()

    def end(self) -> None:
        """The pass is over, or given up; more than once does no harm."""
        self._line.close()
        with self._lock:
            # What it holds is not kept for as long as the report.
            self._line = NoLine()
            if self._expected is not None and self._report is None:
                self._predict(0)
                report = self._report = self._summed(*self._expected)
                self._plans.end(self._plans_before + report.plan_changes)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What happens inside is a stage of :data:`LOOP_STAGES`."""
        started = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - started
            with self._lock:
                self._loop[name] += spent

    def came(self, cut: int, samples: int, skipped: int) -> None:
        """Notes a span's samples that the loop will be given."""
        with self._lock:
            self._by_cut[cut] += samples
            self._num_skipped += skipped

    def delivered(self, samples: int) -> None:
        """Notes a batch, before the loop has it."""
        with self._lock:
            self._num_batches += 1
            self._num_samples += samples
            self._predict(samples)
        self._line.add(samples)

    def _predict(self, samples: int) -> None:
        """What the plan has said of the time since the last batch."""
        now = self._clock()
        rate = self._in_force().samples_per_second
        if rate:
            sums = self._prediction
            sums["seconds"] += now - self._seen
            sums["samples"] += samples
            sums["predicted_seconds"] += samples / rate
        self._seen = now

    # --- threads that fetch ---

    @contextmanager
    def fetching(
        self, traffic: Traffic, counters: JobCounters
    ) -> Iterator[None]:
        """What the running thread adds to these inside is the pass's."""
        traffic_before, counts_before = traffic.of_thread, counters.of_thread
        try:
            yield
        finally:
            more = counters.of_thread - counts_before
            with self._lock:
                self._traffic += traffic.of_thread - traffic_before
                self._counts += more

    def loaded(self, report: SpanMetrics) -> None:
        """Notes what a span took."""
        unpacking = report.unpack_cpu_seconds
        with self._lock:
            for stage, seconds in report.server_seconds.items():
                self._storage[stage] += seconds
            self._storage_cpu += report.server_cpu_seconds
            self._fetch[FETCH] += report.read_seconds
            self._fetch[FETCH] += max(0.0, report.request_seconds - unpacking)
            self._fetch[DECODE] += report.decode_cpu_seconds + unpacking

    # --- any thread ---

    @property
    def report(self) -> EpochReport | None:
        """So far, if it is under way; None before it begins."""
        with self._lock:
            if self._expected is None:
                return None
            return self._report or self._summed(*self._expected)

    def _summed(
        self, expected_batches: int, expected_samples: int
    ) -> EpochReport:
        traffic, counts, now = self._traffic, self._counts, self._in_force()
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
            retries=counts.retries + traffic.retries,
            fallbacks=counts.fallbacks,
            skipped_samples=self._num_skipped,
            saturated_features=counts.saturated,
            plan=now.label,
            plan_changes=now.num_changes - self._plans_before,
            predicted_samples_per_second=predicted,
            measured_per_predicted=sums["predicted_seconds"] / sums["seconds"]
            if predicted and sums["seconds"] and not counts.cached
            else None,
            limited_by=now.binding,
        )
