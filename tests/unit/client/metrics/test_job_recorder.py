"""Metrics collected by window, with injected clocks."""

import pytest

from hapi_client.metrics.events import LAYERS, TRAINING, SpanEvent
from hapi_client.metrics.job_recorder import JobRecorder
from hapi_client.reports.epoch_recorder import EpochRecorder
from hapi_client.swift.traffic_counters import Traffic
from hapi_protocol.summary import WorkerLoad
from hapi_splitter.planner.problem import RAW_ROUTE, Route

PUSHED = Route(3, "float16")


class ClockedRecorder(JobRecorder):
    """A recorder with clocks that a test advances."""

    def __init__(self):
        self.wall = self.cpu = 0.0
        super().__init__(
            Traffic(),
            clock=lambda: self.wall,
            cpu_clock=lambda: self.cpu,
            thread_clock=lambda: self.cpu,
        )
        self.stage = EpochRecorder(self).stage

    def advance(self, wall, cpu=0, received=0):
        self.wall += wall
        self.cpu += cpu
        self.traffic.add(received_bytes=received)

    def add(self, route, samples, seconds, **costs):
        if route == RAW_ROUTE:
            costs = {"raw_seconds": seconds, **costs}
        event = SpanEvent(samples, seconds, route=route, **costs)
        self.record_span(event)

    def sample_seconds(self, route):
        return self._sample_seconds[route]


@pytest.fixture
def recorder():
    return ClockedRecorder()


def test_only_time_of_loading_counts_and_nested_loading_once(recorder):
    recorder.advance(100, 50, 1000)
    with recorder.loading():
        recorder.advance(4, 3, 200)
    recorder.advance(100, 50, 1000)
    with recorder.loading(), recorder.loading():
        recorder.advance(2, 1, 100)
        assert recorder.window_seconds == 6
        first = recorder.take()
        recorder.advance(5)
    recorder.advance(10)
    assert recorder.window_seconds == 5
    assert (first.seconds, first.client_cpu_seconds) == (6, 4)
    assert first.received_bytes == 300
    assert recorder.take().seconds == 5
    assert recorder.window_seconds == 0


def test_decoding_suffix_and_training_are_counted_separately(recorder):
    with recorder.loading():
        recorder.advance(0, cpu=1)
        with recorder.stage(LAYERS, 8, cut=0):
            recorder.advance(0, cpu=5)
        recorder.add(RAW_ROUTE, 8, 9, decode_cpu_seconds=2)
        with recorder.stage(TRAINING, 32):
            recorder.advance(1.5, cpu=3)
        window = recorder.take()
    assert window.client_cpu_seconds == 9
    assert window.raw.decode_cpu_seconds == 2
    layers, training = window.layers, window.training
    assert (layers.cpu_seconds, layers.samples_by_cut) == (5, {0: 8})
    assert (training.samples, training.cpu_seconds) == (32, 3)
    assert training.seconds == 1.5


def test_concurrent_waiting_reads_count_once(recorder):
    with recorder.loading():
        recorder.advance(1, received=7)
        with recorder.reading():
            recorder.advance(2, received=20)
            with recorder.reading():
                recorder.advance(3, received=30)
        recorder.advance(4, received=5)
        window = recorder.take()
    assert (window.seconds, window.reading_seconds) == (10, 5)
    assert (window.reading_bytes, window.received_bytes) == (50, 62)


@pytest.mark.parametrize(
    ("reads", "read_bytes", "flows"),
    [
        ([(1, 300)], 300, 1.0),
        ([(1, 900)], 300, 3.0),
        ([(4, 200), (1, 100)], 300, 2.5),
    ],
    ids=["alone", "with other responses", "of several flows"],
)
def test_flows_of_raw_reads_are_weighted_by_bytes(
    recorder, reads, read_bytes, flows
):
    with recorder.loading():
        for weight, received in reads:
            with recorder.reading(weight):
                recorder.advance(2, received=received)
        recorder.advance(2, received=500)
        recorder.add(RAW_ROUTE, 10, 5, read_seconds=4, read_bytes=read_bytes)
        assert recorder.take().reading_flows == pytest.approx(flows)

        # One flow in two windows.
        with recorder.reading():
            recorder.advance(2, received=200)
            assert recorder.take().reading_flows == 1
            recorder.advance(1, received=100)
        recorder.add(RAW_ROUTE, 10, 3.5, read_seconds=3, read_bytes=300)
        assert recorder.take().reading_flows == 1


def test_maximum_of_concurrent_pushed_reads_is_counted(recorder):
    with recorder.in_flight(RAW_ROUTE), recorder.in_flight(PUSHED):
        with recorder.in_flight(PUSHED):
            pass
        assert recorder.take().max_pushed == 2
        # One continues from the previous window.
        assert recorder.take().max_pushed == 1
    assert recorder.take().max_pushed == 1
    assert recorder.take().max_pushed == 0


def test_spans_are_summed_by_route(recorder):
    load = WorkerLoad(0.5, 2, 0.9, 0.8)
    stages = {"forward": 0.4, "send_blocked": 0.5}
    recorder.add(RAW_ROUTE, 10, 4, read_seconds=3)
    recorder.add(PUSHED, 4, 1, server_seconds=stages, load=load)
    recorder.add(PUSHED, 4, 1, server_cpu_seconds=0.5)
    recorder.add(PUSHED, 6, 9, read_seconds=1, raw_seconds=4, fell_back=6)
    window = recorder.take()

    assert window.samples == {RAW_ROUTE: 16, PUSHED: 8}
    assert (window.pushed.samples, window.raw.fell_back) == (8, 6)
    assert window.reading_share == pytest.approx(4.0 / 8.0)
    assert window.blocked_share == pytest.approx(0.25)
    assert window.pushed.seconds == 2.0
    assert window.pushed.server_seconds == stages
    assert window.pushed.server_cpu_seconds == 0.5
    assert window.load == load
    assert recorder.num_spans == 4
    assert recorder.take().num_samples == 0


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_average_of_a_route_decays_unless_a_span_is_in_flight(
    recorder, is_in_flight
):
    recorder.add(PUSHED, 10, 40)
    with recorder.in_flight(PUSHED if is_in_flight else RAW_ROUTE):
        for num_windows in range(3):
            with recorder.loading():
                recorder.advance(5)
                recorder.add(RAW_ROUTE, 10, 1)
            recorder.take()
            # The span itself arrived in the first window.
            decay = 1 if is_in_flight else 2**num_windows
            assert recorder.sample_seconds(PUSHED) == pytest.approx(4 / decay)
    assert recorder.sample_seconds(RAW_ROUTE) == pytest.approx(0.1)
    # The first window has both spans: 4 per second, then 2 and 2.
    assert recorder.samples_per_second == pytest.approx(2.5)


def test_span_is_finished_after_all_pending_samples(recorder):
    with recorder.loading(), recorder.in_flight(RAW_ROUTE):
        recorder.add(PUSHED, 8, 4)
        recorder.add(RAW_ROUTE, 8, 0.8)
        recorder.add(RAW_ROUTE, 8, 0.8)
        with recorder.stage(LAYERS, 7, cut=0, failures=1):
            recorder.advance(1.4)
        with recorder.stage(LAYERS, 8, cut=PUSHED[0]):
            pass
        # A span of eight samples is in flight, eight samples wait, and the
        # new span's eight come last.
        assert recorder.pending_samples(RAW_ROUTE, 8) == 16
        seconds = recorder.span_seconds(RAW_ROUTE, 8)
        assert seconds == pytest.approx(0.8 + 24 * 0.2)
        assert recorder.pending_samples(PUSHED, 8) == 0
        assert recorder.span_seconds(PUSHED, 8) == pytest.approx(4.0)


def test_concurrent_spans_share_the_link(recorder):
    recorder.add(RAW_ROUTE, 8, 8)
    recorder.link_seconds = {RAW_ROUTE: 0.9, PUSHED: 0.01}
    alone = recorder.span_seconds(RAW_ROUTE, 8)
    with recorder.loading(), recorder.in_flight(RAW_ROUTE):
        assert recorder.span_seconds(RAW_ROUTE, 8) == pytest.approx(14.4)
        assert recorder.span_seconds(PUSHED, 8) == pytest.approx(0.08)
    assert alone == pytest.approx(8.0)


def test_throughput_is_the_larger_of_planned_and_measured(recorder):
    with recorder.loading():
        recorder.advance(0.1)
        recorder.add(RAW_ROUTE, 50, 0.1)
    recorder.take()
    # So short a window does not count.
    assert recorder.samples_per_second == 0.0
    recorder.planned_rate = 6.0
    assert recorder.samples_per_second == 6.0
    with recorder.loading():
        recorder.advance(5)
        recorder.add(RAW_ROUTE, 10, 2)
    recorder.take()
    assert recorder.samples_per_second == 6.0
    with recorder.loading(), recorder.loading():
        assert recorder.samples_per_second == 3.0
    recorder.planned_rate = 1.0
    assert recorder.samples_per_second == pytest.approx(2.0)


def test_samples_of_an_abandoned_loop_are_not_pending(recorder):
    with recorder.loading():
        recorder.add(RAW_ROUTE, 8, 1)
    recorder.add(RAW_ROUTE, 8, 1)
    with recorder.loading():
        assert recorder.pending_samples(RAW_ROUTE, 8) == 0
        recorder.add(RAW_ROUTE, 8, 1)
        with recorder.loading():
            # Two loops share the pending samples.
            assert recorder.pending_samples(RAW_ROUTE, 8) == 4


def test_raw_read_is_a_fallback_only_after_a_failed_push(recorder):
    recorder.add(PUSHED, 10, 9, raw_seconds=1)
    window = recorder.take()
    assert window.samples == {RAW_ROUTE: 10}
    assert (window.raw.fell_back, window.pushed.samples) == (0, 0)

    # The time of failed pushes is not that of the raw read.
    recorder.add(
        PUSHED, 10, 120, read_seconds=1.8, raw_seconds=2, fell_back=10
    )
    assert recorder.sample_seconds(RAW_ROUTE) == pytest.approx(0.13)
    assert recorder.span_seconds(PUSHED, 10) == 0
    window = recorder.take()
    assert window.reading_share == pytest.approx(0.9)
    assert (window.raw.fell_back, window.pushed.samples) == (10, 0)


def test_cached_spans_do_not_count_for_costs(recorder):
    recorder.add(PUSHED, 8, 2, server_cpu_seconds=0.5)
    recorder.add(PUSHED, 40, 0.5, was_cached=True)
    window = recorder.take()
    assert window.samples == {PUSHED: 48}
    assert (window.pushed.samples, window.cached) == (8, {PUSHED: 40})
    assert window.pushed.server_cpu_seconds == 0.5
    assert window.pushed.seconds == 2.0
    assert window.without_cached().samples == {PUSHED: 8}
    assert recorder.sample_seconds(PUSHED) == 0.25
    assert recorder.pending_samples(PUSHED, 8) == 48
    assert recorder.take().cached == {}


def test_workers_count_while_they_have_computed_lately(recorder):
    with recorder.loading():
        assert recorder.take().num_workers == 0
        for worker in ("a", "b", "a"):
            recorder.add(PUSHED, 8, 1, worker=worker)
        assert recorder.take().num_workers == 2
        recorder.advance(50)
        recorder.add(PUSHED, 8, 1, worker="a")
        assert recorder.take().num_workers == 2
        recorder.advance(20)
        assert recorder.take().num_workers == 1
