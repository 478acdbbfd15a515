"""Planning again while a job runs: what follows from what is observed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi_client.metrics.window_metrics import WindowMetrics
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.planning.cost_estimators import CostEstimators
from hapi_client.planning.inputs import RemainingWork
from hapi_client.planning.link_estimator import LINK_GROWTH, LinkEstimator
from hapi_client.planning.replanner import (
    MAX_MOVED,
    MIN_MOVED,
    ReplanOptions,
    describe_mix,
    difference,
    step,
    without_minor_routes,
)
from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.summary import Load
from hapi_splitter.planner.costs import Conditions
from hapi_splitter.planner.plan import Option, Problem, solve
from hapi_splitter.planner.problem import UNITS, UNSEEN_LINK, Route
from hapi_splitter.planner.resource_use import resource_use, scaled
from problems import problem_of
from simulated_tiers import (
    Clock,
    SimulatedJob,
    Truth,
    joint_optimum,
    run,
)

STREAM = (0, "raw")
PUSH = (9, "float32")

BALANCED = Truth(
    link={STREAM: 110e3, PUSH: 2e3},
    server={STREAM: 0.3e-3, PUSH: 12e-3},
    client={STREAM: 12e-3, PUSH: 0.2e-3},
    train=0.5e-3,
    link_capacity=1e9,
)


def rates_of(
    truth: Truth, rounds: int = 20, **settings: object
) -> list[float]:
    clock = Clock()
    job = SimulatedJob(truth, clock, **settings)  # type: ignore[arg-type]
    job.replanner.begin()
    return run([job], clock, rounds=rounds)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"server decoding": 0.5},
        {"server decoding": 2.0},
        {"client layers": 0.6, "server decoding": 1.5},
    ],
)
def test_job_comes_to_its_optimum_when_profiles_are_wrong(
    wrong: dict[str, float],
) -> None:
    rates = rates_of(BALANCED, profiled=wrong)

    assert min(rates[-5:]) >= 0.95 * joint_optimum([BALANCED])


def test_link_bound_job_comes_to_its_optimum() -> None:
    slow = Truth(BALANCED.link, BALANCED.server, BALANCED.client, 0.5e-3, 2e6)

    rates = rates_of(slow)

    assert min(rates[-5:]) >= 0.95 * joint_optimum([slow])


def test_job_streams_when_the_server_is_slow() -> None:
    weak = Truth(
        BALANCED.link,
        {STREAM: 0.0, PUSH: 2.0},
        BALANCED.client,
        0.5e-3,
        1e9,
    )

    assert min(rates_of(weak)[-5:]) >= 0.95 * joint_optimum([weak])


def test_way_that_gains_little_is_left_out() -> None:
    # The worker does 83 samples/s, which leave room for 0.3 streamed ones.
    link = 83 * 2e3 + 0.3 * 110e3
    truth = Truth(BALANCED.link, BALANCED.server, BALANCED.client, 0, link)
    problem = SimulatedJob(truth, Clock()).build(
        Conditions(link_bytes_per_second=link)
    )
    plan = solve(problem)
    assert {option.cut for option, _ in plan.mix} == {0, 9}

    kept = without_minor_routes(problem, plan)

    assert [(o.cut, weight) for o, weight in kept.mix] == [(9, 1.0)]
    assert kept.samples_per_second > 0.98 * plan.samples_per_second
    assert without_minor_routes(problem, kept) == kept


def test_the_only_pushed_way_is_kept_as_it_shows_the_worker() -> None:
    weak = Truth(
        BALANCED.link, {STREAM: 0, PUSH: 2.0}, BALANCED.client, 0, 1e9
    )
    problem = SimulatedJob(weak, Clock()).build(
        Conditions(link_bytes_per_second=1e9)
    )
    plan = solve(problem)
    assert {option.cut: w < 0.02 for option, w in plan.mix} == {
        0: False,
        9: True,
    }

    assert without_minor_routes(problem, plan) == plan


def slow_server(seconds: float) -> Truth:
    return Truth(
        BALANCED.link, {STREAM: 0, PUSH: seconds}, BALANCED.client, 0, 1e9
    )


def replan(job: SimulatedJob, times: int = 1) -> set[Route]:
    """After it has looked; what it uses then."""
    for _ in range(times):
        job.metrics.pending = WindowMetrics(1.0)
        job.replanner.replan()
    return set(job.scheduler.weights)


def test_nothing_is_pushed_that_gains_little_on_a_worker_of_its_own() -> None:
    # 83 samples/s streamed, and 0.5 pushed.
    job = SimulatedJob(slow_server(2.0), Clock())
    job.replanner.begin()

    assert job.scheduler.weights == {STREAM: 1.0}
    assert replan(job) == {STREAM}
    [change] = job.replanner.changes
    assert "0.6% faster" in change.why


def test_what_gains_little_goes_on_while_others_keep_the_worker_busy() -> None:
    job = SimulatedJob(BALANCED, Clock())
    job.estimates.server_share = 0.03
    job.replanner.begin()

    assert set(job.scheduler.weights) == {STREAM, PUSH}
    assert replan(job) == {STREAM, PUSH}


def test_pushing_is_given_up_when_it_gains_nothing_any_more() -> None:
    job = SimulatedJob(BALANCED, Clock())
    job.replanner.begin()
    assert replan(job) == {STREAM, PUSH}

    job.truth = slow_server(2.0)

    assert replan(job, times=8) == {STREAM}


def test_a_gain_near_the_least_one_changes_nothing_to_and_fro() -> None:
    # 83 samples/s streamed, and 2.8 pushed: 3.3 % more.
    job = SimulatedJob(slow_server(0.36), Clock())
    job.replanner.begin()
    assert replan(job, times=8) == {STREAM}

    job.scheduler.change({STREAM: 0.967, PUSH: 0.033})

    assert replan(job, times=8) == {STREAM, PUSH}


def test_four_jobs_reach_the_joint_optimum_without_oscillating() -> None:
    clock = Clock()
    jobs = [SimulatedJob(BALANCED, clock, seed=seed) for seed in range(4)]
    for job in jobs:
        job.replanner.begin()

    totals = run(jobs, clock, rounds=60)

    best = joint_optimum([BALANCED] * 4)
    assert min(totals[-20:]) >= 0.95 * best
    for job in jobs:
        late = [c for c in job.replanner.changes if c.seconds > 200.0]
        assert len(late) <= 4, [describe_mix(c.mix) for c in late]


def test_jobs_of_different_kinds_share_the_worker_well() -> None:
    heavy = Truth(
        {STREAM: 110e3, PUSH: 2e3},
        {STREAM: 0.3e-3, PUSH: 40e-3},
        {STREAM: 40e-3, PUSH: 0.2e-3},
        0.5e-3,
        1e9,
    )
    truths = [BALANCED, BALANCED, heavy, heavy]
    clock = Clock()
    jobs = [SimulatedJob(t, clock, seed=n) for n, t in enumerate(truths)]
    for job in jobs:
        job.replanner.begin()

    totals = run(jobs, clock, rounds=60)

    # Fair shares and the greatest sum are two aims: heavy samples cost the
    # worker more, and fairness gives them their part all the same.
    assert min(totals[-20:]) >= 0.8 * joint_optimum(truths)


def test_mix_reacts_when_the_link_becomes_slow() -> None:
    clock = Clock()
    job = SimulatedJob(BALANCED, clock)
    job.replanner.begin()
    run([job], clock, rounds=10)
    before = job.scheduler.weights[STREAM]

    job.truth = Truth(
        BALANCED.link, BALANCED.server, BALANCED.client, 0.5e-3, 1e6
    )
    rates = run([job], clock, rounds=20)

    assert job.scheduler.weights.get(STREAM, 0.0) < 0.5 * before
    assert min(rates[-5:]) >= 0.93 * joint_optimum([job.truth])


def test_mix_reacts_when_the_link_becomes_fast() -> None:
    slow = Truth(
        BALANCED.link, BALANCED.server, BALANCED.client, 0.5e-3, 0.5e6
    )
    clock = Clock()
    job = SimulatedJob(slow, clock)
    job.replanner.begin()
    run([job], clock, rounds=20)

    job.truth = BALANCED
    rates = run([job], clock, rounds=60)

    assert min(rates[-5:]) >= 0.9 * joint_optimum([BALANCED])


def test_unknown_link_has_no_limit_until_it_was_one() -> None:
    link = LinkEstimator()

    link.observe(5e6, limited=False, seconds=5.0)
    assert link.bytes_per_second == UNSEEN_LINK

    link.observe(3e6, limited=True, seconds=5.0)
    assert link.bytes_per_second == 3e6


def test_interval_without_limit_only_raises_the_link() -> None:
    link = LinkEstimator(10e6)

    link.observe(2e6, limited=False, seconds=5.0)
    assert link.bytes_per_second == 10e6

    link.observe(12e6, limited=False, seconds=5.0)
    assert link.bytes_per_second == 12e6


def test_link_that_carries_what_is_believed_of_it_grows_slowly() -> None:
    link = LinkEstimator(10e6)

    for _ in range(30):
        rate = 0.95 * link.bytes_per_second
        link.observe(rate, limited=False, seconds=5.0)

    assert link.bytes_per_second == pytest.approx(10e6 * 1.1**2)


def test_link_is_tried_again_after_a_minute() -> None:
    link = LinkEstimator(10e6)

    for _ in range(13):
        link.observe(1e6, limited=False, seconds=5.0)

    assert link.bytes_per_second == pytest.approx(10e6 * (1 + LINK_GROWTH))


MIXES = st.dictionaries(
    st.tuples(st.integers(1, 5), st.just("float32")) | st.just(STREAM),
    st.floats(0.01, 1.0),
    min_size=1,
    max_size=4,
).map(lambda parts: {k: v / sum(parts.values()) for k, v in parts.items()})


@given(now=MIXES, wanted=MIXES)
def test_step_moves_at_most_a_quarter(
    now: dict[tuple[int, str], float], wanted: dict[tuple[int, str], float]
) -> None:
    moved = step(now, wanted, MAX_MOVED)

    assert sum(moved.values()) == pytest.approx(1.0)
    routes = {*now, *wanted, *moved}
    distance = sum(abs(moved.get(w, 0) - now.get(w, 0)) for w in routes) / 2
    # Ways not worth a request leave at once.
    assert distance <= MAX_MOVED + 0.08 + 1e-9


def test_moves_to_and_fro_become_smaller() -> None:
    clock = Clock()
    job = SimulatedJob(BALANCED, clock)
    job.replanner.begin()
    run([job], clock, rounds=10)
    moved = []
    for number in range(16):
        # Worlds that no mix can follow.
        link = 0.6e6 if number % 2 else 100e6
        job.estimates.link = LinkEstimator(link)
        job.metrics.pending = WindowMetrics(1.0)
        before = dict(job.scheduler.weights)
        job.replanner.replan()
        moved.append(distance(before, job.scheduler.weights))
    assert max(moved) > 1.5 * MIN_MOVED
    assert moved[-4:] == pytest.approx([MIN_MOVED] * 4)


def distance(
    one: Mapping[Route, float], other: Mapping[Route, float]
) -> float:
    return sum(abs(part) for part in difference(one, other).values()) / 2


def test_steps_arrive_after_four() -> None:
    mix = {STREAM: 1.0}
    for _ in range(4):
        mix = step(mix, {PUSH: 1.0}, MAX_MOVED)

    assert mix == {PUSH: pytest.approx(1.0)}


def test_describe_mix_names_the_larger_part_first() -> None:
    assert (
        describe_mix({STREAM: 0.25, PUSH: 0.75})
        == "75 % cut 9 float32, 25 % stream"
    )


def test_bad_replan_options_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        ReplanOptions(seconds=0.0)


def test_only_time_of_loading_counts_until_the_next_look() -> None:
    clock = Clock()
    job = SimulatedJob(BALANCED, clock)
    job.replanner.begin()
    clock.now += 60.0
    job.metrics.taken_at = clock.now - 2.0  # 58 s between two epochs
    job.metrics.pending = WindowMetrics(2.0, samples={STREAM: 50})
    job.replanner.span_arrived()
    assert job.metrics.pending.num_samples == 50, "not looked at yet"

    clock.now += 5.0
    job.replanner.span_arrived()
    assert job.metrics.pending.num_samples == 0


@pytest.mark.parametrize(("push_seconds", "share"), [(20.0, 0.8), (16.0, 1.0)])
def test_worker_whose_lane_ran_empty_could_have_given_more(
    push_seconds: float, share: float
) -> None:
    job = SimulatedJob(BALANCED, Clock())
    estimates = job.estimates
    window = WindowMetrics(
        5.0,
        samples={PUSH: 333},
        pushed_samples=333,
        server_cpu_seconds=333 * BALANCED.server[PUSH],
        push_seconds=push_seconds,  # four requests at a time are all
        load=Load(share=1.0, streams=4, device_busy=0.0, cpu_busy=0.8),
    )

    for _ in range(20):
        estimates.observe(window, job.build)

    assert estimates.server_share == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(("max_pushed", "share"), [(4, 1.0), (2, 0.56)])
def test_worker_that_only_we_keep_busy_is_all_ours(
    max_pushed: int, share: float
) -> None:
    """It was busy when it said so; in half of the window it rested."""
    job = SimulatedJob(BALANCED, Clock())
    estimates = job.estimates
    window = WindowMetrics(
        5.0,
        samples={PUSH: 208},
        pushed_samples=208,
        server_cpu_seconds=208 * BALANCED.server[PUSH],
        push_seconds=10.0,  # two requests at a time, of four
        max_pushed=max_pushed,
        load=Load(share=1.0, streams=4, device_busy=0.0, cpu_busy=0.94),
    )

    for _ in range(20):
        estimates.observe(window, job.build)

    assert estimates.server_share == pytest.approx(share, abs=0.01)


def test_failing_plan_never_ends_the_training(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    job = SimulatedJob(BALANCED, clock)
    job.replanner.begin()
    before = dict(job.scheduler.weights)

    def fail(*_: object) -> None:
        raise ValueError("no option can run")

    monkeypatch.setattr(job.estimates, "observe", fail)
    clock.now += 60.0
    job.replanner.span_arrived()

    assert job.scheduler.weights == before
    assert "no option can run" in caplog.text


def test_log_of_plans_tells_of_a_worker_that_is_gone_and_comes_back() -> None:
    clock = Clock()
    job = SimulatedJob(BALANCED, clock)
    job.replanner.begin()
    run([job], clock, rounds=6)
    mix = dict(job.scheduler.weights)
    before = len(job.replanner.changes)
    assert mix[PUSH] > 0

    def passes(**window: object) -> None:
        clock.now += 10.0
        job.metrics.pending = WindowMetrics(
            5.0, train_samples=400, train_seconds=1.0, **window
        )
        job.replanner.span_arrived()

    for _ in range(3):
        passes(samples={STREAM: 400}, fell_back=200)
        assert job.replanner.plan is not None
        assert not job.replanner.plan.pushes
    passes(
        samples={STREAM: 200, PUSH: 200},
        pushed_samples=200,
        server_cpu_seconds=2.4,
        push_seconds=10.0,
    )

    lost, back = job.replanner.changes[before : before + 2]
    assert lost.mix == {STREAM: 1.0}
    assert "does not answer" in lost.why
    assert back.mix == mix
    assert "answers again" in back.why
    assert job.replanner.plan.pushes


def test_late_straggler_of_a_plan_that_streams_is_no_lost_worker() -> None:
    clock = Clock()
    job = SimulatedJob(BALANCED, clock)
    job.replanner.begin()
    job.scheduler.change({STREAM: 1.0})
    job.metrics.pending = WindowMetrics(
        5.0, samples={STREAM: 400}, fell_back=8, train_samples=400
    )
    before = len(job.replanner.changes)

    job.replanner.replan()

    assert "does not answer" not in str(job.replanner.changes[before:])
    # It goes on looking.
    assert job.scheduler.weights != {STREAM: 1.0}


def test_worker_that_mostly_fails_counts_as_gone() -> None:
    job = SimulatedJob(BALANCED, Clock())
    mixed = job.replanner.begin()
    assert job.metrics.planned == mixed.samples_per_second > 0
    job.metrics.pending = WindowMetrics(
        5.0,
        samples={STREAM: 300, PUSH: 50},
        pushed_samples=50,
        server_cpu_seconds=0.6,
        fell_back=150,
    )

    job.replanner.replan()

    assert (
        "150 samples fell back to raw reads, 50 did not"
        in job.replanner.changes[-1].why
    )
    # What is expected of the mix now is what streaming brings.
    plan = job.replanner.plan
    assert plan is not None
    assert job.metrics.planned == plan.samples_per_second
    assert 0 < plan.samples_per_second < mixed.samples_per_second


def test_worker_whose_features_had_been_kept_is_not_gone() -> None:
    job = SimulatedJob(BALANCED, Clock())
    job.replanner.begin()
    before = len(job.replanner.changes)
    job.metrics.pending = WindowMetrics(
        5.0, samples={STREAM: 8, PUSH: 400}, cached={PUSH: 400}, fell_back=8
    )

    job.replanner.replan()

    assert "does not answer" not in str(job.replanner.changes[before:])


DEEP = (21, "float32")
TWO_CUTS = Truth(
    link={STREAM: 110e3, PUSH: 60e3, DEEP: 2e3},
    server={STREAM: 0.0, PUSH: 4e-3, DEEP: 20e-3},
    client={STREAM: 10e-3, PUSH: 5e-3, DEEP: 0.4e-3},
    train=0.1e-3,
    link_capacity=1e9,
)
SPAN = Span("a.tar", "etag", (IndexRow(0, "k", 0, 512, None),))


def tracker_of(mode: str) -> CacheTracker:
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
def test_plan_pushes_for_later_epochs_if_it_stores(
    mode: str, epochs: float, fastest: bool
) -> None:
    tracker = tracker_of(mode)
    job = SimulatedJob(TWO_CUTS, Clock(), tracker=tracker, epochs=epochs)
    job.replanner.begin()
    # Of the two cuts, the deep one is the cheaper to read again.
    assert (PUSH in job.scheduler.weights) is fastest
    for route in (PUSH, DEEP):
        tracker.record(route, SPAN, None, "store")
    found = tracker.cached_route(SPAN, None)
    assert found == (None if mode == "off" else DEEP)


def test_cached_features_are_read_only_if_that_is_faster() -> None:
    # On a link that brings twelve of them a second, of photographs seven.
    slow = replace(TWO_CUTS, link_capacity=0.75e6)
    tracker = tracker_of("readwrite")
    job = SimulatedJob(slow, Clock(), tracker=tracker)
    job.estimates.link = LinkEstimator(0.75e6)
    job.replanner.begin()
    for route in (PUSH, DEEP):
        tracker.record(route, SPAN, None, "store")
    assert tracker.cached_route(SPAN, None) == DEEP
    tracker.record(DEEP, SPAN, None, "miss")
    assert tracker.cached_route(SPAN, None) is None


def test_the_mix_stays_while_cached_features_are_read() -> None:
    tracker = tracker_of("read")
    job = SimulatedJob(TWO_CUTS, Clock(), tracker=tracker, epochs=3)
    job.replanner.begin()
    before = dict(job.scheduler.weights)
    assert {PUSH, DEEP} == set(before)
    tracker.record(DEEP, SPAN, None, "hit")

    assert replan(job, times=8) == set(before)
    assert tracker.cached_route(SPAN, None) == DEEP
    assert job.replanner.plan is not None
    assert job.replanner.plan.pushes


def test_epoch_under_way_is_always_still_to_come() -> None:
    assert RemainingWork(100, 10.0).remaining_epochs(250) == pytest.approx(7.5)
    assert RemainingWork(100, 2.0).remaining_epochs(200) == pytest.approx(1.0)
    assert RemainingWork(100, 2.0).remaining_epochs(530) == pytest.approx(0.7)
    assert RemainingWork(100, None).remaining_epochs(0) == pytest.approx(1.0)
    assert RemainingWork(100, None).remaining_epochs(640) == pytest.approx(6.4)


def test_link_is_known_though_little_is_streamed() -> None:
    estimates = SimulatedJob(BALANCED, Clock()).estimates
    problem = SimulatedJob(BALANCED, Clock()).build(estimates.conditions())
    seldom = WindowMetrics(
        10.0,
        samples={STREAM: 10, PUSH: 90},
        received_bytes=1_280_000,
        reading_share=0.95,
        reading_seconds=2.0,
        reading_bytes=1_120_000,
        raw_read_seconds=2.1,
        push_seconds=40.0,
    )

    estimates.observe_start(seldom, problem)
    assert estimates.link.bytes_per_second == UNSEEN_LINK

    estimates.observe_start(replace(seldom, reading_flows=2.0), problem)
    assert estimates.link.bytes_per_second == pytest.approx(560_000)

    # Alone, it may be slow for reasons of its own.
    slow = replace(seldom, reading_bytes=100_000, reading_flows=1.0)
    estimates.observe_start(slow, problem)
    assert estimates.link.bytes_per_second == pytest.approx(560_000)


@pytest.mark.parametrize("flows", [1.0, 1.1])
def test_link_is_known_from_the_first_read_that_waits(flows: float) -> None:
    """A job begins with one, and may have had no time for more."""
    job = SimulatedJob(BALANCED, Clock())
    estimates = job.estimates
    first = WindowMetrics(
        2.1,
        samples={STREAM: 16},
        received_bytes=1_700_000,
        reading_share=0.95,
        reading_seconds=2.0,
        reading_bytes=1_600_000,
        reading_flows=flows,
        raw_read_seconds=2.1,
    )

    estimates.observe_start(first, job.build(estimates.conditions()))
    assert estimates.link.bytes_per_second == pytest.approx(800_000)

    # What more of them carry is found.
    more = replace(
        first,
        received_bytes=6_800_000,
        reading_bytes=6_400_000,
        reading_flows=4.0,
    )
    for _ in range(4):
        estimates.observe_start(more, job.build(estimates.conditions()))
    assert estimates.link.bytes_per_second == pytest.approx(3.2e6, rel=0.1)


def test_link_that_became_fast_is_found_when_reads_no_longer_wait() -> None:
    job = SimulatedJob(BALANCED, Clock())
    estimates = job.estimates
    estimates.link = LinkEstimator(2e6)
    fast = WindowMetrics(
        5.0,
        samples={STREAM: 80, PUSH: 200},
        received_bytes=9_000_000,
        client_cpu_seconds=2.0,
        reading_share=0.1,
        reading_seconds=0.5,
        reading_flows=1.0,
        reading_bytes=10_000_000,
        raw_read_seconds=5.0,
        push_seconds=20.0,
    )

    found = []
    for _ in range(7):
        estimates.observe_start(fast, job.build(estimates.conditions()))
        found.append(estimates.link.bytes_per_second / 1e6)

    assert found[:3] == [pytest.approx(3e0), pytest.approx(4.5), 6.75]
    assert found[-1] == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("waiting", "profiled", "expected"),
    [
        (0.2, 4.0, 2.5),  # the loop is never idle: all the time is its
        (5.0, 4.0, None),  # it waits: the profile stays
        (5.0, 20.0, 0.5),  # more seconds than there were
    ],
)
def test_accelerator_of_the_client_is_known_by_the_loop_that_never_waits(
    waiting: float, profiled: float, expected: float | None
) -> None:
    estimates = CostEstimators(
        pushdown_concurrency=lambda: 4, train_on_cpu=False
    )
    work = {"client layers": profiled / 1000}
    use = {"client device": profiled / 1000}
    option = Option(0, "raw", use, 0, 0, work)
    problem = problem_of(
        [option], {"link": 1e9, "client cpu": 4.0, "client device": 1.0}
    )
    window = WindowMetrics(
        10.0,
        samples={STREAM: 1000},
        train_samples=1000,
        train_seconds=0.5,
        waiting_seconds=waiting,
    )

    estimates.observe(window, lambda _: problem)

    for kind in ("client layers", "training"):
        assert estimates.scale.get(kind) == (
            expected if expected is None else pytest.approx(expected)
        )


def test_interval_without_bytes_says_nothing_of_the_link() -> None:
    clock = Clock()
    job = SimulatedJob(BALANCED, clock)
    idle = WindowMetrics(
        5.0, samples={STREAM: 64}, reading_share=0.9, raw_read_seconds=20.0
    )

    job.estimates.observe(idle, job.build)

    assert job.estimates.link.bytes_per_second == UNSEEN_LINK


def profiled(conditions: Conditions) -> Problem:
    """A CPU client and a CPU worker; streaming, and a cut in the middle."""
    works = {
        STREAM: {"client decoding": 5e-3, "client layers": 3e-3},
        PUSH: {
            "server decoding": 4e-3,
            "server layers": 2e-3,
            "client decoding": 0.5e-3,
            "client layers": 1e-3,
        },
    }
    options = []
    for (cut, encoding), profile in works.items():
        work = scaled(profile, conditions.scale)
        use = resource_use(
            1e3, work, server_share=1.0, server_threads=1, client_threads=1
        )
        options.append(Option(cut, encoding, use, 0, 0, work))
    return problem_of(options, dict.fromkeys(UNITS, 1.0), last_cut=9)


def test_each_kind_of_work_is_corrected_by_what_was_seen_of_it() -> None:
    estimates = CostEstimators(
        pushdown_concurrency=lambda: 4, train_on_cpu=True, server_threads=1
    )
    window = WindowMetrics(
        5.0,
        samples={STREAM: 100, PUSH: 200},
        client_cpu_seconds=2.1,
        decode_cpu_seconds=0.6,  # 1.2 times as much as profiled
        suffix_samples={0: 100, PUSH[0]: 200},
        suffix_cpu_seconds=1.0,  # 2 times
        train_samples=300,
        train_cpu_seconds=0.1,
        train_seconds=0.1,
        pushed_samples=200,
        server_cpu_seconds=1.6,
        forward_seconds=9.0,
        forward_cpu_seconds=0.6,  # 1.5 times; decoding 1.25 times
    )

    estimates.observe(window, profiled)

    assert estimates.scale == pytest.approx(
        {
            "client decoding": 1.2,
            "client layers": 2.0,
            "server decoding": 1.25,
            "server layers": 1.5,
        }
    )
    # 2.1 less 0.6, 1.0, 0.1 and 200 times 1.2 * 0.5 ms to unpack.
    assert estimates.handling_seconds == pytest.approx(0.28 / 300)
    conditions = estimates.conditions()
    assert conditions.handling_seconds == estimates.handling_seconds
    assert conditions.train_seconds == pytest.approx(0.1 / 300)


def test_kept_features_make_no_computing_cheaper() -> None:
    found = []
    for kept in (0, 800):
        estimates = CostEstimators(
            pushdown_concurrency=lambda: 4, train_on_cpu=True, server_threads=1
        )
        window = WindowMetrics(
            5.0,
            samples={PUSH: 200 + kept},
            cached={PUSH: kept},
            pushed_samples=200,
            push_seconds=5.0,
            server_cpu_seconds=1.6,
            forward_seconds=9.0,
            forward_cpu_seconds=0.6,
            load=Load(share=0.1, streams=4, device_busy=0.9, cpu_busy=0.9),
        )
        estimates.observe(window, profiled)
        found.append((estimates.scale, estimates.server_share))

    assert found[0] == found[1]
    assert found[0][0]["server layers"] == pytest.approx(1.5)


def test_little_work_says_nothing_of_its_profile() -> None:
    estimates = CostEstimators(
        pushdown_concurrency=lambda: 4, train_on_cpu=True
    )
    window = WindowMetrics(
        5.0,
        samples={STREAM: 2, PUSH: 20},
        client_cpu_seconds=1.0,
        decode_cpu_seconds=0.5,
        suffix_samples={0: 2, PUSH[0]: 20},
        suffix_cpu_seconds=0.5,
        pushed_samples=20,
        server_cpu_seconds=0.5,
        forward_seconds=0.4,
    )
    estimates.observe(window, profiled)
    assert estimates.scale == {}
    # But the client is known to have been busy with it.
    charged = 2 * 8e-3 + 20 * 1.5e-3
    assert estimates.handling_seconds == pytest.approx((1 - charged) / 22)


def test_step_that_uses_one_core_of_many_is_not_charged_with_all() -> None:
    estimates = CostEstimators(
        pushdown_concurrency=lambda: 4, train_on_cpu=True, client_threads=8
    )
    window = WindowMetrics(
        5.0,
        samples={PUSH: 1000},
        client_cpu_seconds=2.5,  # 1 to train, 0.5 to unpack, 1 of handling
        train_samples=1000,
        train_cpu_seconds=1.0,
        train_seconds=1.0,
    )
    estimates.observe(window, profiled)
    work = {
        "client decoding": 0.5e-3,
        "client handling": estimates.conditions().handling_seconds,
        "training": estimates.conditions().train_seconds,
    }
    use = resource_use(
        0.0, work, server_share=1.0, server_threads=0, client_threads=8
    )
    assert use["client cpu"] == pytest.approx(2.5e-3)
