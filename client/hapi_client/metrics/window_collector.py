"""Collector of a job's metrics, by measurement window."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from hapi_client.metrics.throughput import Throughput
from hapi_client.metrics.window_metrics import SpanMetrics, WindowMetrics
from hapi_protocol.summary import Load
from hapi_splitter.planner.problem import RAW_ROUTE, Route

Key = TypeVar("Key")

SPAN_WEIGHT = 0.3
"""Smoothing weight of the newest span in the average of its route."""
WINDOW_WEIGHT = 0.5
"""Smoothing weight of the newest window in the average throughput."""
WORKER_SECONDS = 60.0
"""Time after which a worker that has computed nothing no longer counts."""
MIN_WINDOW_SECONDS = 1.0
"""Length below which a window does not count for the throughput."""


class MetricsCollector:
    """Sums the reports of threads; :meth:`take` starts a new window.

    Time, CPU time and bytes count only while the job loads
    (:meth:`loading`), because a process may do other work between epochs.

    Args:
        received_bytes: returns the bytes received by the job so far.
        clock: returns monotonic seconds.
        cpu_clock: returns CPU seconds of this process.
        thread_clock: returns CPU seconds of the calling thread.

    Attributes:
        num_spans: spans that arrived so far, in all windows.
    """

    def __init__(
        self,
        received_bytes: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        thread_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._received_bytes = received_bytes
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._thread_clock = thread_clock
        # Reentrant: the garbage collector may close an abandoned loop in
        # the thread that holds the lock.
        self._lock = threading.RLock()
        self._load: Load | None = None
        self._workers: dict[str, float] = {}
        self._rate = 0.0
        self._planned_rate = 0.0
        self._sample_seconds: dict[Route, float] = {}
        self._in_flight: Counter[Route] = Counter()
        self._waiting: Counter[int] = Counter()
        self._suffix_seconds: dict[int, float] = {}
        self._link_seconds: Mapping[Route, float] = {}
        self.num_spans = 0
        self._num_loading = 0
        self._num_reading = 0
        self._num_flows = 0.0
        self._mark()
        self._begin()

    def _begin(self) -> None:
        self._samples: Counter[Route] = Counter()
        self._cached: Counter[Route] = Counter()
        self._suffix_samples: Counter[int] = Counter()
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._max_pushed = self._num_pushed()

    def _num_pushed(self) -> int:
        """Returns the number of pushed-down reads in flight."""
        return self._in_flight.total() - self._in_flight[RAW_ROUTE]

    def record_span(
        self,
        route: Route,
        num_samples: int,
        seconds: float,
        report: SpanMetrics,
    ) -> None:
        """Records a span that has arrived.

        Args:
            route: scheduled route of the span.
            num_samples: number of its samples.
            seconds: time from its start to its end.
            report: metrics of its source.
        """
        with self._lock:
            self.num_spans += 1
            sums = self._sums
            is_raw = report.fell_back or report.raw_seconds > 0
            taken = RAW_ROUTE if is_raw else route
            if taken == RAW_ROUTE:
                # Excludes failed attempts before the raw read.
                seconds = report.raw_seconds or seconds
            self._waiting[taken.cut] += num_samples
            if report.was_cached:
                # The worker computed nothing, so there are no costs.
                self._samples[route] += num_samples
                self._cached[route] += num_samples
                return
            _average(self._sample_seconds, taken, seconds, num_samples)
            if taken == RAW_ROUTE:
                self._samples[RAW_ROUTE] += num_samples
                sums["stream"] += seconds
                sums["read"] += report.read_seconds
                sums["read_bytes"] += report.read_bytes
                sums["decode_cpu"] += report.decode_cpu_seconds
                if report.fell_back:
                    sums["fell_back"] += num_samples
                return
            self._samples[route] += num_samples
            sums["push"] += seconds
            for name in (
                "server_cpu_seconds",
                "forward_seconds",
                "forward_cpu_seconds",
                "send_blocked_seconds",
            ):
                sums[name] += getattr(report, name)
            sums["pushed"] += num_samples
            self._load = report.load or self._load
            self._workers[report.worker] = self._clock()

    @contextmanager
    def in_flight(self, route: Route) -> Iterator[None]:
        """Counts a span of a route as in flight during the block."""
        with self._lock:
            self._in_flight[route] += 1
            self._max_pushed = max(self._max_pushed, self._num_pushed())
        try:
            yield
        finally:
            with self._lock:
                self._in_flight[route] -= 1

    @property
    def throughput(self) -> Throughput:
        with self._lock:
            loops = max(1, self._num_loading)
            return Throughput(
                max(self._rate, self._planned_rate / loops),
                dict(self._sample_seconds),
                {route: n / loops for route, n in self._in_flight.items()},
                {cut: n / loops for cut, n in self._waiting.items()},
                dict(self._suffix_seconds),
                self._link_seconds,
            )

    def set_link_seconds(self, link_seconds: Mapping[Route, float]) -> None:
        """Sets the seconds per sample of the whole link, by route."""
        with self._lock:
            self._link_seconds = dict(link_seconds)

    def set_planned_rate(self, samples_per_second: float) -> None:
        """Sets the planned throughput of the current plan."""
        with self._lock:
            self._planned_rate = samples_per_second

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Counts time, CPU time and bytes of the block for the job."""
        with self._lock:
            self._add_up()
            self._num_loading += 1
            if self._num_loading == 1:
                # Samples of abandoned loops will not be finished.
                self._waiting.clear()
        try:
            yield
        finally:
            with self._lock:
                self._add_up()
                self._num_loading -= 1

    @contextmanager
    def reading(self, flows: float = 1.0) -> Iterator[None]:
        """Counts the block as a raw read that waits for bytes.

        Args:
            flows: number of concurrent reads to which it is equivalent.
        """
        with self._lock:
            self._add_up()
            self._num_reading += 1
            self._num_flows += flows
        try:
            yield
        finally:
            with self._lock:
                self._add_up()
                self._num_reading -= 1
                self._num_flows -= flows

    def _mark(self) -> None:
        self._wall_before = self._clock()
        self._cpu_before = self._cpu_clock()
        self._bytes_before = self._received_bytes()

    def _add_up(self) -> None:
        """Adds time and bytes since the last mark while the job loads."""
        wall, cpu = self._wall_before, self._cpu_before
        received = self._bytes_before
        self._mark()
        if not self._num_loading:
            return
        sums = self._sums
        sums["wall"] += self._wall_before - wall
        sums["cpu"] += self._cpu_before - cpu
        sums["received"] += self._bytes_before - received
        if self._num_reading:
            sums["reading"] += self._wall_before - wall
            sums["flows"] += self._num_flows * (self._wall_before - wall)
            sums["reading_bytes"] += self._bytes_before - received

    @property
    def window_seconds(self) -> float:
        """Seconds of loading in the current window."""
        with self._lock:
            self._add_up()
            return self._sums["wall"]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measures the training loop's wait for a span."""
        started = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._sums["waiting"] += self._clock() - started

    @contextmanager
    def running_suffix(
        self, cut: int, num_samples: int, num_failed: int = 0
    ) -> Iterator[None]:
        """Measures the suffix of a cut, in the loop's thread.

        Args:
            cut: cut after which the suffix begins.
            num_samples: number of samples that it computes.
            num_failed: samples that arrived but cannot be decoded.
        """
        wall, cpu = self._clock(), self._thread_clock()
        try:
            yield
        finally:
            spent = self._clock() - wall
            used = self._thread_clock() - cpu
            with self._lock:
                self._suffix_samples[cut] += num_samples
                self._waiting[cut] -= num_samples + num_failed
                _average(self._suffix_seconds, cut, spent, num_samples)
                self._sums["suffix_cpu"] += used

    @contextmanager
    def training(self, num_samples: int) -> Iterator[None]:
        """Measures the training loop's work on a batch."""
        wall, cpu = self._clock(), self._thread_clock()
        try:
            yield
        finally:
            spent = self._clock() - wall
            used = self._thread_clock() - cpu
            with self._lock:
                self._sums["train_samples"] += num_samples
                self._sums["train"] += spent
                self._sums["train_cpu"] += used

    def take(self) -> WindowMetrics:
        """Returns the metrics of the window and starts the next one."""
        with self._lock:
            self._add_up()
            sums = self._sums
            window = WindowMetrics(
                seconds=sums["wall"],
                samples=dict(self._samples),
                received_bytes=int(sums["received"]),
                client_cpu_seconds=sums["cpu"],
                decode_cpu_seconds=sums["decode_cpu"],
                suffix_samples=dict(self._suffix_samples),
                suffix_cpu_seconds=sums["suffix_cpu"],
                train_samples=int(sums["train_samples"]),
                train_cpu_seconds=sums["train_cpu"],
                train_seconds=sums["train"],
                waiting_seconds=sums["waiting"],
                reading_share=_share(sums["read"], sums["stream"]),
                reading_seconds=sums["reading"],
                reading_bytes=int(sums["reading_bytes"]),
                reading_flows=_flows(sums),
                blocked_share=_share(
                    sums["send_blocked_seconds"], sums["push"]
                ),
                raw_read_seconds=sums["stream"],
                push_seconds=sums["push"],
                max_pushed=self._max_pushed,
                pushed_samples=int(sums["pushed"]),
                cached=dict(self._cached),
                server_cpu_seconds=sums["server_cpu_seconds"],
                forward_seconds=sums["forward_seconds"],
                forward_cpu_seconds=sums["forward_cpu_seconds"],
                fell_back=int(sums["fell_back"]),
                load=self._load,
                num_workers=self._num_workers(),
            )
            self._begin()
            self._update_throughput(window)
            return window

    def _num_workers(self) -> int:
        oldest = self._clock() - WORKER_SECONDS
        return sum(seen >= oldest for seen in self._workers.values())

    def _update_throughput(self, window: WindowMetrics) -> None:
        # Unary plus drops routes whose samples were all cached.
        computed = +Counter(window.without_cached().samples)
        if not computed or window.seconds < MIN_WINDOW_SECONDS:
            return
        rate = computed.total() / window.seconds / max(1, self._num_loading)
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


def _flows(sums: Mapping[str, float]) -> float:
    """Returns the flows of raw reads, scaled up by other bytes received."""
    raw = _share(sums["flows"], sums["reading"])
    return raw * max(1.0, _share(sums["reading_bytes"], sums["read_bytes"]))


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
