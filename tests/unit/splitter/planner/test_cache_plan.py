"""Plans for a store with a cache: more is pushed down, for later epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapi_splitter.planner.cache_plan import (
    CacheState,
    cached_sample_seconds,
    remaining_seconds,
    solve_with_cache,
)
from hapi_splitter.planner.plan import (
    Option,
    Plan,
    Problem,
    evaluate,
    if_streaming,
    solve,
)
from hapi_splitter.planner.resource_use import SERVER_DECODING, SERVING
from problems import problem_of

STREAM = Option(0, "raw", {"link": 100e3, "client cpu": 10e-3}, 0, 0)
MIDDLE = Option(
    3,
    "float32",
    {"link": 60e3, "server cpu": 4e-3, "client cpu": 5e-3},
    0,
    0,
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


def problem(
    epochs: float,
    options: Sequence[Option] = (STREAM, MIDDLE, LAST),
    link: float = 1e9,
) -> Problem:
    made = problem_of(options, {**CAPACITIES, "link": link}, last_cut=9)
    return replace(made, num_samples=1000, epochs=epochs)


def shares(plan: Plan) -> dict[int, float]:
    return {option.cut: share for option, share in plan.mix}


def test_a_cached_sample_takes_nothing_of_the_worker() -> None:
    assert cached_sample_seconds(problem(1), LAST) == pytest.approx(0.5e-3)
    assert cached_sample_seconds(problem(1, link=1e6), LAST) == pytest.approx(
        2e-3
    )


def test_swift_still_serves_a_cached_sample() -> None:
    busy = replace(LAST, work={SERVING: 7e-3, SERVER_DECODING: 13e-3})
    assert cached_sample_seconds(problem(1, (STREAM, busy)), busy) == 7e-3


DEEP = (9, "float32")
EARLY = (3, "float32")


def by_epochs(
    plan: Plan, epochs: int, hit_rate: float, cached: float
) -> float:
    """What :func:`remaining_seconds` gives, one epoch after the other."""
    steady = 1 / plan.samples_per_second
    pushed = sum(part for option, part in plan.mix if option.cut)
    total = share = 0.0
    for _ in range(epochs):
        total += share * min(cached, steady) + (1 - share) * steady
        share += (1 - share) * pushed * hit_rate
    return 1000 * total


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.integers(1, 30),
    st.floats(0.05, 1),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_remaining_time_is_that_of_epoch_after_epoch(
    epochs: int, part: float, hit_rate: float
) -> None:
    asked = problem(epochs)
    plan = evaluate(asked, [(STREAM, 1 - part), (LAST, part)], "auto")
    found = remaining_seconds(asked, plan, CacheState(hit_rate))
    assert found == pytest.approx(
        by_epochs(plan, epochs, hit_rate, 0.5e-3), rel=1e-5
    )


@pytest.mark.parametrize(
    ("epochs", "period", "seconds"),
    [
        (0.5, 1, 10.0),
        (1, 1, 20.0),
        (2, 1, 20.0 + 0.5),
        # All variants are computed before one is found.
        (4, 4, 4 * 20.0),
        (8, 4, 4 * 20.0 + 4 * 0.5),
    ],
)
def test_features_are_found_in_later_epochs_only(
    epochs: float, period: int, seconds: float
) -> None:
    asked = problem(epochs)
    plan = evaluate(asked, [(LAST, 1.0)], "auto")
    state = CacheState(period_epochs=period)
    assert remaining_seconds(asked, plan, state) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("epochs", "state"),
    [
        (1, CacheState()),
        (3, CacheState()),
        (50, CacheState(0.0)),
        (50, CacheState(hit_rates={DEEP: 0.0, EARLY: 0.0})),
        # Those of the middle come no faster than the mix.
        (50, CacheState(hit_rates={DEEP: 0.0})),
        (50, CacheState(period_epochs=50)),
    ],
    ids=str,
)
def test_the_fastest_mix_is_taken_if_the_cache_gains_nothing(
    epochs: float, state: CacheState
) -> None:
    assert solve_with_cache(problem(epochs), state) == solve(problem(epochs))


def test_many_epochs_push_what_is_cheapest_to_read_again() -> None:
    asked = problem(50)
    assert set(shares(solve(asked))) == {3, 9}
    plan = solve_with_cache(asked, CacheState())
    assert shares(plan) == {9: 1.0}
    # 20 s for the first epoch, 0.5 s for each of the others.
    found = remaining_seconds(asked, plan, CacheState())
    assert found == pytest.approx(44.5)
    assert plan.reasons[1].startswith("Pushed features are cached for later")
    assert "44.5 s" in plan.reasons[1]


def test_a_client_without_memory_for_streaming_pushes_all() -> None:
    big = replace(STREAM, client_bytes=1)
    asked = problem(50, (big, MIDDLE, LAST))
    assert shares(solve_with_cache(asked, CacheState())) == {9: 1.0}


def test_a_worker_that_is_not_there_is_not_asked() -> None:
    made = problem_of(
        (STREAM, LAST), {**CAPACITIES, "server cpu": 0.0}, last_cut=9
    )
    plan = solve_with_cache(replace(made, epochs=50), CacheState())
    assert shares(plan) == {0: 1.0}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.floats(0.1, 100), st.floats(4, 9), st.floats(0, 1), st.integers(1, 5)
)
def test_it_is_never_slower_than_the_fastest_mix_or_streaming(
    epochs: float, link: float, hit_rate: float, period: int
) -> None:
    asked = problem(epochs, link=10**link)
    state = CacheState(hit_rate, period_epochs=period)
    plan = solve_with_cache(asked, state)
    streaming = if_streaming(asked)
    assert streaming is not None
    after = remaining_seconds(asked, plan, state)
    for other in (solve(asked), streaming):
        assert after <= remaining_seconds(asked, other, state) * (1 + 1e-9)
    assert math.fsum(shares(plan).values()) == pytest.approx(1)
