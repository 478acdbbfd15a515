"""Estimates of a job's conditions from measurement windows."""

from dataclasses import replace

import pytest

from clock import Clock
from hapi_client.metrics.events import (
    SpanEvent,
    StageEvent,
    WindowMetrics,
)
from hapi_client.planning.cost_estimators import CostEstimators
from hapi_client.planning.link_estimator import LINK_GROWTH, LinkEstimator
from hapi_protocol.summary import WorkerLoad
from hapi_splitter.planner.plan import Option
from hapi_splitter.planner.problem import UNITS, UNSEEN_LINK
from hapi_splitter.planner.resource_use import resource_use, scaled
from problems import problem_of
from simulated_tiers import BALANCED, PUSH, RAW, SimulatedJob


def estimators(train_on_cpu=True, **options):
    return CostEstimators(
        pushdown_concurrency=lambda: 4, train_on_cpu=train_on_cpu, **options
    )


@pytest.mark.parametrize(
    ("start", "windows", "expected"),
    [
        # Unknown until it was saturated.
        (UNSEEN_LINK, [(5e6, False)], UNSEEN_LINK),
        (UNSEEN_LINK, [(5e6, False), (3e6, True)], 3e6),
        # A window that it did not limit only raises it.
        (10e6, [(2e6, False)], 10e6),
        (10e6, [(2e6, False), (12e6, False)], 12e6),
        # More is tried after a minute.
        (10e6, [(1e6, False)] * 13, 10e6 * (1 + LINK_GROWTH)),
    ],
)
def test_link_follows_rates_and_saturation(start, windows, expected):
    link = LinkEstimator(start)
    for rate, limited in windows:
        link.observe(rate, limited=limited, seconds=5.0)
    assert link.bytes_per_second == pytest.approx(expected)


def test_link_grows_slowly_if_it_carries_its_estimate():
    link = LinkEstimator(10e6)
    for _ in range(30):
        rate = 0.95 * link.bytes_per_second
        link.observe(rate, limited=False, seconds=5.0)
    assert link.bytes_per_second == pytest.approx(10e6 * 1.1**2)


@pytest.fixture
def job():
    return SimulatedJob(BALANCED, Clock())


def observe_start(job, window):
    """Returns the estimate of the link after the window."""
    estimates = job.estimates
    estimates.observe_start(window, job.build(estimates.conditions()))
    return estimates.link.bytes_per_second


def waiting(seconds, samples, received_bytes, flows=0.0, **sums):
    """A window in which two seconds were spent in raw reads that wait."""
    return WindowMetrics(
        seconds,
        samples=samples,
        received_bytes=received_bytes,
        raw=SpanEvent(read_seconds=2.0, raw_seconds=2.1),
        reading_seconds=2.0,
        flow_seconds=2.0 * flows,
        **sums,
    )


def test_link_is_estimated_from_few_raw_reads(job):
    def observe(reading_bytes, flows=0.0):
        sums = {
            "reading_bytes": reading_bytes,
            "pushed": SpanEvent(seconds=40.0),
        }
        window = waiting(10.0, {RAW: 10, PUSH: 90}, 1_280_000, flows, **sums)
        return observe_start(job, window)

    assert observe(1_120_000) == UNSEEN_LINK
    assert observe(1_120_000, flows=2.0) == pytest.approx(560_000)
    # A single flow may be slow for reasons of its own.
    assert observe(100_000, flows=1.0) == pytest.approx(560_000)


@pytest.mark.parametrize("flows", [1.0, 1.1])
def test_link_is_estimated_from_the_first_read_that_waits(job, flows):
    """A job begins with a single read."""
    raw = {RAW: 16}
    first = waiting(2.1, raw, 1_700_000, flows, reading_bytes=1_600_000)
    assert observe_start(job, first) == pytest.approx(800_000)
    more = waiting(2.1, raw, 6_800_000, 4.0, reading_bytes=6_400_000)
    rates = [observe_start(job, more) for _ in range(4)]
    assert rates[-1] == pytest.approx(3.2e6, rel=0.1)


def test_faster_link_is_found_if_reads_no_longer_wait(job):
    job.estimates.link = LinkEstimator(2e6)
    fast = WindowMetrics(
        5.0,
        samples={RAW: 80, PUSH: 200},
        received_bytes=9_000_000,
        client_cpu_seconds=2.0,
        raw=SpanEvent(read_seconds=0.5, raw_seconds=5.0),
        pushed=SpanEvent(seconds=20.0),
        reading_seconds=0.5,
        flow_seconds=0.5,
        reading_bytes=10_000_000,
    )
    rates = [observe_start(job, fast) / 1e6 for _ in range(7)]
    assert rates[:3] == pytest.approx([3.0, 4.5, 6.75])
    assert rates[-1] == pytest.approx(20.0)


def test_link_is_not_estimated_from_a_window_without_bytes(job):
    idle = WindowMetrics(
        5.0,
        samples={RAW: 64},
        raw=SpanEvent(read_seconds=18.0, raw_seconds=20.0),
    )
    job.estimates.observe(idle, job.build)
    assert job.estimates.link.bytes_per_second == UNSEEN_LINK


@pytest.mark.parametrize(
    ("samples", "cpu_busy", "push_seconds", "max_pushed", "share"),
    [
        # The read queue was full, or four fifths of it.
        (333, 0.8, 20.0, 0, 0.8),
        (333, 0.8, 16.0, 0, 1.0),
        # Only this job used the worker, which was idle half of the window;
        # or others may have.
        (208, 0.94, 10.0, 4, 1.0),
        (208, 0.94, 10.0, 2, 0.56),
    ],
)
def test_server_share_follows_the_load_and_the_read_queue(
    job, samples, cpu_busy, push_seconds, max_pushed, share
):
    window = WindowMetrics(
        5.0,
        samples={PUSH: samples},
        pushed=SpanEvent(
            samples,
            push_seconds,
            server_cpu_seconds=samples * BALANCED.server[PUSH],
        ),
        max_pushed=max_pushed,
        load=WorkerLoad(
            share=1.0, streams=4, device_busy=0.0, cpu_busy=cpu_busy
        ),
    )
    for _ in range(20):
        job.estimates.observe(window, job.build)
    assert job.estimates.server_share == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("waiting", "profiled_seconds", "expected"),
    [
        (0.2, 4.0, 2.5),  # the loop never waits: the device takes all time
        (5.0, 4.0, None),  # it waits: the profile stays
        (5.0, 20.0, 0.5),  # more seconds than the window has
    ],
)
def test_accelerator_is_estimated_from_the_wait_of_the_loop(
    waiting, profiled_seconds, expected
):
    estimates = estimators(train_on_cpu=False)
    work = {"client layers": profiled_seconds / 1000}
    use = {"client device": profiled_seconds / 1000}
    problem = problem_of(
        [Option(0, "raw", use, 0, 0, work)],
        {"link": 1e9, "client cpu": 4.0, "client device": 1.0},
    )
    window = WindowMetrics(
        10.0,
        samples={RAW: 1000},
        training=StageEvent(0.5, samples=1000),
        waiting=StageEvent(waiting),
    )
    estimates.observe(window, lambda _: problem)
    for kind in ("client layers", "training"):
        assert estimates.scale.get(kind) == (
            expected if expected is None else pytest.approx(expected)
        )


def profiled(conditions):
    """Raw reads, and a cut in the middle, on CPUs."""
    works = {
        RAW: {"client decoding": 5e-3, "client layers": 3e-3},
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


WORKER = SpanEvent(
    200,
    server_cpu_seconds=1.6,
    # 1.5 times the profile; decoding 1.25 times
    server_seconds={"forward": 9.0, "forward_cpu": 0.6},
)


def test_each_component_is_corrected_by_its_measurement():
    estimates = estimators(server_threads=1)
    window = WindowMetrics(
        5.0,
        samples={RAW: 100, PUSH: 200},
        client_cpu_seconds=2.1,
        raw=SpanEvent(decode_cpu_seconds=0.6),  # 1.2 times the profile
        layers=StageEvent(
            cpu_seconds=1.0,  # 2 times
            samples_by_cut={0: 100, PUSH[0]: 200},
        ),
        training=StageEvent(0.1, 0.1, 300),
        pushed=WORKER,
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
    # 2.1 less 0.6, 1.0, 0.1 and 200 times 1.2 * 0.5 ms to decode features.
    assert estimates.handling_seconds == pytest.approx(0.28 / 300)
    conditions = estimates.conditions()
    assert conditions.handling_seconds == estimates.handling_seconds
    assert conditions.train_seconds == pytest.approx(0.1 / 300)


def test_cached_features_do_not_make_computing_cheaper():
    results = []
    for cached in (0, 800):
        estimates = estimators(server_threads=1)
        window = WindowMetrics(
            5.0,
            samples={PUSH: 200 + cached},
            cached={PUSH: cached},
            pushed=replace(WORKER, seconds=5.0),
            load=WorkerLoad(
                share=0.1, streams=4, device_busy=0.9, cpu_busy=0.9
            ),
        )
        estimates.observe(window, profiled)
        results.append((estimates.scale, estimates.server_share))
    assert results[0] == results[1]
    assert results[0][0]["server layers"] == pytest.approx(1.5)


def test_small_component_is_overhead_and_no_correction():
    estimates = estimators()
    window = WindowMetrics(
        5.0,
        samples={RAW: 2, PUSH: 20},
        client_cpu_seconds=1.0,
        raw=SpanEvent(decode_cpu_seconds=0.5),
        layers=StageEvent(cpu_seconds=0.5, samples_by_cut={0: 2, PUSH[0]: 20}),
        pushed=SpanEvent(
            20, server_cpu_seconds=0.5, server_seconds={"forward": 0.4}
        ),
    )
    estimates.observe(window, profiled)
    assert estimates.scale == {}
    charged = 2 * 8e-3 + 20 * 1.5e-3
    assert estimates.handling_seconds == pytest.approx((1 - charged) / 22)


def test_training_step_is_charged_only_the_cores_that_it_uses():
    estimates = estimators(client_threads=8)
    window = WindowMetrics(
        5.0,
        samples={PUSH: 1000},
        client_cpu_seconds=2.5,  # training 1, decoding 0.5, overhead 1
        training=StageEvent(1.0, 1.0, 1000),
    )
    estimates.observe(window, profiled)
    conditions = estimates.conditions()
    work = {
        "client decoding": 0.5e-3,
        "client handling": conditions.handling_seconds,
        "training": conditions.train_seconds,
    }
    use = resource_use(
        0.0, work, server_share=1.0, server_threads=0, client_threads=8
    )
    assert use["client cpu"] == pytest.approx(2.5e-3)
