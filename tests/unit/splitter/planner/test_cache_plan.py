"""Plans where the store keeps features: more is pushed, for later epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapi_splitter.planner import cache_plan as keeping_module
from hapi_splitter.planner.cache_plan import (
    Keeping,
    gain_with_kept,
    kept_seconds,
    seconds_to_come,
    solve_keeping,
)
from hapi_splitter.planner.plan import Option, Plan, Problem, evaluate, solve
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


def test_a_kept_sample_takes_nothing_of_the_worker() -> None:
    assert kept_seconds(problem(1), LAST) == pytest.approx(0.5e-3)
    assert kept_seconds(problem(1, link=1e6), LAST) == pytest.approx(2e-3)


def test_swift_still_serves_a_kept_sample() -> None:
    busy = replace(LAST, work={SERVING: 7e-3, SERVER_DECODING: 13e-3})
    assert kept_seconds(problem(1, (STREAM, busy)), busy) == 7e-3


KEY = (9, "float32")
OTHER = (3, "float32")


def by_epochs(
    plan: Plan, epochs: int, chance: float, share: float, kept: float
) -> float:
    """What :func:`seconds_to_come` says, one epoch after the other."""
    steady = 1 / plan.samples_per_second
    pushed = sum(part for option, part in plan.mix if option.cut)
    total = 0.0
    for _ in range(epochs):
        total += share * min(kept, steady) + (1 - share) * steady
        share += (1 - share) * pushed * chance
    return 1000 * total


@pytest.fixture
def even(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is dealt takes as long among kept samples as without any."""
    monkeypatch.setattr(keeping_module, "FEW_COST", 0.0)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.integers(1, 30),
    st.floats(0.05, 1),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.floats(0, 1),
)
@pytest.mark.usefixtures("even")
def test_time_to_come_is_that_of_epoch_after_epoch(
    epochs: int, part: float, chance: float, share: float
) -> None:
    asked = problem(epochs)
    plan = evaluate(asked, [(STREAM, 1 - part), (LAST, part)], "auto")
    keeping = Keeping({KEY: share}, {KEY: share}, chance)
    assert seconds_to_come(asked, plan, keeping) == pytest.approx(
        by_epochs(plan, epochs, chance, share, 0.5e-3), rel=1e-5
    )


def test_part_of_an_epoch_finds_nothing_of_its_own() -> None:
    # Half of it is over, all of which is kept by now.
    asked = problem(0.5)
    plan = evaluate(asked, [(LAST, 1.0)], "auto")
    keeping = Keeping({KEY: 0.5}, rest=0.5)
    assert seconds_to_come(asked, plan, keeping) == pytest.approx(10.0)
    # The next epoch finds that half, and what the other one adds.
    found = seconds_to_come(problem(1.5), plan, keeping)
    assert found == pytest.approx(10.0 + 0.5)


def test_what_an_earlier_epoch_kept_is_found_in_the_rest_of_this_one() -> None:
    plan = evaluate(problem(0.5), [(LAST, 1.0)], "auto")
    keeping = Keeping({KEY: 1.0}, {KEY: 1.0}, rest=0.5)
    found = seconds_to_come(problem(0.5), plan, keeping)
    assert found == pytest.approx(0.25)


@pytest.mark.usefixtures("even")
def test_what_is_kept_elsewhere_is_read_there() -> None:
    # The mix pushes the middle; what is kept of the last cut is faster still.
    asked = problem(1)
    plan = evaluate(asked, [(MIDDLE, 1.0)], "auto")
    kept = {KEY: 0.6}
    found = seconds_to_come(asked, plan, Keeping(kept, kept))
    assert found == pytest.approx(0.4 * 5.0 + 0.6 * 0.5)
    # Where the mix is faster, kept features are left alone.
    kept = {OTHER: 0.6}
    fast = solve(asked)
    assert fast.samples_per_second > 1 / 5e-3
    found = seconds_to_come(asked, fast, Keeping(kept, kept))
    assert found == pytest.approx(1000 / fast.samples_per_second)


@pytest.mark.usefixtures("even")
def test_what_is_kept_twice_counts_once() -> None:
    plan = evaluate(problem(1), [(STREAM, 1.0)], "auto")
    kept = {KEY: 0.5, OTHER: 0.5}
    found = seconds_to_come(problem(1), plan, Keeping(kept, kept))
    assert found == pytest.approx(0.5 * 0.5 + 0.25 * 5.0 + 0.25 * 10.0)


@pytest.mark.usefixtures("even")
def test_a_plan_gains_on_what_is_not_kept() -> None:
    asked = problem(2)
    plan = evaluate(asked, [(MIDDLE, 1.0)], "auto")
    other = evaluate(asked, [(STREAM, 1.0)], "auto")
    for share in (0.0, 0.9, 1.0):
        kept = {KEY: share}
        keeping = Keeping(kept, kept, chance=0.0)
        assert gain_with_kept(asked, other, plan, keeping) == pytest.approx(
            2.0
        )


def test_a_plan_that_reads_less_is_not_worse_for_it() -> None:
    # Kept features of the middle come slower than the mix, and faster than
    # photographs: streaming reads them, the mix computes all anew.
    asked = problem(2)
    mix = solve(asked)
    streaming = evaluate(asked, [(STREAM, 1.0)], "auto")
    kept = {OTHER: 0.95, KEY: 0.05}
    keeping = Keeping(kept, kept)
    found = gain_with_kept(asked, streaming, mix, keeping)
    assert found > 1
    assert found > seconds_to_come(
        asked, streaming, keeping
    ) / seconds_to_come(asked, mix, keeping)


def test_pieces_of_spans_are_never_found() -> None:
    plan = evaluate(problem(2), [(LAST, 1.0)], "auto")
    found = seconds_to_come(problem(2), plan, Keeping(whole=0.9))
    assert found == pytest.approx(20.0 + 0.9 * 0.5 + 0.1 * 20.0)


def test_one_epoch_is_planned_as_without_a_cache() -> None:
    asked = problem(1)
    assert solve_keeping(asked, Keeping()) == solve(asked)


def test_nothing_changes_where_nothing_is_kept() -> None:
    asked = problem(50)
    assert solve_keeping(asked, Keeping(chance=0.0)) == solve(asked)


def test_many_epochs_push_what_is_least_to_read_again() -> None:
    asked = problem(50)
    assert set(shares(solve(asked))) == {3, 9}
    plan = solve_keeping(asked, Keeping())
    assert shares(plan) == {9: 1.0}
    # 20 s for the first epoch, 0.5 s for each of the others.
    found = seconds_to_come(asked, plan, Keeping())
    assert found == pytest.approx(44.5)
    assert plan.reasons[1].startswith("What is pushed is kept for later")
    assert "44.5 s" in plan.reasons[1]


def test_what_is_dealt_among_kept_samples_takes_longer() -> None:
    asked = problem(1)
    plan = solve(asked)
    half = {KEY: 0.5}
    steady = 1000 / plan.samples_per_second
    found = seconds_to_come(asked, plan, Keeping(half, half))
    assert found == pytest.approx(0.25 + 0.5 * 1.2 * steady)


def test_few_epochs_take_the_fastest_mix() -> None:
    assert solve_keeping(problem(3), Keeping()) == solve(problem(3))


def test_promises_that_are_not_kept_are_not_planned_on() -> None:
    asked = problem(50)
    keeping = Keeping(chances={KEY: 0.0, OTHER: 0.0})
    assert solve_keeping(asked, keeping) == solve(asked)
    # Those of the middle are, which come no faster than the mix.
    keeping = Keeping(chances={KEY: 0.0})
    assert solve_keeping(asked, keeping) == solve(asked)


def test_the_last_epoch_takes_the_fastest_mix_again() -> None:
    keeping = Keeping({KEY: 0.6}, {KEY: 0.6})
    assert solve_keeping(problem(1), keeping) == solve(problem(1))


def test_variants_are_all_computed_before_one_is_found() -> None:
    plan = evaluate(problem(4), [(LAST, 1.0)], "auto")
    for epochs, seconds in ((4, 80.0), (8, 80.0 + 2.0)):
        found = seconds_to_come(problem(epochs), plan, Keeping(variants=4))
        assert found == pytest.approx(seconds)
    # Three of them are kept, and the fourth is the next one.
    keeping = Keeping({KEY: 0.75}, variants=4, rest=0.25)
    for epochs, seconds in ((1, 20.0), (4, 20.0 + 1.5)):
        found = seconds_to_come(problem(epochs), plan, keeping)
        assert found == pytest.approx(seconds)


def test_a_client_without_memory_for_streaming_pushes_all() -> None:
    big = replace(STREAM, client_bytes=1)
    asked = problem(50, (big, MIDDLE, LAST))
    assert shares(solve_keeping(asked, Keeping())) == {9: 1.0}


def test_a_worker_that_is_not_there_is_not_asked() -> None:
    made = problem_of(
        (STREAM, LAST), {**CAPACITIES, "server cpu": 0.0}, last_cut=9
    )
    plan = solve_keeping(replace(made, epochs=50), Keeping())
    assert shares(plan) == {0: 1.0}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.floats(0.1, 100),
    st.floats(4, 9),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 5),
)
def test_it_is_never_later_than_the_fastest_mix(
    epochs: float, link: float, share: float, chance: float, variants: int
) -> None:
    asked = problem(epochs, link=10**link)
    kept = {OTHER: share}
    keeping = Keeping(kept, kept, chance, variants=variants)
    plan = solve_keeping(asked, keeping)
    after, before = (
        seconds_to_come(asked, each, keeping) for each in (plan, solve(asked))
    )
    assert after <= before
    assert math.fsum(shares(plan).values()) == pytest.approx(1)
