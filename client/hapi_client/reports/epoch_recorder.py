"""Records the events of one loader: of its epoch, and for the job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hapi_client.data.splits import TRAIN
from hapi_client.metrics.events import (
    LOOP_STAGES,
    TRAINING,
    BatchEvent,
    JobStats,
    SpanEvent,
    StageEvent,
)
from hapi_client.metrics.job_recorder import JobRecorder
from hapi_client.reports.epoch_report import DECODE, FETCH, EpochReport
from hapi_client.reports.progress_bar import PlanStatus, TqdmProgressBar
from hapi_client.sampling.sampler import ReadPlan
from hapi_client.sums import ThreadTotal
from hapi_protocol.feature_stream import CLOCK_STAGES
from hapi_splitter.planner.problem import Route


@dataclass(eq=False)
class EpochRecorder:
    """Records one epoch of training or evaluation. Thread-safe.

    Attributes:
        job: recorder of the job, which gets all events too.
        epoch: number of the training epoch; None for evaluation, which reads
            samples in the order of the index.
        split: split of the data.
        plan_status: returns the present plan; called after each batch.
        start_bar: called with the number of remaining samples when the epoch
            begins; returns None for no bar.
    """

    job: JobRecorder
    epoch: int | None = None
    split: str = TRAIN
    plan_status: Callable[[], PlanStatus] = PlanStatus
    start_bar: Callable[[int], TqdmProgressBar | None] = lambda _: None

    def __post_init__(self) -> None:
        self._bar: TqdmProgressBar | None = None
        self._read_plan: ReadPlan | None = None
        self._report: EpochReport | None = None
        self._spans = SpanEvent()
        self._loop = dict.fromkeys(LOOP_STAGES, 0.0)
        self._stats = ThreadTotal(JobStats)
        self._num_batches = self._plans_before = 0
        self._prediction: defaultdict[str, float] = defaultdict(float)
        self._started = self._last_batch = 0.0
        self._has_failed = False

    # --- the training loop's thread ---

    @contextmanager
    def running(self, read_plan: ReadPlan) -> Iterator[None]:
        """Covers the epoch: records until the context ends."""
        job = self.job
        with job.lock:
            self._started = self._last_batch = job.clock()
            self._read_plan = read_plan
            # A plan made between two epochs counts for the second one.
            self._plans_before = job.num_reported_plans
            if job.num_epochs:
                self._plans_before = self.plan_status().num_changes
            job.num_epochs += 1
        self._bar = self.start_bar(read_plan.num_samples)
        try:
            yield
        except Exception:
            self._has_failed = True
            raise
        finally:
            self.end()
            self.count(seconds=job.clock() - self._started)

    def end(self) -> None:
        """Ends the epoch, finished or not; further calls do nothing."""
        # The recorder outlives the bar and what the bar refers to.
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()
        with self.job.lock:
            if self._read_plan is not None and self._report is None:
                self._predict(0)
                self._report = self._summed(self._read_plan)
                self.job.num_epochs -= 1
                self.job.num_reported_plans = (
                    self._plans_before + self._report.plan_changes
                )

    @contextmanager
    def stage(
        self,
        name: str,
        samples: int = 0,
        *,
        cut: int | None = None,
        failures: int = 0,
    ) -> Iterator[None]:
        """Records the block as a stage of :data:`LOOP_STAGES`.

        Args:
            name: the stage.
            samples: number of samples of the stage.
            cut: cut after which the layers begin that it computes; None for
                none.
            failures: samples that arrived but cannot be decoded.
        """
        job = self.job
        by_cut = {} if cut is None else {cut: samples}
        wall, cpu = job.clock(), job.thread_clock()
        try:
            yield
        finally:
            wall, cpu = job.clock() - wall, job.thread_clock() - cpu
            event = StageEvent(wall, cpu, samples, failures, by_cut, name)
            with job.lock:
                self._loop[name] += wall
                job.record_stage(event)
            if by_cut:
                self.count(samples_by_cut=by_cut)
                self.prepared(samples + failures)

    def prepared(self, samples: int) -> None:
        """Counts samples whose features are there, for the progress bar.

        They wait in the shuffle buffer before a batch has them.
        """
        bar = self._bar
        if bar is not None:
            bar.add(samples)

    def count(self, **amounts: Any) -> None:
        """Adds to fields of :class:`.JobStats`, by their names."""
        self._stats.add(**amounts)
        self.job.counters.add(**amounts)

    def record_batch(self, event: BatchEvent) -> None:
        """Records a batch, before the loop receives it."""
        with self.job.lock:
            self._num_batches += event.num_batches
            self._loop[TRAINING] += event.training_seconds
            self._predict(event.samples)
        self.count(samples=event.samples, local_hits=event.local_hits)
        self.prepared(event.local_hits)

    def _predict(self, samples: int) -> None:
        """Sums what the plan predicted for the time since the last batch."""
        now = self.job.clock()
        rate = self.plan_status().samples_per_second
        if rate:
            sums = self._prediction
            sums["seconds"] += now - self._last_batch
            sums["samples"] += samples
            sums["predicted_seconds"] += samples / rate
        self._last_batch = now

    # --- threads that fetch ---

    @contextmanager
    def span(
        self, route: Route, samples: int
    ) -> Iterator[Callable[[SpanEvent], None]]:
        """Records the block as the load of a span, in the calling thread.

        Args:
            route: scheduled route.
            samples: number of the span's samples.

        Yields:
            A function to call with the costs, unless the load fails.
        """
        job, costs = self.job, list[SpanEvent]()
        traffic, counts = job.traffic.of_thread, job.counters.of_thread
        started = job.clock()
        try:
            yield costs.append
        finally:
            event = costs[0] if costs else SpanEvent()
            event = replace(
                event,
                route=route,
                samples=samples,
                seconds=job.clock() - started,
                traffic=event.traffic + job.traffic.of_thread - traffic,
                counts=job.counters.of_thread - counts,
            )
            with job.lock:
                self._spans += event
                if costs:
                    job.record_span(event)

    # --- any thread ---

    @property
    def report(self) -> EpochReport | None:
        """The report so far; None before the epoch begins."""
        with self.job.lock:
            if self._read_plan is None:
                return None
            return self._report or self._summed(self._read_plan)

    def _summed(self, expected: ReadPlan) -> EpochReport:
        spans, now, sums = self._spans, self.plan_status(), self._prediction
        stats, traffic = self._stats.count() + spans.counts, spans.traffic
        predicted = compared = None
        if sums["predicted_seconds"]:
            predicted = sums["samples"] / sums["predicted_seconds"]
            if sums["seconds"] and not stats.cached and not stats.local_hits:
                compared = sums["predicted_seconds"] / sums["seconds"]
        return EpochReport(
            epoch=self.epoch,
            split=self.split,
            is_finished=not self._has_failed
            and self._num_batches == len(expected.batches),
            samples=stats.samples,
            expected_samples=expected.num_samples,
            seconds=self.job.clock() - self._started,
            received_bytes=traffic.received_bytes,
            sent_bytes=traffic.sent_bytes,
            requests=traffic.requests,
            storage_seconds={name: spans.stage(name) for name in CLOCK_STAGES},
            storage_cpu_seconds=spans.server_cpu_seconds,
            fetch_seconds={
                FETCH: spans.read_seconds
                + max(0.0, spans.request_seconds - spans.unpack_cpu_seconds),
                DECODE: spans.decode_cpu_seconds + spans.unpack_cpu_seconds,
            },
            loop_seconds=dict(self._loop),
            samples_by_cut=dict(sorted(stats.samples_by_cut.items())),
            cached_samples=stats.cached,
            local_hits=stats.local_hits,
            retries=stats.retries + traffic.retries,
            fallbacks=stats.fallbacks,
            skipped_samples=stats.skipped,
            saturated_features=stats.saturated,
            plan=now.label,
            plan_changes=now.num_changes - self._plans_before,
            predicted_samples_per_second=predicted,
            measured_per_predicted=compared,
            limited_by=now.binding,
        )
