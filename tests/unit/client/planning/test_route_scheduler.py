"""Spans dealt to ways by weight."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi_client.planning.route_scheduler import (
    MAX_AHEAD_SPANS,
    RouteScheduler,
    straggling_routes,
)

WEIGHTS = st.lists(st.floats(0.02, 1.0), min_size=1, max_size=5).map(
    lambda parts: {n: p / sum(parts) for n, p in enumerate(parts)}
)
SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=200)


def always(route: object) -> bool:
    return True


@given(weights=WEIGHTS, sizes=SIZES)
def test_shares_stay_within_a_span_of_the_weights(
    weights: dict[int, float], sizes: list[int]
) -> None:
    scheduler = RouteScheduler(weights)
    dealt: Counter[int] = Counter()

    for number, size in enumerate(sizes):
        route = scheduler.choose(size, always)
        assert route is not None
        dealt[route] += size
        total = sum(sizes[: number + 1])
        for each, weight in weights.items():
            off = dealt[each] - weight * total
            assert abs(off) <= len(weights) * max(sizes)


@given(weights=WEIGHTS, sizes=SIZES, data=st.data())
def test_no_way_runs_further_ahead_than_allowed_when_others_are_full(
    weights: dict[int, float], sizes: list[int], data: st.DataObject
) -> None:
    scheduler = RouteScheduler(weights)
    dealt: Counter[int] = Counter()

    for size in sizes:
        free = data.draw(st.sets(st.sampled_from(sorted(weights))))
        route = scheduler.choose(size, free.__contains__)
        if route is None:
            continue
        assert route in free
        dealt[route] += size
        total = sum(dealt.values())
        ahead = dealt[route] - weights[route] * total
        assert ahead <= MAX_AHEAD_SPANS * max(sizes) + 1e-6


def test_way_without_room_is_passed_over_until_too_far_behind() -> None:
    scheduler = RouteScheduler({"stream": 0.5, "push": 0.5})

    chosen = [
        scheduler.choose(10, lambda route: route == "stream") for _ in range(6)
    ]

    assert chosen == ["stream"] * 4 + [None] * 2


def test_nothing_is_owed_for_what_had_to_wait() -> None:
    scheduler = RouteScheduler({"stream": 0.5, "push": 0.5})
    for _ in range(50):
        scheduler.choose(10, lambda route: route == "stream")

    chosen = [scheduler.choose(10, always) for _ in range(8)]

    assert chosen.count("push") == 6  # four to catch up, then in turn


def test_changed_weights_hold_from_then_on() -> None:
    scheduler = RouteScheduler({"stream": 1.0})
    for _ in range(100):
        assert scheduler.choose(8, always) == "stream"

    scheduler.change({"push": 0.75, "stream": 0.25})
    dealt = Counter(scheduler.choose(8, always) for _ in range(40))

    assert dealt == {"push": 30, "stream": 10}
    assert scheduler.weights == {"push": 0.75, "stream": 0.25}


@pytest.mark.parametrize(
    "weights", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": 0.6, "b": 0.6}]
)
def test_weights_that_are_no_shares_are_refused(
    weights: dict[str, float],
) -> None:
    with pytest.raises(ValueError, match="do not sum to 1"):
        RouteScheduler(weights)


def test_avoided_way_gets_nothing_and_is_owed_a_few_spans_for_it() -> None:
    scheduler = RouteScheduler({"stream": 0.5, "push": 0.5})

    last = [scheduler.choose(8, always, {"stream"}) for _ in range(20)]
    first = [scheduler.choose(8, always) for _ in range(20)]

    assert last == ["push"] * 20
    assert first[:3] == ["stream"] * 3
    assert 11 <= first.count("stream") <= 13


def test_avoided_way_is_waited_for_when_the_others_are_full() -> None:
    scheduler = RouteScheduler({"stream": 0.5, "push": 0.5})

    assert (
        scheduler.choose(8, lambda route: route == "stream", {"stream"})
        is None
    )


def test_span_is_too_late_when_all_others_come_sooner() -> None:
    weights = {"stream": 0.25, "push": 0.75}
    seconds = {"stream": 4.0, "push": 0.5}

    # The others bring 30 samples a second: 120 while one span is streamed.
    assert straggling_routes(weights, seconds, 40.0, 200, {}) == set()
    assert straggling_routes(weights, seconds, 40.0, 100, {}) == {"stream"}
    assert straggling_routes(weights, seconds, 40.0, 1, {}) == {"stream"}


def test_a_way_s_own_spans_do_not_keep_the_others_busy() -> None:
    weights = {"stream": 0.5, "push": 0.5}
    seconds = {"stream": 0.1, "push": 3.0}

    # Four spans of 16 queue there; the others bring 60 while one comes.
    assert (
        straggling_routes(weights, seconds, 40.0, 128, {"push": 64}) == set()
    )
    assert straggling_routes(weights, seconds, 40.0, 120, {"push": 64}) == {
        "push"
    }
    assert (
        straggling_routes(weights, seconds, 40.0, 120, {"stream": 64}) == set()
    )


def test_nothing_is_too_late_while_nothing_is_known() -> None:
    weights = {"stream": 0.25, "push": 0.75}

    assert straggling_routes(weights, {}, 40.0, 1, {}) == set()
    times = {"stream": 4.0, "push": 0.5}
    assert straggling_routes(weights, times, 0.0, 1, {}) == set()


@given(weights=WEIGHTS, data=st.data())
def test_one_way_always_stays(
    weights: dict[int, float], data: st.DataObject
) -> None:
    seconds = {route: data.draw(st.floats(0.001, 100.0)) for route in weights}
    left = data.draw(st.integers(1, 1000))

    unfinished = {route: data.draw(st.integers(0, left)) for route in weights}
    rate = data.draw(st.floats(0, 1e4))

    late = straggling_routes(weights, seconds, rate, left, unfinished)

    assert late < set(weights)


def test_ways_that_are_left_keep_to_their_shares() -> None:
    scheduler = RouteScheduler({"a": 0.6, "b": 0.3, "c": 0.1})
    dealt = Counter(scheduler.choose(8, always, {"c"}) for _ in range(60))
    assert dealt["c"] == 0
    assert 35 <= dealt["a"] <= 45

    alone = [
        scheduler.choose(8, lambda route: route == "b", {"c"})
        for _ in range(40)
    ]
    assert alone.count("b") <= 8


def test_something_is_dealt_though_all_ways_are_to_be_avoided() -> None:
    scheduler = RouteScheduler({"a": 1.0})
    assert scheduler.choose(8, always, {"a"}) == "a"
