"""Sums of one epoch, with an injected clock."""

from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock

import pytest

from hapi_client.metrics.events import (
    LAYERS,
    PLANNING,
    TRAINING,
    WAITING,
    BatchEvent,
    JobStats,
    SpanEvent,
)
from hapi_client.metrics.job_recorder import JobRecorder
from hapi_client.reports.epoch_recorder import EpochRecorder
from hapi_client.reports.progress_bar import PlanStatus
from hapi_client.sampling.sampler import SamplerConfig, index_order
from hapi_client.swift.traffic_counters import Traffic, TrafficCount
from hapi_splitter.planner.problem import RAW_ROUTE

READ_PLAN = index_order([8], SamplerConfig(4)).read_plan()


class World:
    """A clock, a plan and the recorders of a job's epochs."""

    def __init__(self):
        self.now = 50.0
        self.plan = PlanStatus()
        self.job = JobRecorder(Traffic(), clock=lambda: self.now)
        self.start_bar = Mock()
        self.recorder = self.new_recorder()

    def new_recorder(self):
        return EpochRecorder(
            self.job,
            3,
            plan_status=lambda: self.plan,
            start_bar=self.start_bar,
        )

    @property
    def report(self):
        return self.recorder.report

    def use_plan(self, cut, num_changes):
        label = f"cut {cut} · uint8"
        self.plan = PlanStatus(label, 2.0, ("link",), num_changes)


@pytest.fixture
def world():
    return World()


def test_stages_of_the_loop_are_summed(world):
    recorder = world.recorder
    with recorder.running(READ_PLAN):
        for waited in (2.0, 3.0):
            with recorder.stage(LAYERS, 4, cut=7):
                world.now += 0.5
            for stage, seconds in (WAITING, waited), (PLANNING, 0.25):
                with recorder.stage(stage):
                    world.now += seconds
            recorder.record_batch(BatchEvent(4))
            with recorder.stage(TRAINING):
                world.now += 1.0
    report = world.report
    world.now += 100
    assert report == world.report
    assert (report.epoch, report.split, report.name) == (3, "train", "epoch 3")
    assert report.is_finished
    assert report.samples == report.expected_samples == 8
    assert report.seconds == 8.5
    assert report.samples_per_second == pytest.approx(8 / 8.5)
    sums = {WAITING: 5.0, LAYERS: 1.0, TRAINING: 2.0, PLANNING: 0.5}
    assert report.loop_seconds == sums
    assert report.waiting_share == pytest.approx(5 / 8.5)
    assert report.samples_by_cut == {7: 8}


def test_epoch_that_fails_after_its_last_batch_is_unfinished(world):
    with suppress(ValueError), world.recorder.running(READ_PLAN):
        for samples in (4, 0):
            world.recorder.record_batch(BatchEvent(samples))
        raise ValueError
    assert not world.report.is_finished
    assert (world.report.samples, world.report.expected_samples) == (4, 8)


def test_running_epoch_has_a_preliminary_report(world):
    assert world.report is None
    world.recorder.end()
    assert world.report is None  # it never began
    with world.recorder.running(READ_PLAN):
        world.now += 2
        world.recorder.record_batch(BatchEvent(4))
        report = world.report
        assert (report.samples, report.seconds) == (4, 2)
        assert not report.is_finished
        world.recorder.record_batch(BatchEvent(4))
    assert world.report != report
    # Without a plan nothing is predicted.
    assert report.predicted_samples_per_second is None
    assert report.measured_per_predicted is None
    assert report.limited_by == ()


def test_only_traffic_of_the_epoch_is_counted(world):
    traffic, counters = world.job.traffic, world.job.counters
    traffic.add(received_bytes=1000, retries=5)
    counters.add(retries=9)
    with world.recorder.running(READ_PLAN):
        with world.recorder.span(RAW_ROUTE, 4) as arrived:
            traffic.add(received_bytes=30, sent_bytes=4, requests=2, retries=1)
            counters.add(retries=2, fallbacks=1, cached=3, saturated=7)
            early = TrafficCount(received_bytes=8, requests=1)
            arrived(SpanEvent(traffic=early))
        traffic.add(received_bytes=1000)
        with suppress(KeyError), world.recorder.span(RAW_ROUTE, 4):
            traffic.add(received_bytes=5, requests=1)
            raise KeyError
    report = world.report
    assert (report.received_bytes, report.sent_bytes) == (43, 4)
    assert report.requests == 4
    assert (report.retries, report.fallbacks) == (3, 1)
    assert (report.cached_samples, report.saturated_features) == (3, 7)
    assert traffic.count().received_bytes == 2035
    assert (world.job.num_spans, counters.count().retries) == (1, 11)


def test_times_of_spans_are_summed_by_stage(world):
    raw = SpanEvent(read_seconds=3.0, decode_cpu_seconds=0.5)
    pushed = SpanEvent(
        server_seconds={"forward": 2.0, "send_blocked": 0.25},
        server_cpu_seconds=1.5,
        request_seconds=4.0,
        unpack_cpu_seconds=1.0,
    )
    with world.recorder.running(READ_PLAN):
        for event in (raw, pushed):
            with world.recorder.span(RAW_ROUTE, 4) as arrived:
                arrived(event)
    report = world.report
    assert report.fetch_seconds == {"fetch": 6.0, "decode": 1.5}
    stages = dict.fromkeys(("queue", "read", "decode", "encode"), 0.0)
    assert report.storage_seconds == stages | pushed.server_seconds
    assert report.storage_cpu_seconds == 1.5


def test_prediction_is_compared_for_samples_read_under_a_plan(world):
    with world.recorder.running(READ_PLAN):
        world.now += 10  # without a plan
        world.recorder.record_batch(BatchEvent(4))
        world.use_plan(2, 1)
        world.now += 4
        world.recorder.record_batch(BatchEvent(4))
        world.plan = PlanStatus("cut 3 · uint8", 1.0, ("client cpu",), 3)
    report = world.report
    assert report.predicted_samples_per_second == 2.0
    assert report.measured_per_predicted == 0.5
    assert report.plan == "cut 3 · uint8"
    assert report.limited_by == ("client cpu",)
    assert report.plan_changes == 3


def plan_changes(*recorders):
    return [recorder.report.plan_changes for recorder in recorders]


def test_plan_counts_for_its_epoch_or_the_next(world):
    """A nested epoch counts its own plans."""
    first, outer, inner, later = (world.new_recorder() for _ in range(4))
    with first.running(READ_PLAN):
        pass
    world.use_plan(2, 1)
    with outer.running(READ_PLAN):
        assert plan_changes(outer) == [1]
        world.use_plan(2, 2)
        with inner.running(READ_PLAN):
            world.use_plan(3, 4)
        world.use_plan(4, 5)
    with later.running(READ_PLAN):
        pass
    assert plan_changes(first, outer, inner, later) == [0, 5, 2, 0]


def test_stats_are_added_and_subtracted():
    one = JobStats(retries=1, samples=4, samples_by_cut={0: 4}, seconds=0.5)
    two = JobStats(samples=3, samples_by_cut={0: 1, 7: 2})
    both = one + two
    assert (both.samples, both.samples_by_cut) == (7, {0: 5, 7: 2})
    assert both - two == replace(one, samples_by_cut={0: 4, 7: 0})
