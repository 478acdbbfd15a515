"""What a job measures, with its clocks injected."""

from __future__ import annotations

import pytest

from hapi_client.metrics.window_collector import MetricsCollector
from hapi_client.metrics.window_metrics import SpanMetrics
from hapi_protocol.summary import Load
from hapi_splitter.planner.problem import RAW_ROUTE

PUSHED = (3, "float16")


class World:
    """Clocks and a byte counter that a test moves."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.received = 0
        self.meter = MetricsCollector(
            lambda: self.received,
            clock=lambda: self.wall,
            cpu_clock=lambda: self.cpu,
        )

    def passes(self, wall: float, cpu: float = 0.0, received: int = 0) -> None:
        self.wall += wall
        self.cpu += cpu
        self.received += received


@pytest.fixture
def world() -> World:
    return World()


def test_only_time_in_which_the_job_loads_counts(world: World) -> None:
    world.passes(100, 50, 1000)
    with world.meter.loading():
        world.passes(4, 3, 200)
    world.passes(100, 50, 1000)
    with world.meter.loading():
        world.passes(2, 1, 100)
        seen = world.meter.take()

    assert seen.seconds == 6
    assert seen.client_cpu_seconds == 4
    assert seen.received_bytes == 300


def test_two_loaders_at_a_time_count_once(world: World) -> None:
    with world.meter.loading(), world.meter.loading():
        world.passes(5)

    assert world.meter.take().seconds == 5


def test_decoding_and_the_rest_of_the_layers_are_counted_apart() -> None:
    cpu = [0.0]
    meter = MetricsCollector(
        lambda: 0, cpu_clock=lambda: cpu[0], thread_clock=lambda: cpu[0]
    )
    with meter.loading():
        cpu[0] += 1.0
        with meter.running_suffix(0, 8):
            cpu[0] += 5.0
        decoded = SpanMetrics(raw_seconds=9.0, decode_cpu_seconds=2.0)
        meter.record_span(RAW_ROUTE, 8, 9.0, decoded)
        cpu[0] += 2.0
        seen = meter.take()

    assert seen.client_cpu_seconds == pytest.approx(8.0)
    assert seen.suffix_cpu_seconds == pytest.approx(5.0)
    assert seen.suffix_samples == {0: 8}
    assert seen.decode_cpu_seconds == pytest.approx(2.0)


def test_the_window_tells_how_long_it_was_loaded(world: World) -> None:
    world.passes(10)
    with world.meter.loading():
        world.passes(3)
        assert world.meter.window_seconds == 3
    world.passes(10)
    assert world.meter.window_seconds == 3
    world.meter.take()
    assert world.meter.window_seconds == 0


def test_windows_do_not_overlap(world: World) -> None:
    with world.meter.loading():
        world.passes(3)
        first = world.meter.take()
        world.passes(4)
        second = world.meter.take()

    assert (first.seconds, second.seconds) == (3, 4)


def test_reading_counts_once_while_several_reads_wait(world: World) -> None:
    meter = world.meter
    with meter.loading():
        world.passes(1, received=7)
        with meter.reading():
            world.passes(2, received=20)
            with meter.reading():
                world.passes(3, received=30)
        world.passes(4, received=5)
        seen = meter.take()

    assert seen.seconds == 10
    assert seen.reading_seconds == 5
    assert (seen.reading_bytes, seen.received_bytes) == (50, 62)


@pytest.mark.parametrize(("pushed_bytes", "flows"), [(0, 1.0), (600, 3.0)])
def test_answers_beside_a_plain_read_are_flows_by_their_bytes(
    world: World, pushed_bytes: int, flows: float
) -> None:
    meter = world.meter
    with meter.loading():
        with meter.reading():
            world.passes(2, received=300 + pushed_bytes)
        world.passes(2, received=500)
        report = SpanMetrics(read_seconds=2.0, read_bytes=300)
        meter.record_span(RAW_ROUTE, 10, 2.5, report)
        assert meter.take().reading_flows == pytest.approx(flows)


def test_a_read_that_is_enough_counts_for_those_it_replaces(
    world: World,
) -> None:
    meter = world.meter
    with meter.loading():
        with meter.reading(4.0):
            world.passes(2, received=200)
        with meter.reading():
            world.passes(2, received=100)
        report = SpanMetrics(read_seconds=4.0, read_bytes=300)
        meter.record_span(RAW_ROUTE, 10, 4.5, report)
        assert meter.take().reading_flows == pytest.approx(2.5)


def test_a_plain_read_of_two_windows_is_one_flow(world: World) -> None:
    meter = world.meter
    with meter.loading():
        with meter.reading():
            world.passes(2, received=200)
            assert meter.take().reading_flows == 1
            world.passes(1, received=100)
        report = SpanMetrics(read_seconds=3.0, read_bytes=300)
        meter.record_span(RAW_ROUTE, 10, 3.5, report)
        assert meter.take().reading_flows == 1


def test_pushed_reads_at_a_time_are_counted(world: World) -> None:
    meter = world.meter
    with meter.in_flight(RAW_ROUTE), meter.in_flight(PUSHED):
        with meter.in_flight(PUSHED):
            pass
        assert meter.take().max_pushed == 2
        # One goes on from the window before.
        assert meter.take().max_pushed == 1
    assert meter.take().max_pushed == 1
    assert meter.take().max_pushed == 0


def test_spans_are_summed_by_their_way(world: World) -> None:
    meter, load = world.meter, Load(0.5, 2, 0.9, 0.8)
    meter.record_span(RAW_ROUTE, 10, 4.0, SpanMetrics(read_seconds=3.0))
    meter.record_span(
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
    meter.record_span(
        PUSHED,
        6,
        9.0,
        SpanMetrics(read_seconds=1.0, raw_seconds=4.0, fell_back=True),
    )

    seen = meter.take()

    assert seen.samples == {RAW_ROUTE: 16, PUSHED: 8}
    assert (seen.pushed_samples, seen.fell_back) == (8, 6)
    assert seen.reading_share == pytest.approx(4.0 / 8.0)
    assert seen.blocked_share == pytest.approx(0.25)
    assert seen.push_seconds == 2.0
    assert seen.server_cpu_seconds == 0.5
    assert seen.forward_seconds == 0.4
    assert seen.forward_cpu_seconds == 0.3
    assert seen.load == load
    assert meter.num_spans == 3
    assert meter.take().num_samples == 0


def test_training_is_measured_between_batches(world: World) -> None:
    with world.meter.training(32):
        world.passes(1.5)

    seen = world.meter.take()

    assert seen.train_samples == 32
    assert seen.train_seconds == 1.5
    assert seen.train_cpu_seconds >= 0


def test_pace_of_a_way_that_is_not_used_is_forgotten(world: World) -> None:
    meter = world.meter

    def window() -> None:
        with meter.loading():
            world.passes(5)
            meter.record_span(RAW_ROUTE, 10, 2.0, SpanMetrics(raw_seconds=1.0))
        meter.take()

    meter.record_span(PUSHED, 10, 40.0, SpanMetrics())
    window()
    assert meter.throughput.sample_seconds[PUSHED] == pytest.approx(4.0)
    window()
    window()
    throughput = meter.throughput
    assert throughput.sample_seconds[PUSHED] == pytest.approx(1.0)
    assert throughput.sample_seconds[RAW_ROUTE] == pytest.approx(0.1)
    assert throughput.samples_per_second == pytest.approx(2.5)


def test_a_span_is_done_with_when_what_came_before_it_is(world: World) -> None:
    meter = world.meter
    with meter.loading(), meter.in_flight(RAW_ROUTE):
        meter.record_span(PUSHED, 8, 4.0, SpanMetrics())
        meter.record_span(RAW_ROUTE, 8, 1.0, SpanMetrics(raw_seconds=0.8))
        meter.record_span(RAW_ROUTE, 8, 1.0, SpanMetrics(raw_seconds=0.8))
        with meter.running_suffix(0, 7, num_failed=1):
            world.passes(1.4)
        with meter.running_suffix(PUSHED[0], 8):
            pass
        throughput = meter.throughput

    # One of eight comes, eight have come, and the new one is computed last.
    assert throughput.pending_samples(RAW_ROUTE, 8) == 16
    assert throughput.span_seconds(RAW_ROUTE, 8) == pytest.approx(
        0.8 + 24 * 0.2
    )
    assert throughput.pending_samples(PUSHED, 8) == 0
    assert throughput.span_seconds(PUSHED, 8) == pytest.approx(4.0)


def test_spans_that_come_together_share_the_link(world: World) -> None:
    meter = world.meter
    meter.record_span(RAW_ROUTE, 8, 8.0, SpanMetrics(raw_seconds=8.0))
    meter.set_link_seconds({RAW_ROUTE: 0.9, PUSHED: 0.01})
    assert meter.throughput.span_seconds(RAW_ROUTE, 8) == pytest.approx(8.0)
    with meter.loading(), meter.in_flight(RAW_ROUTE):
        assert meter.throughput.span_seconds(RAW_ROUTE, 8) == pytest.approx(
            14.4
        )
        assert meter.throughput.span_seconds(PUSHED, 8) == pytest.approx(0.08)


def test_rate_that_is_planned_counts_where_less_was_measured(
    world: World,
) -> None:
    meter = world.meter
    meter.set_planned_rate(6.0)
    assert meter.throughput.samples_per_second == 6.0
    with meter.loading():
        world.passes(5)
        meter.record_span(RAW_ROUTE, 10, 2.0, SpanMetrics())
    meter.take()
    assert meter.throughput.samples_per_second == 6.0
    with meter.loading(), meter.loading():
        assert meter.throughput.samples_per_second == 3.0
    meter.set_planned_rate(1.0)
    assert meter.throughput.samples_per_second == pytest.approx(2.0)


def test_what_a_loop_left_behind_keeps_no_later_one_busy(world: World) -> None:
    with world.meter.loading():
        world.meter.record_span(RAW_ROUTE, 8, 1.0, SpanMetrics())
    world.meter.record_span(RAW_ROUTE, 8, 1.0, SpanMetrics())
    with world.meter.loading():
        assert world.meter.throughput.pending_samples(RAW_ROUTE, 8) == 0
        world.meter.record_span(RAW_ROUTE, 8, 1.0, SpanMetrics())
        with world.meter.loading():
            # Of one of two.
            assert world.meter.throughput.pending_samples(RAW_ROUTE, 8) == 4


def test_pace_of_a_way_stays_while_a_span_is_on_it(world: World) -> None:
    meter = world.meter
    meter.record_span(PUSHED, 10, 120.0, SpanMetrics())
    with meter.in_flight(PUSHED):
        for _ in range(3):
            with meter.loading():
                world.passes(5)
                meter.record_span(RAW_ROUTE, 10, 1.0, SpanMetrics())
            meter.take()
        assert meter.throughput.sample_seconds[PUSHED] == pytest.approx(12.0)


def test_span_with_bad_rows_was_streamed_and_did_not_fall_back(
    world: World,
) -> None:
    world.meter.record_span(PUSHED, 10, 9.0, SpanMetrics(raw_seconds=4.0))
    seen = world.meter.take()
    assert seen.samples == {RAW_ROUTE: 10}
    assert (seen.fell_back, seen.pushed_samples) == (0, 0)


def test_kept_spans_say_nothing_of_what_computing_costs(world: World) -> None:
    meter = world.meter
    computed = SpanMetrics(server_cpu_seconds=0.5)
    meter.record_span(PUSHED, 8, 2.0, computed)
    meter.record_span(PUSHED, 40, 0.5, SpanMetrics(was_cached=True))
    seen = meter.take()
    assert seen.samples == {PUSHED: 48}
    assert seen.pushed_samples == 8
    assert seen.server_cpu_seconds == 0.5
    assert seen.cached == {PUSHED: 40}
    assert seen.push_seconds == 2.0
    assert meter.throughput.sample_seconds == {PUSHED: 0.25}
    assert meter.throughput.waiting == {PUSHED[0]: 48}
    assert seen.without_cached().samples == {PUSHED: 8}
    assert meter.take().cached == {}


def test_failed_pushes_are_not_slow_streams(world: World) -> None:
    meter = world.meter
    meter.record_span(
        PUSHED,
        10,
        120.0,
        SpanMetrics(read_seconds=0.9, raw_seconds=1.0, fell_back=True),
    )
    assert meter.throughput.sample_seconds == {RAW_ROUTE: pytest.approx(0.1)}
    assert meter.take().reading_share == pytest.approx(0.9)


def test_short_window_says_nothing_of_the_rate(world: World) -> None:
    with world.meter.loading():
        world.passes(0.1)
        world.meter.record_span(RAW_ROUTE, 50, 0.1, SpanMetrics())
    world.meter.take()
    assert world.meter.throughput.samples_per_second == 0.0
