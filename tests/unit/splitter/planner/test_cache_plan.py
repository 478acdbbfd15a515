"""Plans for a store with a feature cache."""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapi_splitter.planner.cache_plan import (
    CacheState,
    cached_sample_seconds,
    remaining_seconds,
    solve_with_cache,
)
from hapi_splitter.planner.plan import Option, evaluate, solve, streaming_plan
from hapi_splitter.planner.resource_use import SERVER_DECODING, SERVING
from problems import problem_of

STREAM = Option(0, "raw", {"link": 100e3, "client cpu": 10e-3}, 0, 0)
MIDDLE = Option(
    3, "float32", {"link": 60e3, "server cpu": 4e-3, "client cpu": 5e-3}, 0, 0
)
LAST = Option(
    9,
    "float32",
    {"link": 2e3, "server cpu": 20e-3, "client cpu": 0.5e-3},
    0,
    0,
    {SERVING: 0.1e-3, SERVER_DECODING: 19.9e-3},
)
CAPACITIES = {
    "link": 1e9,
    "server cpu": 1.0,
    "server device": 1.0,
    "client cpu": 1.0,
    "client device": 1.0,
}


def problem(epochs, options=(STREAM, MIDDLE, LAST), link=1e9):
    single = problem_of(options, {**CAPACITIES, "link": link}, last_cut=9)
    return replace(single, num_samples=1000, epochs=epochs)


def weights_of(plan):
    return {option.cut: weight for option, weight in plan.mix}


def test_cached_sample_does_not_use_the_worker():
    assert cached_sample_seconds(problem(1), LAST) == pytest.approx(0.5e-3)
    assert cached_sample_seconds(problem(1, link=1e6), LAST) == pytest.approx(
        2e-3
    )


def test_cached_sample_includes_swifts_cost():
    busy = replace(LAST, work={SERVING: 7e-3, SERVER_DECODING: 13e-3})
    assert cached_sample_seconds(problem(1, (STREAM, busy)), busy) == 7e-3


LAST_ROUTE = (9, "float32")
MIDDLE_ROUTE = (3, "float32")


def by_epochs(plan, epochs, hit_rate, cached):
    """Simulates :func:`remaining_seconds` epoch by epoch."""
    steady = 1 / plan.samples_per_second
    pushed = sum(part for option, part in plan.mix if option.cut)
    total = fraction = 0.0
    for _ in range(epochs):
        total += fraction * min(cached, steady) + (1 - fraction) * steady
        fraction += (1 - fraction) * pushed * hit_rate
    return 1000 * total


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.integers(1, 30), st.floats(0.05, 1), st.sampled_from([0.0, 0.5, 1.0])
)
def test_remaining_seconds_equal_a_simulation_by_epoch(epochs, part, hit_rate):
    case = problem(epochs)
    plan = evaluate(case, [(STREAM, 1 - part), (LAST, part)], "auto")
    expected = by_epochs(plan, epochs, hit_rate, 0.5e-3)
    seconds = remaining_seconds(case, plan, CacheState(hit_rate))
    assert seconds == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("epochs", "period", "seconds"),
    [
        (0.5, 1, 10.0),
        (1, 1, 20.0),
        (2, 1, 20.0 + 0.5),
        # All augmented variants are computed before one is cached.
        (4, 4, 4 * 20.0),
        (8, 4, 4 * 20.0 + 4 * 0.5),
    ],
)
def test_only_later_epochs_read_the_cache(epochs, period, seconds):
    case = problem(epochs)
    plan = evaluate(case, [(LAST, 1.0)], "auto")
    state = CacheState(period_epochs=period)
    assert remaining_seconds(case, plan, state) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("epochs", "state"),
    [
        (1, CacheState()),
        (3, CacheState()),
        (50, CacheState(0.0)),
        (50, CacheState(hit_rates={LAST_ROUTE: 0.0, MIDDLE_ROUTE: 0.0})),
        # The middle cut alone is not faster than the mix.
        (50, CacheState(hit_rates={LAST_ROUTE: 0.0})),
        (50, CacheState(period_epochs=50)),
    ],
    ids=str,
)
def test_fastest_mix_is_chosen_if_the_cache_gains_nothing(epochs, state):
    assert solve_with_cache(problem(epochs), state) == solve(problem(epochs))


def test_many_epochs_choose_the_cut_that_is_cheapest_to_read():
    case = problem(50)
    assert set(weights_of(solve(case))) == {3, 9}
    plan = solve_with_cache(case, CacheState())
    assert weights_of(plan) == {9: 1.0}
    # 20 s for the first epoch, 0.5 s for each of the others.
    seconds = remaining_seconds(case, plan, CacheState())
    assert seconds == pytest.approx(44.5)
    assert plan.reasons[1].startswith("Pushed features are cached for later")
    assert "44.5 s" in plan.reasons[1]


def test_client_without_memory_for_streaming_pushes_all():
    big = replace(STREAM, client_bytes=1)
    case = problem(50, (big, MIDDLE, LAST))
    assert weights_of(solve_with_cache(case, CacheState())) == {9: 1.0}


def test_missing_worker_is_not_used():
    capacities = {**CAPACITIES, "server cpu": 0.0}
    case = problem_of((STREAM, LAST), capacities, last_cut=9)
    plan = solve_with_cache(replace(case, epochs=50), CacheState())
    assert weights_of(plan) == {0: 1.0}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.floats(0.1, 100), st.floats(4, 9), st.floats(0, 1), st.integers(1, 5)
)
def test_plan_is_never_slower_than_the_fastest_mix_or_streaming(
    epochs, link, hit_rate, period
):
    case = problem(epochs, link=10**link)
    state = CacheState(hit_rate, period_epochs=period)
    with patch(
        "hapi_splitter.planner.plan.crossover_bandwidth", return_value=None
    ):
        plan, fastest = solve_with_cache(case, state), solve(case)
    streaming = streaming_plan(case)
    assert streaming is not None
    after = remaining_seconds(case, plan, state)
    for other in (fastest, streaming):
        assert after <= remaining_seconds(case, other, state) * (1 + 1e-9)
    assert math.fsum(weights_of(plan).values()) == pytest.approx(1)
