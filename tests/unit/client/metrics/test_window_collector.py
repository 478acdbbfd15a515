"""Metrics collected by window, with injected clocks."""

import pytest

from hapi_client.metrics.window_collector import MetricsCollector
from hapi_client.metrics.window_metrics import SpanMetrics
from hapi_protocol.summary import Load
from hapi_splitter.planner.problem import RAW_ROUTE, Route

PUSHED = Route(3, "float16")


class ClockedCollector(MetricsCollector):
    """A collector with clocks and a byte counter that a test advances."""

    def __init__(self):
        self.wall = self.cpu = 0.0
        self.received = 0
        super().__init__(
            lambda: self.received,
            clock=lambda: self.wall,
            cpu_clock=lambda: self.cpu,
            thread_clock=lambda: self.cpu,
        )

    def advance(self, wall, cpu=0, received=0):
        self.wall += wall
        self.cpu += cpu
        self.received += received

    def add(self, route, num_samples, seconds, **metrics):
        self.record_span(route, num_samples, seconds, SpanMetrics(**metrics))

    def sample_seconds(self, route):
        return self.throughput.sample_seconds[route]


@pytest.fixture
def collector():
    return ClockedCollector()


def test_only_time_of_loading_counts_and_nested_loading_once(collector):
    collector.advance(100, 50, 1000)
    with collector.loading():
        collector.advance(4, 3, 200)
    collector.advance(100, 50, 1000)
    with collector.loading(), collector.loading():
        collector.advance(2, 1, 100)
        assert collector.window_seconds == 6
        first = collector.take()
        collector.advance(5)
    collector.advance(10)
    assert collector.window_seconds == 5
    assert (first.seconds, first.client_cpu_seconds) == (6, 4)
    assert first.received_bytes == 300
    assert collector.take().seconds == 5
    assert collector.window_seconds == 0


def test_decoding_suffix_and_training_are_counted_separately(collector):
    with collector.loading():
        collector.advance(0, cpu=1)
        with collector.running_suffix(0, 8):
            collector.advance(0, cpu=5)
        collector.add(RAW_ROUTE, 8, 9, raw_seconds=9, decode_cpu_seconds=2)
        with collector.training(32):
            collector.advance(1.5, cpu=3)
        window = collector.take()
    assert window.client_cpu_seconds == 9
    assert window.decode_cpu_seconds == 2
    assert (window.suffix_cpu_seconds, window.suffix_samples) == (5, {0: 8})
    assert (window.train_samples, window.train_cpu_seconds) == (32, 3)
    assert window.train_seconds == 1.5


def test_concurrent_waiting_reads_count_once(collector):
    with collector.loading():
        collector.advance(1, received=7)
        with collector.reading():
            collector.advance(2, received=20)
            with collector.reading():
                collector.advance(3, received=30)
        collector.advance(4, received=5)
        window = collector.take()
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
    collector, reads, read_bytes, flows
):
    with collector.loading():
        for weight, received in reads:
            with collector.reading(weight):
                collector.advance(2, received=received)
        collector.advance(2, received=500)
        collector.add(RAW_ROUTE, 10, 5, read_seconds=4, read_bytes=read_bytes)
        assert collector.take().reading_flows == pytest.approx(flows)

        # One flow in two windows.
        with collector.reading():
            collector.advance(2, received=200)
            assert collector.take().reading_flows == 1
            collector.advance(1, received=100)
        collector.add(RAW_ROUTE, 10, 3.5, read_seconds=3, read_bytes=300)
        assert collector.take().reading_flows == 1


def test_maximum_of_concurrent_pushed_reads_is_counted(collector):
    with collector.in_flight(RAW_ROUTE), collector.in_flight(PUSHED):
        with collector.in_flight(PUSHED):
            pass
        assert collector.take().max_pushed == 2
        # One continues from the previous window.
        assert collector.take().max_pushed == 1
    assert collector.take().max_pushed == 1
    assert collector.take().max_pushed == 0


def test_spans_are_summed_by_route(collector):
    load = Load(0.5, 2, 0.9, 0.8)
    costs = {
        "server_cpu_seconds": 0.5,
        "forward_seconds": 0.4,
        "forward_cpu_seconds": 0.3,
    }
    collector.add(RAW_ROUTE, 10, 4, read_seconds=3)
    collector.add(PUSHED, 8, 2, **costs, send_blocked_seconds=0.5, load=load)
    collector.add(PUSHED, 6, 9, read_seconds=1, raw_seconds=4, fell_back=True)
    window = collector.take()

    assert window.samples == {RAW_ROUTE: 16, PUSHED: 8}
    assert (window.pushed_samples, window.fell_back) == (8, 6)
    assert window.reading_share == pytest.approx(4.0 / 8.0)
    assert window.blocked_share == pytest.approx(0.25)
    assert window.push_seconds == 2.0
    assert {name: getattr(window, name) for name in costs} == costs
    assert window.load == load
    assert collector.num_spans == 3
    assert collector.take().num_samples == 0


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_average_of_a_route_decays_unless_a_span_is_in_flight(
    collector, is_in_flight
):
    collector.add(PUSHED, 10, 40)
    with collector.in_flight(PUSHED if is_in_flight else RAW_ROUTE):
        for num_windows in range(3):
            with collector.loading():
                collector.advance(5)
                collector.add(RAW_ROUTE, 10, 2, raw_seconds=1)
            collector.take()
            # The span itself arrived in the first window.
            decay = 1 if is_in_flight else 2**num_windows
            assert collector.sample_seconds(PUSHED) == pytest.approx(4 / decay)
    assert collector.sample_seconds(RAW_ROUTE) == pytest.approx(0.1)
    # The first window has both spans: 4 per second, then 2 and 2.
    assert collector.throughput.samples_per_second == pytest.approx(2.5)


def test_span_is_finished_after_all_pending_samples(collector):
    with collector.loading(), collector.in_flight(RAW_ROUTE):
        collector.add(PUSHED, 8, 4)
        collector.add(RAW_ROUTE, 8, 1, raw_seconds=0.8)
        collector.add(RAW_ROUTE, 8, 1, raw_seconds=0.8)
        with collector.running_suffix(0, 7, num_failed=1):
            collector.advance(1.4)
        with collector.running_suffix(PUSHED[0], 8):
            pass
        throughput = collector.throughput

    # A span of eight samples is in flight, eight samples wait, and the new
    # span's eight come last.
    assert throughput.pending_samples(RAW_ROUTE, 8) == 16
    seconds = throughput.span_seconds(RAW_ROUTE, 8)
    assert seconds == pytest.approx(0.8 + 24 * 0.2)
    assert throughput.pending_samples(PUSHED, 8) == 0
    assert throughput.span_seconds(PUSHED, 8) == pytest.approx(4.0)


def test_concurrent_spans_share_the_link(collector):
    collector.add(RAW_ROUTE, 8, 8, raw_seconds=8)
    collector.set_link_seconds({RAW_ROUTE: 0.9, PUSHED: 0.01})
    alone = collector.throughput
    with collector.loading(), collector.in_flight(RAW_ROUTE):
        shared = collector.throughput
    assert alone.span_seconds(RAW_ROUTE, 8) == pytest.approx(8.0)
    assert shared.span_seconds(RAW_ROUTE, 8) == pytest.approx(14.4)
    assert shared.span_seconds(PUSHED, 8) == pytest.approx(0.08)


def test_throughput_is_the_larger_of_planned_and_measured(collector):
    with collector.loading():
        collector.advance(0.1)
        collector.add(RAW_ROUTE, 50, 0.1)
    collector.take()
    # So short a window does not count.
    assert collector.throughput.samples_per_second == 0.0
    collector.set_planned_rate(6.0)
    assert collector.throughput.samples_per_second == 6.0
    with collector.loading():
        collector.advance(5)
        collector.add(RAW_ROUTE, 10, 2)
    collector.take()
    assert collector.throughput.samples_per_second == 6.0
    with collector.loading(), collector.loading():
        assert collector.throughput.samples_per_second == 3.0
    collector.set_planned_rate(1.0)
    assert collector.throughput.samples_per_second == pytest.approx(2.0)


def test_samples_of_an_abandoned_loop_are_not_pending(collector):
    with collector.loading():
        collector.add(RAW_ROUTE, 8, 1)
    collector.add(RAW_ROUTE, 8, 1)
    with collector.loading():
        assert collector.throughput.pending_samples(RAW_ROUTE, 8) == 0
        collector.add(RAW_ROUTE, 8, 1)
        with collector.loading():
            # Two loops share the pending samples.
            assert collector.throughput.pending_samples(RAW_ROUTE, 8) == 4


def test_raw_read_is_a_fallback_only_after_a_failed_push(collector):
    collector.add(PUSHED, 10, 9, raw_seconds=1)
    window = collector.take()
    assert window.samples == {RAW_ROUTE: 10}
    assert (window.fell_back, window.pushed_samples) == (0, 0)

    # The time of failed pushes is not that of the raw read.
    collector.add(
        PUSHED, 10, 120, read_seconds=1.8, raw_seconds=2, fell_back=True
    )
    assert collector.throughput.sample_seconds == {
        RAW_ROUTE: pytest.approx(0.7 * 0.1 + 0.3 * 0.2)
    }
    window = collector.take()
    assert window.reading_share == pytest.approx(0.9)
    assert (window.fell_back, window.pushed_samples) == (10, 0)


def test_cached_spans_do_not_count_for_costs(collector):
    collector.add(PUSHED, 8, 2, server_cpu_seconds=0.5)
    collector.add(PUSHED, 40, 0.5, was_cached=True)
    window = collector.take()
    assert window.samples == {PUSHED: 48}
    assert (window.pushed_samples, window.cached) == (8, {PUSHED: 40})
    assert (window.server_cpu_seconds, window.push_seconds) == (0.5, 2.0)
    assert window.without_cached().samples == {PUSHED: 8}
    assert collector.throughput.sample_seconds == {PUSHED: 0.25}
    assert collector.throughput.waiting == {PUSHED[0]: 48}
    assert collector.take().cached == {}


def test_workers_count_while_they_have_computed_lately(collector):
    with collector.loading():
        assert collector.take().num_workers == 0
        for worker in ("a", "b", "a"):
            collector.add(PUSHED, 8, 1, worker=worker)
        assert collector.take().num_workers == 2
        collector.advance(50)
        collector.add(PUSHED, 8, 1, worker="a")
        assert collector.take().num_workers == 2
        collector.advance(20)
        assert collector.take().num_workers == 1
