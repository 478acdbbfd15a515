"""What a pass takes, summed up with the clock injected."""

from __future__ import annotations

from contextlib import suppress

import pytest

from hapi_client.metrics.counters import JobCounters, JobStats
from hapi_client.metrics.window_metrics import SpanMetrics
from hapi_client.reports.epoch_recorder import (
    EpochRecorder,
    PlanChangeCounter,
    PlanStatus,
)
from hapi_client.reports.epoch_report import (
    LAYERS,
    PLANNING,
    TRAINING,
    WAITING,
)
from hapi_client.sampling.sampler import SamplerConfig, index_order
from hapi_client.swift.traffic_counters import Traffic

READING = index_order([8], SamplerConfig(4)).read_plan()


class World:
    """A clock and a plan that a test changes."""

    def __init__(self) -> None:
        self.now = 50.0
        self.plan = PlanStatus()
        self.plans = PlanChangeCounter()
        self.lines: list[Line] = []
        self.tally = self.another()

    def another(self) -> EpochRecorder:
        return EpochRecorder(
            3,
            "train",
            in_force=lambda: self.plan,
            open_line=self._open,
            plans=self.plans,
            clock=lambda: self.now,
        )

    def _open(self, samples: int) -> Line:
        self.lines.append(Line(samples))
        return self.lines[-1]

    def passes(self, seconds: float) -> None:
        self.now += seconds


class Line:
    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.added: list[int] = []
        self.is_open = True

    def add(self, samples: int) -> None:
        self.added.append(samples)

    def close(self) -> None:
        self.is_open = False


@pytest.fixture
def world() -> World:
    return World()


def test_nothing_is_reported_before_it_begins(world: World) -> None:
    assert world.tally.report is None
    world.tally.end()
    assert world.tally.report is None


def test_stages_of_the_loop_are_summed(world: World) -> None:
    tally = world.tally
    with tally.running(READING):
        for waited in (2.0, 3.0):
            with tally.stage(WAITING):
                world.passes(waited)
            with tally.stage(LAYERS):
                world.passes(0.5)
            with tally.stage(PLANNING):
                world.passes(0.25)
            tally.came(7, 4, 0)
            tally.delivered(4)
            with tally.stage(TRAINING):
                world.passes(1.0)
    report = tally.report
    world.passes(100)

    assert report is not None
    assert report == tally.report
    assert (report.epoch, report.split, report.name) == (3, "train", "epoch 3")
    assert report.is_finished
    assert report.samples == report.expected_samples == 8
    assert report.seconds == 8.5
    assert report.samples_per_second == pytest.approx(8 / 8.5)
    assert report.loop_seconds == {
        WAITING: 5.0,
        LAYERS: 1.0,
        TRAINING: 2.0,
        PLANNING: 0.5,
    }
    assert report.waiting_share == pytest.approx(5 / 8.5)
    assert report.samples_by_cut == {7: 8}


def test_pass_that_was_left_is_unfinished(world: World) -> None:
    with world.tally.running(READING):
        world.tally.delivered(4)
    report = world.tally.report
    assert report is not None
    assert not report.is_finished
    assert (report.samples, report.expected_samples) == (4, 8)
    assert "4 samples of 8, unfinished" in str(report)


def test_pass_that_failed_is_unfinished(world: World) -> None:
    def run() -> None:
        with world.tally.running(READING):
            world.tally.delivered(4)
            world.tally.delivered(0)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        run()
    report = world.tally.report
    assert report is not None
    assert not report.is_finished


def test_pass_under_way_is_told_as_far_as_it_is(world: World) -> None:
    with world.tally.running(READING):
        world.passes(2)
        world.tally.delivered(4)
        report = world.tally.report
        assert report is not None
        assert (report.samples, report.seconds) == (4, 2)
        assert not report.is_finished
        world.tally.delivered(4)
    assert world.tally.report != report


def test_what_threads_add_elsewhere_is_not_the_passes(world: World) -> None:
    traffic, counters = Traffic(), JobCounters()
    traffic.add(received_bytes=1000, retries=5)
    counters.add(retries=9)
    with world.tally.running(READING):
        with world.tally.fetching(traffic, counters):
            traffic.add(received_bytes=30, sent_bytes=4, requests=2, retries=1)
            counters.add(retries=2, fallbacks=1, cached=3, saturated=7)
        traffic.add(received_bytes=1000)
        with (
            suppress(KeyError),
            world.tally.fetching(traffic, counters),
        ):
            traffic.add(received_bytes=5, requests=1)
            raise KeyError
    report = world.tally.report
    assert report is not None
    assert (report.received_bytes, report.sent_bytes) == (35, 4)
    assert report.requests == 3
    assert (report.retries, report.fallbacks) == (3, 1)
    assert (report.cached_samples, report.saturated_features) == (3, 7)
    assert traffic.count().received_bytes == 2035


def test_spans_are_told_by_tier(world: World) -> None:
    with world.tally.running(READING):
        world.tally.loaded(
            SpanMetrics(read_seconds=3.0, decode_cpu_seconds=0.5)
        )
        world.tally.loaded(
            SpanMetrics(
                server_seconds={"forward": 2.0, "send_blocked": 0.25},
                server_cpu_seconds=1.5,
                request_seconds=4.0,
                unpack_cpu_seconds=1.0,
            )
        )
    report = world.tally.report
    assert report is not None
    assert report.fetch_seconds == {"fetch": 6.0, "decode": 1.5}
    assert report.storage_seconds == {
        "queue": 0.0,
        "read": 0.0,
        "decode": 0.0,
        "forward": 2.0,
        "encode": 0.0,
        "send_blocked": 0.25,
    }
    assert report.storage_cpu_seconds == 1.5


def test_plans_are_held_to_the_samples_that_came_under_them(
    world: World,
) -> None:
    tally = world.tally
    with tally.running(READING):
        world.passes(10)  # streamed, without a plan
        tally.delivered(4)
        world.plan = PlanStatus("cut 2 · uint8", 2.0, ("link",), 1)
        world.passes(4)
        tally.delivered(4)
        world.plan = PlanStatus("cut 3 · uint8", 1.0, ("client cpu",), 3)
    report = tally.report
    assert report is not None
    assert report.predicted_samples_per_second == 2.0
    assert report.measured_per_predicted == 0.5
    assert (report.plan, report.limited_by) == (
        "cut 3 · uint8",
        ("client cpu",),
    )
    assert report.plan_changes == 3


def plan_changes(tally: EpochRecorder) -> int:
    assert tally.report is not None
    return tally.report.plan_changes


def test_a_plan_between_two_passes_is_counted_by_the_second(
    world: World,
) -> None:
    first, second = world.tally, world.another()
    with first.running(READING):
        pass
    world.plan = PlanStatus("cut 2 · uint8", 2.0, ("link",), 1)
    with second.running(READING):
        assert plan_changes(second) == 1
        world.plan = PlanStatus("cut 3 · uint8", 2.0, ("link",), 2)
    assert (plan_changes(first), plan_changes(second)) == (0, 2)


def test_a_pass_within_another_counts_its_own_plans(world: World) -> None:
    outer, inner, later = world.tally, world.another(), world.another()
    with outer.running(READING):
        world.plan = PlanStatus("cut 2 · uint8", 2.0, ("link",), 1)
        with inner.running(READING):
            world.plan = PlanStatus("cut 3 · uint8", 2.0, ("link",), 3)
        world.plan = PlanStatus("cut 4 · uint8", 2.0, ("link",), 4)
    with later.running(READING):
        pass
    assert [plan_changes(each) for each in (outer, inner, later)] == [4, 2, 0]


def test_no_plan_predicts_nothing(world: World) -> None:
    with world.tally.running(READING):
        world.passes(1)
        world.tally.delivered(4)
    report = world.tally.report
    assert report is not None
    assert report.predicted_samples_per_second is None
    assert report.measured_per_predicted is None
    assert report.limited_by == ()


def test_line_is_open_as_long_as_the_pass(world: World) -> None:
    assert not world.lines
    with world.tally.running(READING):
        (line,) = world.lines
        world.tally.delivered(4)
        assert line.is_open
    assert (line.samples, line.added, line.is_open) == (8, [4], False)


def test_ending_a_pass_that_somebody_holds_closes_its_line(
    world: World,
) -> None:
    with world.tally.running(READING):
        world.tally.end()
        assert not world.lines[0].is_open


def test_stats_are_added_and_taken_away() -> None:
    one = JobStats(retries=1, samples=4, samples_by_cut={0: 4}, seconds=0.5)
    two = JobStats(samples=3, samples_by_cut={0: 1, 7: 2})
    assert (one + two).samples == 7
    assert (one + two).samples_by_cut == {0: 5, 7: 2}
    assert (one + two - two).retries == 1
    assert (one + two - two).samples_by_cut[0] == 4
