"""Retry policy, circuit breaker and concurrency limit of push-down."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clock import Clock
from hapi_client.loading import circuit_breaker
from hapi_client.loading.circuit_breaker import (
    FIRST_READS,
    SUCCESSES_PER_STEP,
    PushdownCircuitBreaker,
    PushdownConcurrency,
)
from hapi_client.swift.retry import Backoff, is_outage
from hapi_protocol.errors import make_error


@given(st.integers(1, 200), st.floats(0, 1, exclude_max=True))
def test_delay_grows_to_its_bound(failures, random):
    backoff = Backoff(first_seconds=0.5, max_seconds=8.0)
    delay = backoff.delay_seconds(failures, None, random)
    assert 0 <= delay <= min(8.0, 0.5 * 2.0 ** (failures - 1))


@given(st.floats(0, 1e6), st.floats(0, 1, exclude_max=True))
def test_retry_after_is_obeyed_with_jitter_above_it(asked, random):
    backoff = Backoff(max_retry_after_seconds=30)
    delay = backoff.delay_seconds(1, asked, random)
    assert min(asked, 30) <= delay <= min(asked, 30) * 1.25


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("source_damaged", False),
        ("service_unavailable", True),
        ("not_connected", True),
        ("too_slow", True),
        ("not_found", False),
    ],
)
def test_damaged_objects_are_no_outage(code, expected):
    assert is_outage(make_error(code, "a message")) is expected


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def breaker(clock, monkeypatch):
    monkeypatch.setattr(circuit_breaker, "MAX_PAUSE_SECONDS", 12.0)
    return PushdownCircuitBreaker(clock)


def no_capacity(code="share_exceeded"):
    return make_error(code, "no room")


def test_failure_opens_the_breaker_until_a_probe_succeeds(breaker, clock):
    assert [breaker.attempts(4) for _ in range(5)] == [4] * 5
    breaker.failed()
    assert breaker.attempts(4) == 0
    clock.now += 4.9
    assert breaker.attempts(4) == 0
    clock.now += 0.1
    assert [breaker.attempts(4) for _ in range(3)] == [1, 0, 0]
    breaker.succeeded()
    assert [breaker.attempts(4) for _ in range(2)] == [4, 4]


def test_failures_are_logged_once_in_a_while(breaker, clock):
    assert breaker.failed()
    assert [breaker.failed() for _ in range(5)] == [False] * 5
    for _ in range(4):
        clock.now += 60
        assert breaker.attempts(4)
        assert not breaker.failed()
    clock.now += 60
    assert breaker.attempts(4)
    assert breaker.failed()
    clock.now += 60
    assert breaker.attempts(4)
    assert [breaker.succeeded(), breaker.succeeded()] == [True, False]
    assert not breaker.failed()


@pytest.mark.parametrize(
    ("num_failures", "error", "seconds", "pauses"),
    [
        (1, None, 0.0, [5, 10, 12, 12]),
        # Spans that fail together count as one failure.
        (4, None, 0.0, [5, 10, 12, 12]),
        # The worker answers, but has no capacity.
        (1, no_capacity(), 0.0, [5, 5, 5, 5]),
        # A probe of a worker that hangs costs a minute.
        (1, None, 60.0, [240, 240]),
    ],
)
def test_pause_grows_while_probes_fail(
    breaker, clock, num_failures, error, seconds, pauses
):
    waits = []
    for _ in pauses:
        for _ in range(num_failures):
            breaker.failed(error, seconds)
        started = clock.now
        while not breaker.attempts(4):
            clock.now += 1
        waits.append(clock.now - started)
    assert waits == pauses


def test_abandoned_probe_is_left_to_another_span(breaker, clock):
    breaker.failed()
    clock.now += 5
    assert breaker.attempts(4) == 1
    breaker.abandoned()
    assert breaker.attempts(4) == 1


def test_limit_falls_with_each_refusal_and_rises_with_successes():
    concurrency = PushdownConcurrency(3)
    assert concurrency.limit == FIRST_READS
    concurrency.succeeded()
    assert concurrency.limit == 3
    limits = []
    for code in ("share_exceeded", "queue_full", "queue_full"):
        concurrency.refused(no_capacity(code))
        limits.append(concurrency.limit)
    assert limits == [2, 1, 1]
    fresh = PushdownConcurrency(3)
    fresh.refused(no_capacity("queue_full"))
    assert fresh.limit == 1
    for _ in range(SUCCESSES_PER_STEP):
        concurrency.succeeded()
    assert concurrency.limit == 2
    for _ in range(10 * SUCCESSES_PER_STEP):
        concurrency.succeeded()
    assert concurrency.limit == 3
    concurrency.refused(make_error("worker_unavailable", "gone"))
    assert concurrency.limit == 3
