"""Records the events of a job, and sums them by measurement window."""

from __future__ import annotations

import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from hapi_client.metrics.events import (
    JobStats,
    SpanEvent,
    StageEvent,
    WindowMetrics,
)
from hapi_client.sums import ThreadTotal, Total
from hapi_client.swift.traffic_counters import Traffic
from hapi_protocol.summary import WorkerLoad
from hapi_splitter.planner.problem import RAW_ROUTE, Route

Key = TypeVar("Key")

# Spans of a route differ by the size of their samples: the average has the
# last three or so, and one slow span makes no straggler of its route.
SPAN_WEIGHT = 0.3
"""Smoothing weight of the newest span in the average of its route."""
# As the estimates of the planner: three windows are seven eighths of it.
WINDOW_WEIGHT = 0.5
"""Smoothing weight of the newest window in the average throughput."""
# Chosen: a worker of many gets no span for some windows by chance, and one
# that was stopped should not count for the capacity in many plans.
WORKER_SECONDS = 60.0
"""Time after which a worker that has computed nothing no longer counts."""
# An epoch of cached samples, or the end of one, leaves windows of few spans,
# whose throughput is that of a burst.
MIN_WINDOW_SECONDS = 1.0
"""Length below which a window does not count for the throughput."""
_LOADING, _READING, _FLOWS = "loading", "reading", "flows"


@dataclass(eq=False)
class JobRecorder:
    """Sums the events of a job's loops; :meth:`take` starts a new window.

    Time, CPU time and bytes count only while the job loads
    (:meth:`loading`), because a process may do other work between epochs.

    Attributes:
        traffic: traffic of the job's connection.
        clock: returns monotonic seconds.
        cpu_clock: returns CPU seconds of this process.
        thread_clock: returns CPU seconds of the calling thread.
        counters: totals of the job; threads may add to them.
        num_spans: spans that arrived so far, in all windows.
        num_epochs: epochs that run.
        num_reported_plans: plans that the reports of other epochs count.
        planned_rate: planned throughput of the job, in samples per second.
        link_seconds: seconds per sample at the full bandwidth of the link,
            by route.
        lock: held while events are added.
    """

    traffic: Traffic
    clock: Callable[[], float] = time.monotonic
    cpu_clock: Callable[[], float] = time.process_time
    thread_clock: Callable[[], float] = time.thread_time

    def __post_init__(self) -> None:
        self.counters = ThreadTotal(JobStats)
        self.num_spans = self.num_epochs = self.num_reported_plans = 0
        self.planned_rate = self._rate = 0.0
        self.link_seconds: Mapping[Route, float] = {}
        # Reentrant: the garbage collector may close an abandoned loop in
        # the thread that holds the lock.
        self.lock = threading.RLock()
        self._load: WorkerLoad | None = None
        self._workers: dict[str, float] = {}
        # Moving averages of a span's seconds per sample.  Those of a route
        # are halved with each window without a span on it, so that the route
        # is tried again.
        self._sample_seconds: dict[Route, float] = {}
        self._suffix_seconds: dict[int, float] = {}
        self._in_flight: Counter[Route] = Counter()
        self._active: Counter[str] = Counter()
        self._waiting: Counter[int] = Counter()
        self._before = self._now()
        self._begin()

    def _begin(self) -> None:
        self._window = Total(WindowMetrics)
        self._max_pushed = self._num_pushed()

    def _num_pushed(self) -> int:
        """Returns the number of pushed-down reads in flight."""
        return self._in_flight.total() - self._in_flight[RAW_ROUTE]

    def record_span(self, event: SpanEvent) -> None:
        """Records a span that has arrived."""
        with self.lock:
            self.num_spans += 1
            route = RAW_ROUTE if event.raw_seconds else event.route
            self._waiting[route.cut] += event.samples
            by_route = {route: event.samples}
            if event.was_cached:
                # The worker computed nothing, so there are no costs.
                self._window.add(samples=by_route, cached=by_route)
                return
            # Those of a raw read exclude failed attempts before it.
            seconds = event.raw_seconds or event.seconds
            _average(self._sample_seconds, route, seconds, event.samples)
            if route == RAW_ROUTE:
                self._window.add(samples=by_route, raw=event)
                return
            self._window.add(samples=by_route, pushed=event)
            self._load = event.load or self._load
            self._workers[event.worker] = self.clock()

    def record_stage(self, event: StageEvent) -> None:
        """Records a stage of the training loop's thread."""
        with self.lock:
            self._window.add(**{event.stage: event})
            for cut, samples in event.samples_by_cut.items():
                self._waiting[cut] -= samples + event.failures
                _average(self._suffix_seconds, cut, event.seconds, samples)

    def in_flight(self, route: Route) -> AbstractContextManager[None]:
        """Counts a span of a route as in flight during the block."""
        return self._counted(self._in_flight, {route: 1})

    def loading(self) -> AbstractContextManager[None]:
        """Counts time, CPU time and bytes of the block for the job."""
        return self._counted(self._active, {_LOADING: 1})

    def reading(self, flows: float = 1.0) -> AbstractContextManager[None]:
        """Counts the block as a raw read that waits for bytes.

        Args:
            flows: number of concurrent reads to which it is equivalent.
        """
        return self._counted(self._active, {_READING: 1, _FLOWS: flows})

    @contextmanager
    def _counted(
        self, counter: Counter[Key], amounts: Mapping[Key, float]
    ) -> Iterator[None]:
        with self.lock:
            self._add_up()
            if _LOADING in amounts and not self._active[_LOADING]:
                # Samples of abandoned loops will not be finished.
                self._waiting.clear()
            counter.update(amounts)
            self._max_pushed = max(self._max_pushed, self._num_pushed())
        try:
            yield
        finally:
            with self.lock:
                self._add_up()
                counter.subtract(amounts)

    def _now(self) -> tuple[float, float, int]:
        received_bytes = self.traffic.count().received_bytes
        return self.clock(), self.cpu_clock(), received_bytes

    def _add_up(self) -> None:
        """Adds time and bytes since the last call while the job loads."""
        before, self._before = self._before, self._now()
        wall, cpu, received = map(operator.sub, self._before, before)
        active, window = self._active, self._window
        if not active[_LOADING]:
            return
        window.add(
            seconds=wall, client_cpu_seconds=cpu, received_bytes=received
        )
        if active[_READING]:
            window.add(
                reading_seconds=wall,
                reading_bytes=received,
                flow_seconds=active[_FLOWS] * wall,
            )

    @property
    def window_seconds(self) -> float:
        """Seconds of loading in the current window."""
        with self.lock:
            self._add_up()
            return self._window.count().seconds

    @property
    def samples_per_second(self) -> float:
        """Throughput of one loop, cached samples excluded.

        The larger of measured and planned throughput, because a straggler
        lowers the measured value; 0 before the first window and plan.
        """
        with self.lock:
            return max(self._rate, self.planned_rate / self._num_loops)

    @property
    def _num_loops(self) -> int:
        return max(1, self._active[_LOADING])

    def pending_samples(self, route: Route, span_samples: int) -> float:
        """Returns the scheduled samples of a loop that are not finished.

        Args:
            route: cut and encoding; routes of one cut share the samples that
                wait for their suffix.
            span_samples: samples of one span in flight.
        """
        with self.lock:
            in_flight = self._in_flight[route] * span_samples
            return (in_flight + self._waiting[route.cut]) / self._num_loops

    def span_seconds(self, route: Route, span_samples: int) -> float:
        """Returns the seconds until one more span of a route is finished.

        The link, which concurrent spans share, bounds it from below, because
        the measured average may stem from spans that had it to themselves.
        """
        pending = self.pending_samples(route, span_samples) + span_samples
        with self.lock:
            in_flight = self._in_flight[route] / self._num_loops + 1
            seconds = max(
                self._sample_seconds.get(route, 0.0),
                self.link_seconds.get(route, 0.0) * in_flight,
            )
            suffix_seconds = self._suffix_seconds.get(route.cut, 0.0)
        return seconds * span_samples + suffix_seconds * pending

    def take(self) -> WindowMetrics:
        """Returns the metrics of the window and starts the next one."""
        with self.lock:
            self._add_up()
            oldest = self.clock() - WORKER_SECONDS
            window = replace(
                self._window.count(),
                max_pushed=self._max_pushed,
                load=self._load,
                num_workers=sum(
                    seen >= oldest for seen in self._workers.values()
                ),
            )
            self._begin()
            self._update_throughput(window)
            return window

    def _update_throughput(self, window: WindowMetrics) -> None:
        # Unary plus drops routes whose samples were all cached.
        computed = +Counter(window.without_cached().samples)
        if not computed or window.seconds < MIN_WINDOW_SECONDS:
            return
        rate = computed.total() / window.seconds / self._num_loops
        before = self._rate or rate
        self._rate = before + WINDOW_WEIGHT * (rate - before)
        unused = self._sample_seconds.keys() - computed.keys()
        for route in unused - set(self._in_flight.elements()):
            self._sample_seconds[route] /= 2


def _average(
    averages: dict[Key, float], key: Key, seconds: float, num_samples: int
) -> None:
    """Adds a span to a moving average of seconds per sample."""
    new = seconds / max(num_samples, 1)
    before = averages.get(key, new)
    averages[key] = before + SPAN_WEIGHT * (new - before)
