"""What a job measures while it trains, window by window."""

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

NEW_WEIGHT = 0.3
"""Of the newest span in the moving average of its way."""
NEW_RATE_WEIGHT = 0.5
"""Of the newest window in that of the rate."""
MIN_WINDOW_SECONDS = 1.0
"""A shorter window says nothing of the rate."""


class MetricsCollector:
    """Adds up what threads report; :meth:`take` begins a new window.

    Time, CPU time and bytes count while the job loads
    (:meth:`loading`) and no other: what a process does between its epochs
    says nothing of the job.

    Args:
        received_bytes: bytes received by the job so far.
        clock: monotonic seconds.
        cpu_clock: CPU seconds of this process.
        thread_clock: CPU seconds of the calling thread.
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
        # Python's collector may close a forgotten loop in this very thread.
        self._lock = threading.RLock()
        self._load: Load | None = None
        self._rate = 0.0
        self._planned_rate = 0.0
        self._sample_seconds: dict[Route, float] = {}
        self._under_way: Counter[Route] = Counter()
        self._waiting: Counter[int] = Counter()
        self._finish_seconds: dict[int, float] = {}
        self._link_seconds: Mapping[Route, float] = {}
        self.num_spans = 0
        """That came so far, in all windows."""
        self._num_loading = 0
        self._num_reading = 0
        self._num_flows = 0.0
        self._mark()
        self._begin()

    def _begin(self) -> None:
        self._samples: Counter[Route] = Counter()
        self._cached: Counter[Route] = Counter()
        self._finished: Counter[int] = Counter()
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._most_pushed = self._num_pushed()

    def _num_pushed(self) -> int:
        """Pushed reads that are under way."""
        return self._under_way.total() - self._under_way[RAW_ROUTE]

    def record_span(
        self,
        way: Route,
        num_samples: int,
        seconds: float,
        report: SpanMetrics,
    ) -> None:
        """Notes a span that has come.

        Args:
            way: it was meant to go.
            num_samples: of it.
            seconds: from its start to its end.
            report: of its source.
        """
        with self._lock:
            self.num_spans += 1
            sums = self._sums
            plain = report.fell_back or report.raw_seconds > 0
            came = RAW_ROUTE if plain else way
            if came == RAW_ROUTE:
                # Not what was tried before, and waited for.
                seconds = report.raw_seconds or seconds
            self._waiting[came[0]] += num_samples
            if report.was_cached:
                # Nothing of the worker's, so that it says nothing of those
                # that will be computed.
                self._samples[way] += num_samples
                self._cached[way] += num_samples
                return
            _average(self._sample_seconds, came, seconds, num_samples)
            if came == RAW_ROUTE:
                self._samples[RAW_ROUTE] += num_samples
                sums["stream"] += seconds
                sums["read"] += report.read_seconds
                sums["read_bytes"] += report.read_bytes
                sums["decode_cpu"] += report.decode_cpu_seconds
                if report.fell_back:
                    sums["fell_back"] += num_samples
                return
            self._samples[way] += num_samples
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

    @contextmanager
    def in_flight(self, way: Route) -> Iterator[None]:
        """What happens inside loads a span that was dealt to a way."""
        with self._lock:
            self._under_way[way] += 1
            self._most_pushed = max(self._most_pushed, self._num_pushed())
        try:
            yield
        finally:
            with self._lock:
                self._under_way[way] -= 1

    @property
    def throughput(self) -> Throughput:
        with self._lock:
            loops = max(1, self._num_loading)
            return Throughput(
                max(self._rate, self._planned_rate / loops),
                dict(self._sample_seconds),
                {way: n / loops for way, n in self._under_way.items()},
                {cut: n / loops for cut, n in self._waiting.items()},
                dict(self._finish_seconds),
                self._link_seconds,
            )

    def set_link_seconds(self, link_seconds: Mapping[Route, float]) -> None:
        """Takes in what the whole link takes for a sample, by way."""
        with self._lock:
            self._link_seconds = dict(link_seconds)

    def set_planned_rate(self, samples_per_second: float) -> None:
        """Takes in what the mix in force is planned to reach."""
        with self._lock:
            self._planned_rate = samples_per_second

    @contextmanager
    def loading(self) -> Iterator[None]:
        """What happens inside belongs to the job."""
        with self._lock:
            self._add_up()
            self._num_loading += 1
            if self._num_loading == 1:
                # Loops that were left have not come back for these.
                self._waiting.clear()
        try:
            yield
        finally:
            with self._lock:
                self._add_up()
                self._num_loading -= 1

    @contextmanager
    def reading(self, flows: float = 1.0) -> Iterator[None]:
        """What happens inside is a plain read that waits for bytes.

        Args:
            flows: at a time that it is known to carry as much as.
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
        """Adds what has passed since the last mark, if it counts."""
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
        """Of loading, since the present window began."""
        with self._lock:
            self._add_up()
            return self._sums["wall"]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measures how long the training loop waits for a span."""
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
        """Measures the layers behind a cut, in the loop's thread.

        Args:
            cut: at which they begin.
            num_samples: for which they are computed.
            num_failed: further samples that came, and have none.
        """
        wall, cpu = self._clock(), self._thread_clock()
        try:
            yield
        finally:
            spent = self._clock() - wall
            used = self._thread_clock() - cpu
            with self._lock:
                self._finished[cut] += num_samples
                self._waiting[cut] -= num_samples + num_failed
                _average(self._finish_seconds, cut, spent, num_samples)
                self._sums["finish_cpu"] += used

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
        """The window so far; the next one begins."""
        with self._lock:
            self._add_up()
            sums = self._sums
            found = WindowMetrics(
                seconds=sums["wall"],
                samples=dict(self._samples),
                received_bytes=int(sums["received"]),
                client_cpu_seconds=sums["cpu"],
                decode_cpu_seconds=sums["decode_cpu"],
                suffix_samples=dict(self._finished),
                suffix_cpu_seconds=sums["finish_cpu"],
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
                max_pushed=self._most_pushed,
                pushed_samples=int(sums["pushed"]),
                cached=dict(self._cached),
                server_cpu_seconds=sums["server_cpu_seconds"],
                forward_seconds=sums["forward_seconds"],
                forward_cpu_seconds=sums["forward_cpu_seconds"],
                fell_back=int(sums["fell_back"]),
                load=self._load,
            )
            self._begin()
            self._note_rate(found)
            return found

    def _note_rate(self, seen: WindowMetrics) -> None:
        # Without the ways on which all had been kept.
        dealt = +Counter(seen.without_cached().samples)
        if not dealt or seen.seconds < MIN_WINDOW_SECONDS:
            return
        rate = dealt.total() / seen.seconds / max(1, self._num_loading)
        before = self._rate or rate
        self._rate = before + NEW_RATE_WEIGHT * (rate - before)
        unused = self._sample_seconds.keys() - dealt.keys()
        for way in unused - set(self._under_way.elements()):
            self._sample_seconds[way] /= 2


def _average(
    averages: dict[Key, float], key: Key, seconds: float, num_samples: int
) -> None:
    """Takes another span's seconds into those of a sample."""
    new = seconds / max(num_samples, 1)
    before = averages.get(key, new)
    averages[key] = before + NEW_WEIGHT * (new - before)


def _flows(sums: Mapping[str, float]) -> float:
    """A flow for each plain read, and for as many bytes of pushed answers."""
    plain = _share(sums["flows"], sums["reading"])
    return plain * max(1.0, _share(sums["reading_bytes"], sums["read_bytes"]))


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
