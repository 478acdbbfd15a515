"""The retry policy and the gate, with their clock injected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi_client.loading.circuit_breaker import (
    SUCCESSES_PER_STEP,
    PushdownCircuitBreaker,
    PushdownConcurrency,
)
from hapi_client.swift.retry import Backoff, is_retryable
from hapi_protocol.errors import CODES, make_error


@given(st.integers(1, 200), st.floats(0, 1, exclude_max=True))
def test_waits_grow_up_to_their_bound(failures, random):
    backoff = Backoff(first_seconds=0.5, max_seconds=8.0)
    delay = backoff.delay_seconds(failures, None, random)
    assert 0 <= delay <= min(8.0, 0.5 * 2.0 ** (failures - 1))


@given(st.floats(0, 1e6), st.floats(0, 1, exclude_max=True))
def test_retry_after_is_obeyed_with_jitter_above_it(asked, random):
    backoff = Backoff(max_retry_after_seconds=30)
    delay = backoff.delay_seconds(1, asked, random)
    assert min(asked, 30) <= delay <= min(asked, 30) * 1.25


def test_no_attempts_are_refused():
    with pytest.raises(ValueError, match="attempts is 0"):
        Backoff(attempts=0)


RETRYABLE = {
    "share_exceeded",
    "internal",
    "worker_unavailable",
    "queue_full",
    "draining",
    "service_unavailable",
    "too_slow",
    "truncated",
    "not_connected",
}


@pytest.mark.parametrize("code", sorted(CODES))
def test_only_what_may_succeed_later_is_repeated(code):
    assert is_retryable(make_error(code, "text")) == (code in RETRYABLE)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return PushdownCircuitBreaker(clock, pause_seconds=5, max_pause_seconds=12)


def test_an_open_gate_admits_all(breaker):
    assert [breaker.attempts(4) for _ in range(5)] == [4] * 5


def test_after_a_failure_spans_stream_without_trying(breaker, clock):
    breaker.failed()
    assert breaker.attempts(4) == 0
    clock.now += 4.9
    assert breaker.attempts(4) == 0


def test_a_failure_is_news_once_in_a_while(breaker, clock):
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
    assert breaker.succeeded()
    assert not breaker.succeeded()
    assert not breaker.failed()


def test_one_span_probes_after_the_pause_and_opens_the_gate(breaker, clock):
    breaker.failed()
    clock.now += 5
    assert breaker.attempts(4) == 1
    assert breaker.attempts(4) == 0
    breaker.succeeded()
    assert breaker.attempts(4) == 4
    assert breaker.attempts(4) == 4


def test_the_pause_doubles_while_probes_fail(breaker, clock):
    breaker.failed()
    pauses = []
    for _ in range(3):
        waited = 0
        while not breaker.attempts(4):
            clock.now += 1
            waited += 1
        pauses.append(waited)
        breaker.failed()
    assert pauses == [5, 10, 12]


def test_spans_that_fail_together_count_as_one_failure(breaker, clock):
    for _ in range(4):
        breaker.failed()
    clock.now += 5
    assert breaker.attempts(4)


def test_the_pause_stays_while_the_worker_only_has_no_room(breaker, clock):
    for _ in range(4):
        breaker.failed(no_room())
        clock.now += 4.9
        assert breaker.attempts(4) == 0
        clock.now += 0.1
        assert breaker.attempts(4) == 1


def test_the_pause_is_long_after_a_try_that_took_long(breaker, clock):
    breaker.failed(None, 60.0)
    clock.now += 239
    assert breaker.attempts(4) == 0
    clock.now += 1
    assert breaker.attempts(4) == 1


def test_an_abandoned_probe_leaves_the_next_one_to_others(breaker, clock):
    breaker.failed()
    clock.now += 5
    assert breaker.attempts(4) == 1
    breaker.abandoned()
    assert breaker.attempts(4) == 1


def no_room(code="share_exceeded"):
    return make_error(code, "no room")


def test_width_shrinks_with_each_refusal_and_never_to_nothing():
    width = PushdownConcurrency(4)

    limits = []
    for _ in range(5):
        width.refused(no_room())
        limits.append(width.limit)

    assert limits == [3, 2, 1, 1, 1]


def test_width_comes_back_one_by_one_after_successes():
    width = PushdownConcurrency(3)
    width.refused(no_room("queue_full"))
    width.refused(no_room("queue_full"))
    assert width.limit == 1

    for _ in range(SUCCESSES_PER_STEP):
        width.succeeded()
    assert width.limit == 2
    for _ in range(10 * SUCCESSES_PER_STEP):
        width.succeeded()
    assert width.limit == 3


def test_width_stays_when_something_else_failed():
    width = PushdownConcurrency(4)

    width.refused(make_error("worker_unavailable", "gone"))

    assert width.limit == 4
