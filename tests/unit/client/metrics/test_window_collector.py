"""Metrics collected by window, with injected clocks."""

from __future__ import annotations

import pytest

from hapi_client.metrics.window_collector import MetricsCollector
from hapi_client.metrics.window_metrics import SpanMetrics
from hapi_protocol.summary import Load
from hapi_splitter.planner.problem import RAW_ROUTE

PUSHED = (3, "float16")


class World:
    """Clocks and a byte counter that a test advances."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.received = 0
        self.collector = MetricsCollector(
            lambda: self.received,
            clock=lambda: self.wall,
            cpu_clock=lambda: self.cpu,
        )

    def advance(
        self, wall: float, cpu: float = 0.0, received: int = 0
    ) -> None:
        self.wall += wall
        self.cpu += cpu
        self.received += received


@pytest.fixture
def world() -> World:
    return World()


def test_only_time_of_loading_counts(world: World) -> None:
    world.advance(100, 50, 1000)
    with world.collector.loading():
        world.advance(4, 3, 200)
    world.advance(100, 50, 1000)
    with world.collector.loading():
        world.advance(2, 1, 100)
        window = world.collector.take()

    assert window.seconds == 6
    assert window.client_cpu_seconds == 4
    assert window.received_bytes == 300


def test_decoding_and_suffix_are_counted_separately() -> None:
    cpu = [0.0]
    collector = MetricsCollector(
        lambda: 0, cpu_clock=lambda: cpu[0], thread_clock=lambda: cpu[0]
    )
    with collector.loading():
        cpu[0] += 1.0
        with collector.running_suffix(0, 8):
            cpu[0] += 5.0
        decoded = SpanMetrics(raw_seconds=9.0, decode_cpu_seconds=2.0)
        collector.record_span(RAW_ROUTE, 8, 9.0, decoded)
        cpu[0] += 2.0
        window = collector.take()

    assert window.client_cpu_seconds == pytest.approx(8.0)
    assert window.suffix_cpu_seconds == pytest.approx(5.0)
    assert window.suffix_samples == {0: 8}
    assert window.decode_cpu_seconds == pytest.approx(2.0)


def test_windows_count_loading_once_and_do_not_overlap(world: World) -> None:
    collector = world.collector
    world.advance(10)
    with collector.loading(), collector.loading():
        world.advance(3)
        assert collector.window_seconds == 3
        first = collector.take()
        world.advance(4)
    world.advance(10)
    assert collector.window_seconds == 4
    second = collector.take()
    assert (first.seconds, second.seconds) == (3, 4)
    assert collector.window_seconds == 0


def test_concurrent_waiting_reads_count_once(world: World) -> None:
    collector = world.collector
    with collector.loading():
        world.advance(1, received=7)
        with collector.reading():
            world.advance(2, received=20)
            with collector.reading():
                world.advance(3, received=30)
        world.advance(4, received=5)
        window = collector.take()

    assert window.seconds == 10
    assert window.reading_seconds == 5
    assert (window.reading_bytes, window.received_bytes) == (50, 62)


@pytest.mark.parametrize(("pushed_bytes", "flows"), [(0, 1.0), (600, 3.0)])
def test_bytes_of_other_responses_count_as_flows(
    world: World, pushed_bytes: int, flows: float
) -> None:
    collector = world.collector
    with collector.loading():
        with collector.reading():
            world.advance(2, received=300 + pushed_bytes)
        world.advance(2, received=500)
        report = SpanMetrics(read_seconds=2.0, read_bytes=300)
        collector.record_span(RAW_ROUTE, 10, 2.5, report)
        assert collector.take().reading_flows == pytest.approx(flows)


def test_read_with_several_flows_is_weighted(
    world: World,
) -> None:
    collector = world.collector
    with collector.loading():
        with collector.reading(4.0):
            world.advance(2, received=200)
        with collector.reading():
            world.advance(2, received=100)
        report = SpanMetrics(read_seconds=4.0, read_bytes=300)
        collector.record_span(RAW_ROUTE, 10, 4.5, report)
        assert collector.take().reading_flows == pytest.approx(2.5)


def test_raw_read_in_two_windows_is_one_flow(world: World) -> None:
    collector = world.collector
    with collector.loading():
        with collector.reading():
            world.advance(2, received=200)
            assert collector.take().reading_flows == 1
            world.advance(1, received=100)
        report = SpanMetrics(read_seconds=3.0, read_bytes=300)
        collector.record_span(RAW_ROUTE, 10, 3.5, report)
        assert collector.take().reading_flows == 1


def test_maximum_of_concurrent_pushed_reads_is_counted(world: World) -> None:
    collector = world.collector
    with collector.in_flight(RAW_ROUTE), collector.in_flight(PUSHED):
        with collector.in_flight(PUSHED):
            pass
        assert collector.take().max_pushed == 2
        # One continues from the previous window.
        assert collector.take().max_pushed == 1
    assert collector.take().max_pushed == 1
    assert collector.take().max_pushed == 0


def test_spans_are_summed_by_route(world: World) -> None:
    collector, load = world.collector, Load(0.5, 2, 0.9, 0.8)
    collector.record_span(RAW_ROUTE, 10, 4.0, SpanMetrics(read_seconds=3.0))
    collector.record_span(
        PUSHED,
        8,
        2.0,
        SpanMetrics(
            server_cpu_seconds=0.5,
            forward_seconds=0.4,
            forward_cpu_seconds=0.3,
            send_blocked_seconds=0.5,
            load=load,
        ),
    )
    collector.record_span(
        PUSHED,
        6,
        9.0,
        SpanMetrics(read_seconds=1.0, raw_seconds=4.0, fell_back=True),
    )

    window = collector.take()

    assert window.samples == {RAW_ROUTE: 16, PUSHED: 8}
    assert (window.pushed_samples, window.fell_back) == (8, 6)
    assert window.reading_share == pytest.approx(4.0 / 8.0)
    assert window.blocked_share == pytest.approx(0.25)
    assert window.push_seconds == 2.0
    assert window.server_cpu_seconds == 0.5
    assert window.forward_seconds == 0.4
    assert window.forward_cpu_seconds == 0.3
    assert window.load == load
    assert collector.num_spans == 3
    assert collector.take().num_samples == 0


def test_training_is_measured_between_batches(world: World) -> None:
    with world.collector.training(32):
        world.advance(1.5)

    window = world.collector.take()

    assert window.train_samples == 32
    assert window.train_seconds == 1.5
    assert window.train_cpu_seconds >= 0


def test_average_of_an_unused_route_decays(world: World) -> None:
    collector = world.collector

    def measure() -> None:
        with collector.loading():
            world.advance(5)
            collector.record_span(
                RAW_ROUTE, 10, 2.0, SpanMetrics(raw_seconds=1.0)
            )
        collector.take()

    collector.record_span(PUSHED, 10, 40.0, SpanMetrics())
    measure()
    assert collector.throughput.sample_seconds[PUSHED] == pytest.approx(4.0)
    measure()
    measure()
    throughput = collector.throughput
    assert throughput.sample_seconds[PUSHED] == pytest.approx(1.0)
    assert throughput.sample_seconds[RAW_ROUTE] == pytest.approx(0.1)
    assert throughput.samples_per_second == pytest.approx(2.5)


def test_span_is_finished_after_all_pending_samples(world: World) -> None:
    collector = world.collector
    with collector.loading(), collector.in_flight(RAW_ROUTE):
        collector.record_span(PUSHED, 8, 4.0, SpanMetrics())
        collector.record_span(RAW_ROUTE, 8, 1.0, SpanMetrics(raw_seconds=0.8))
        collector.record_span(RAW_ROUTE, 8, 1.0, SpanMetrics(raw_seconds=0.8))
        with collector.running_suffix(0, 7, num_failed=1):
            world.advance(1.4)
        with collector.running_suffix(PUSHED[0], 8):
            pass
        throughput = collector.throughput

    # One span of eight is in flight, eight samples wait, the new one is last.
    assert throughput.pending_samples(RAW_ROUTE, 8) == 16
    assert throughput.span_seconds(RAW_ROUTE, 8) == pytest.approx(
        0.8 + 24 * 0.2
    )
    assert throughput.pending_samples(PUSHED, 8) == 0
    assert throughput.span_seconds(PUSHED, 8) == pytest.approx(4.0)


def test_concurrent_spans_share_the_link(world: World) -> None:
    collector = world.collector
    collector.record_span(RAW_ROUTE, 8, 8.0, SpanMetrics(raw_seconds=8.0))
    collector.set_link_seconds({RAW_ROUTE: 0.9, PUSHED: 0.01})
    assert collector.throughput.span_seconds(RAW_ROUTE, 8) == pytest.approx(
        8.0
    )
    with collector.loading(), collector.in_flight(RAW_ROUTE):
        assert collector.throughput.span_seconds(
            RAW_ROUTE, 8
        ) == pytest.approx(14.4)
        assert collector.throughput.span_seconds(PUSHED, 8) == pytest.approx(
            0.08
        )


def test_throughput_is_the_larger_of_planned_and_measured(
    world: World,
) -> None:
    collector = world.collector
    collector.set_planned_rate(6.0)
    assert collector.throughput.samples_per_second == 6.0
    with collector.loading():
        world.advance(5)
        collector.record_span(RAW_ROUTE, 10, 2.0, SpanMetrics())
    collector.take()
    assert collector.throughput.samples_per_second == 6.0
    with collector.loading(), collector.loading():
        assert collector.throughput.samples_per_second == 3.0
    collector.set_planned_rate(1.0)
    assert collector.throughput.samples_per_second == pytest.approx(2.0)


def test_samples_of_an_abandoned_loop_are_not_pending(world: World) -> None:
    with world.collector.loading():
        world.collector.record_span(RAW_ROUTE, 8, 1.0, SpanMetrics())
    world.collector.record_span(RAW_ROUTE, 8, 1.0, SpanMetrics())
    with world.collector.loading():
        assert world.collector.throughput.pending_samples(RAW_ROUTE, 8) == 0
        world.collector.record_span(RAW_ROUTE, 8, 1.0, SpanMetrics())
        with world.collector.loading():
            # Two loops share the pending samples.
            assert (
                world.collector.throughput.pending_samples(RAW_ROUTE, 8) == 4
            )


def test_average_of_a_route_stays_while_a_span_is_in_flight(
    world: World,
) -> None:
    collector = world.collector
    collector.record_span(PUSHED, 10, 120.0, SpanMetrics())
    with collector.in_flight(PUSHED):
        for _ in range(3):
            with collector.loading():
                world.advance(5)
                collector.record_span(RAW_ROUTE, 10, 1.0, SpanMetrics())
            collector.take()
        assert collector.throughput.sample_seconds[PUSHED] == pytest.approx(
            12.0
        )


def test_raw_read_without_a_failed_push_is_no_fallback(
    world: World,
) -> None:
    world.collector.record_span(PUSHED, 10, 9.0, SpanMetrics(raw_seconds=4.0))
    window = world.collector.take()
    assert window.samples == {RAW_ROUTE: 10}
    assert (window.fell_back, window.pushed_samples) == (0, 0)


def test_cached_spans_do_not_count_for_costs(world: World) -> None:
    collector = world.collector
    computed = SpanMetrics(server_cpu_seconds=0.5)
    collector.record_span(PUSHED, 8, 2.0, computed)
    collector.record_span(PUSHED, 40, 0.5, SpanMetrics(was_cached=True))
    window = collector.take()
    assert window.samples == {PUSHED: 48}
    assert window.pushed_samples == 8
    assert window.server_cpu_seconds == 0.5
    assert window.cached == {PUSHED: 40}
    assert window.push_seconds == 2.0
    assert collector.throughput.sample_seconds == {PUSHED: 0.25}
    assert collector.throughput.waiting == {PUSHED[0]: 48}
    assert window.without_cached().samples == {PUSHED: 8}
    assert collector.take().cached == {}


def test_time_of_failed_pushes_does_not_count_for_raw_reads(
    world: World,
) -> None:
    collector = world.collector
    collector.record_span(
        PUSHED,
        10,
        120.0,
        SpanMetrics(read_seconds=0.9, raw_seconds=1.0, fell_back=True),
    )
    assert collector.throughput.sample_seconds == {
        RAW_ROUTE: pytest.approx(0.1)
    }
    assert collector.take().reading_share == pytest.approx(0.9)


def test_short_window_does_not_count_for_throughput(world: World) -> None:
    with world.collector.loading():
        world.advance(0.1)
        world.collector.record_span(RAW_ROUTE, 50, 0.1, SpanMetrics())
    world.collector.take()
    assert world.collector.throughput.samples_per_second == 0.0
