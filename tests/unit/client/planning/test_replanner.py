"""Re-planning of simulated jobs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clock import Clock
from hapi_client.metrics.events import (
    SpanEvent,
    StageEvent,
    WindowMetrics,
)
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.planning.inputs import RemainingWork
from hapi_client.planning.link_estimator import LinkEstimator
from hapi_client.planning.replanner import MAX_MOVED, MIN_MOVED
from hapi_client.planning.route_mix import (
    difference,
    step,
    without_minor_routes,
)
from hapi_protocol.data_index import IndexRow, Span
from hapi_splitter.planner.costs import Conditions
from hapi_splitter.planner.plan import solve
from hapi_splitter.planner.problem import mix_label
from simulated_tiers import (
    BALANCED,
    PUSH,
    RAW,
    SimulatedJob,
    Truth,
    joint_optimum,
    run,
)

SLOW_LINK = replace(BALANCED, link_capacity=2e6)


@pytest.fixture(autouse=True)
def no_crossover(monkeypatch):
    """Plans skip the search for a crossover bandwidth, which is slow."""
    monkeypatch.setattr(
        "hapi_splitter.planner.plan.crossover_bandwidth", lambda *_: None
    )


def slow_server(seconds):
    """83 samples/s by raw reads, 1 / ``seconds`` pushed down."""
    server = {RAW: 0.0, PUSH: seconds}
    return replace(BALANCED, server=server, train=0.0)


def begun(truth=BALANCED, **options):
    job = SimulatedJob(truth, Clock(), **options)  # type: ignore[arg-type]
    job.replanner.begin()
    return job


def replan(job, times=1):
    """Returns the routes after re-planning."""
    for _ in range(times):
        job.metrics.pending = WindowMetrics(1.0)
        job.replanner.replan()
    return set(job.scheduler.weights)


@pytest.mark.parametrize(
    ("truth", "wrong"),
    [
        (BALANCED, {}),
        (BALANCED, {"server decoding": 0.5}),
        (BALANCED, {"server decoding": 2.0}),
        (BALANCED, {"client layers": 0.6, "server decoding": 1.5}),
        (SLOW_LINK, {}),
        (slow_server(2.0), {}),
    ],
)
def test_job_reaches_its_optimum(truth, wrong):
    job = begun(truth, profiled=wrong)
    rates = run([job], job.clock, rounds=20)
    assert min(rates[-5:]) >= 0.95 * joint_optimum([truth])


def test_route_that_gains_little_is_left_out():
    # The worker computes 83 samples/s, which leave 0.3 raw ones.
    link = 83 * 2e3 + 0.3 * 110e3
    truth = replace(BALANCED, train=0, link_capacity=link)
    problem = SimulatedJob(truth, Clock()).build(
        Conditions(link_bytes_per_second=link)
    )
    plan = solve(problem)
    assert {option.cut for option, _ in plan.mix} == {0, 9}
    major = without_minor_routes(problem, plan)
    assert [(o.cut, weight) for o, weight in major.mix] == [(9, 1.0)]
    assert major.samples_per_second > 0.98 * plan.samples_per_second
    assert without_minor_routes(problem, major) == major


def test_the_only_pushed_route_is_never_left_out():
    problem = SimulatedJob(slow_server(2.0), Clock()).build(
        Conditions(link_bytes_per_second=1e9)
    )
    plan = solve(problem)
    minor = {option.cut: weight < 0.02 for option, weight in plan.mix}
    assert minor == {0: False, 9: True}
    assert without_minor_routes(problem, plan) == plan


def test_push_down_that_gains_little_is_not_begun():
    job = begun(slow_server(2.0))
    assert job.scheduler.weights == {RAW: 1.0}
    assert replan(job) == {RAW}
    [change] = job.replanner.changes
    assert "0.6% faster" in change.why


def test_push_down_goes_on_if_others_use_the_worker_until_it_gains_nothing():
    job = SimulatedJob(BALANCED, Clock())
    job.estimates.server_share = 0.03
    job.replanner.begin()
    assert set(job.scheduler.weights) == {RAW, PUSH}
    assert replan(job) == {RAW, PUSH}
    job = begun()
    assert replan(job) == {RAW, PUSH}
    job.truth = slow_server(2.0)
    assert replan(job, times=8) == {RAW}


def test_gain_near_the_minimum_changes_nothing():
    job = begun(slow_server(0.36))  # 3.3 % more
    assert replan(job, times=8) == {RAW}
    job.scheduler.change({RAW: 0.967, PUSH: 0.033})
    assert replan(job, times=8) == {RAW, PUSH}


HEAVY = Truth(
    {RAW: 110e3, PUSH: 2e3},
    {RAW: 0.3e-3, PUSH: 40e-3},
    {RAW: 40e-3, PUSH: 0.2e-3},
    0.5e-3,
    1e9,
)


@pytest.mark.parametrize(
    ("truths", "part", "max_late_changes"),
    [
        ([BALANCED] * 4, 0.95, 4),
        # Fairness costs throughput: heavy samples take more of the worker.
        ([BALANCED, BALANCED, HEAVY, HEAVY], 0.8, 1000),
    ],
)
def test_jobs_share_the_worker_without_oscillating(
    truths, part, max_late_changes
):
    clock = Clock()
    jobs = [SimulatedJob(t, clock, seed=n) for n, t in enumerate(truths)]
    for job in jobs:
        job.replanner.begin()
    totals = run(jobs, clock, rounds=60)
    assert min(totals[-20:]) >= part * joint_optimum(truths)
    for job in jobs:
        late = [c for c in job.replanner.changes if c.seconds > 200.0]
        assert len(late) <= max_late_changes


def test_weights_follow_a_link_that_becomes_slow_and_fast():
    job = begun()
    run([job], job.clock, rounds=10)
    before = job.scheduler.weights[RAW]
    job.truth = replace(BALANCED, link_capacity=1e6)
    rates = run([job], job.clock, rounds=20)
    assert job.scheduler.weights.get(RAW, 0.0) < 0.5 * before
    assert min(rates[-5:]) >= 0.93 * joint_optimum([job.truth])
    job = begun(replace(BALANCED, link_capacity=0.5e6))
    run([job], job.clock, rounds=20)
    job.truth = BALANCED
    rates = run([job], job.clock, rounds=60)
    assert min(rates[-5:]) >= 0.9 * joint_optimum([BALANCED])


WEIGHTS = st.dictionaries(
    st.tuples(st.integers(1, 5), st.just("float32")) | st.just(RAW),
    st.floats(0.01, 1.0),
    min_size=1,
    max_size=4,
).map(lambda parts: {k: v / sum(parts.values()) for k, v in parts.items()})


def distance(one, other):
    return sum(abs(part) for part in difference(one, other).values()) / 2


@given(current=WEIGHTS, target=WEIGHTS)
def test_step_moves_a_quarter_or_less(current, target):
    moved = step(current, target, MAX_MOVED)
    assert sum(moved.values()) == pytest.approx(1.0)
    # Minor routes leave at once.
    assert distance(moved, current) <= MAX_MOVED + 0.08 + 1e-9


def test_four_steps_reach_the_target():
    weights = {RAW: 1.0}
    for _ in range(4):
        weights = step(weights, {PUSH: 1.0}, MAX_MOVED)
    assert weights == {PUSH: pytest.approx(1.0)}


def test_steps_shrink_if_they_reverse():
    job = begun()
    run([job], job.clock, rounds=10)
    moved = []
    for number in range(16):
        # No weights can follow this link.
        job.estimates.link = LinkEstimator(0.6e6 if number % 2 else 100e6)
        before = dict(job.scheduler.weights)
        replan(job)
        moved.append(distance(before, dict(job.scheduler.weights)))
    assert max(moved) > 1.5 * MIN_MOVED
    assert moved[-4:] == pytest.approx([MIN_MOVED] * 4)


def test_weights_are_described_largest_first():
    text = mix_label({RAW: 0.25, PUSH: 0.75})
    assert text == "75 % cut 9 · float32 + 25 % stream"


def test_replan_interval_counts_loading_time_only():
    job = begun()
    clock, metrics = job.clock, job.metrics
    clock.now += 60.0
    metrics.taken_at = clock.now - 2.0  # 58 s between two epochs
    metrics.pending = WindowMetrics(2.0, samples={RAW: 50})
    job.replanner.span_arrived()
    assert metrics.pending.num_samples == 50
    clock.now += 5.0
    job.replanner.span_arrived()
    assert metrics.pending.num_samples == 0


def test_error_of_re_planning_does_not_end_the_training(caplog, monkeypatch):
    job = begun()
    before = dict(job.scheduler.weights)

    def fail(*_):
        raise ValueError("no option can run")

    monkeypatch.setattr(job.estimates, "observe", fail)
    job.clock.now += 60.0
    job.replanner.span_arrived()
    assert job.scheduler.weights == before
    assert "no option can run" in caplog.text


def test_changes_name_a_lost_worker_and_its_return():
    job = begun()
    run([job], job.clock, rounds=6)
    weights = dict(job.scheduler.weights)
    before = len(job.replanner.changes)
    assert weights[PUSH] > 0

    def add_window(**sums):
        job.clock.now += 10.0
        job.metrics.pending = WindowMetrics(
            5.0, training=StageEvent(1.0, samples=400), **sums
        )
        job.replanner.span_arrived()

    for _ in range(3):
        add_window(samples={RAW: 400}, raw=SpanEvent(fell_back=200))
        assert not job.replanner.plan.pushes
    add_window(
        samples={RAW: 200, PUSH: 200},
        pushed=SpanEvent(200, 10.0, server_cpu_seconds=2.4),
    )
    lost, returned = job.replanner.changes[before : before + 2]
    assert lost.mix == {RAW: 1.0}
    assert "does not answer" in lost.why
    assert returned.mix == weights
    assert "answers again" in returned.why
    assert job.replanner.plan.pushes


def test_worker_is_lost_if_more_samples_fall_back_than_arrive():
    job = begun()
    mixed = job.replanner.plan
    assert job.metrics.planned_rate == mixed.samples_per_second > 0
    job.metrics.pending = WindowMetrics(
        5.0,
        samples={RAW: 300, PUSH: 50},
        pushed=SpanEvent(50, server_cpu_seconds=0.6),
        raw=SpanEvent(fell_back=150),
    )
    job.replanner.replan()
    change = job.replanner.changes[-1]
    assert "150 samples fell back to raw reads, 50 did not" in change.why
    plan = job.replanner.plan
    assert job.metrics.planned_rate == plan.samples_per_second
    assert 0 < plan.samples_per_second < mixed.samples_per_second


@pytest.mark.parametrize(
    ("is_raw", "samples", "cached"),
    [
        # A late fallback of a plan without push-down.
        (True, {RAW: 400}, {}),
        # Hits show that the worker answers.
        (False, {RAW: 8, PUSH: 400}, {PUSH: 400}),
    ],
)
def test_worker_is_not_lost_by_few_fallbacks(is_raw, samples, cached):
    job = begun()
    if is_raw:
        job.scheduler.change({RAW: 1.0})
    before = len(job.replanner.changes)
    job.metrics.pending = WindowMetrics(
        5.0, samples=samples, cached=cached, raw=SpanEvent(fell_back=8)
    )
    job.replanner.replan()
    assert "does not answer" not in str(job.replanner.changes[before:])
    assert job.scheduler.weights != {RAW: 1.0}


DEEP = (21, "float32")
TWO_CUTS = Truth(
    link={RAW: 110e3, PUSH: 60e3, DEEP: 2e3},
    server={RAW: 0.0, PUSH: 4e-3, DEEP: 20e-3},
    client={RAW: 10e-3, PUSH: 5e-3, DEEP: 0.4e-3},
    train=0.1e-3,
    link_capacity=1e9,
)
SPAN = Span("a.tar", "etag", (IndexRow(0, "k", 0, 512, None),))


def tracker_of(mode):
    tracker = CacheTracker(mode)
    tracker.identify("digest", "exact")
    return tracker


@pytest.mark.parametrize(
    ("mode", "epochs", "fastest"),
    [
        ("readwrite", 50, False),
        ("readwrite", 1, True),
        ("off", 50, True),
        ("read", 50, True),
    ],
)
def test_plan_pushes_for_later_epochs_if_it_stores(mode, epochs, fastest):
    tracker = tracker_of(mode)
    job = begun(TWO_CUTS, tracker=tracker, epochs=epochs)
    # Of the two cuts, the deep one is the cheaper to read again.
    assert (PUSH in job.scheduler.weights) is fastest
    for route in (PUSH, DEEP):
        tracker.record(route, SPAN, None, "store")
    expected = None if mode == "off" else DEEP
    assert tracker.cached_route(SPAN, None) == expected


def test_cached_features_are_read_only_if_that_is_faster():
    # The link carries twelve features of the cut a second, or seven images.
    tracker = tracker_of("readwrite")
    job = SimulatedJob(
        replace(TWO_CUTS, link_capacity=0.75e6), Clock(), tracker=tracker
    )
    job.estimates.link = LinkEstimator(0.75e6)
    job.replanner.begin()
    for route in (PUSH, DEEP):
        tracker.record(route, SPAN, None, "store")
    assert tracker.cached_route(SPAN, None) == DEEP
    tracker.record(DEEP, SPAN, None, "miss")
    assert tracker.cached_route(SPAN, None) is None


def test_weights_stay_while_cached_features_are_read():
    tracker = tracker_of("read")
    job = begun(TWO_CUTS, tracker=tracker, epochs=3)
    before = set(job.scheduler.weights)
    assert before == {PUSH, DEEP}
    tracker.record(DEEP, SPAN, None, "hit")
    assert replan(job, times=8) == before
    assert tracker.cached_route(SPAN, None) == DEEP
    assert job.replanner.plan.pushes


@pytest.mark.parametrize(
    ("epochs", "samples_so_far", "remaining"),
    [
        (10.0, 250, 7.5),
        (2.0, 200, 1.0),
        (2.0, 530, 0.7),
        (None, 0, 1.0),
        (None, 640, 6.4),
    ],
)
def test_remaining_epochs_include_the_rest_of_this_one(
    epochs, samples_so_far, remaining
):
    work = RemainingWork(100, epochs)
    assert work.remaining_epochs(samples_so_far) == pytest.approx(remaining)


@pytest.mark.parametrize("samples_so_far", [0, 30, 100, 130])
def test_number_of_epochs_has_no_influence_if_all_is_kept(samples_so_far):
    """So a plan without it is the one that hindsight would have made."""
    read = min(samples_so_far / 100, 1.0)
    remaining = {
        RemainingWork(100, epochs, lambda: (read, 1.0)).remaining_epochs(
            samples_so_far
        )
        for epochs in (None, 2, 5, 20)
    }
    assert remaining == {max(1.0 - read, 0.01)}


def test_part_that_is_not_kept_is_expected_as_often_as_it_was_read():
    work = RemainingWork(100, None, lambda: (0.4, 0.4))
    assert work.remaining_epochs(300) == pytest.approx(0.6 * 3)
