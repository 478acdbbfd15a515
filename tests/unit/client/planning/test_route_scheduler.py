"""Scheduling of spans on routes by weight."""

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


def always(route):
    return True


def raw_only(route):
    return route == "raw"


@pytest.fixture
def halves():
    return RouteScheduler({"raw": 0.5, "push": 0.5})


@given(weights=WEIGHTS, sizes=SIZES)
def test_samples_of_a_route_stay_near_its_weight(weights, sizes):
    scheduler = RouteScheduler(weights)
    scheduled: Counter[int] = Counter()

    for number, size in enumerate(sizes):
        route = scheduler.choose(size, always)
        assert route is not None
        scheduled[route] += size
        total = sum(sizes[: number + 1])
        for route, weight in weights.items():
            off = scheduled[route] - weight * total
            assert abs(off) <= len(weights) * max(sizes)


@given(weights=WEIGHTS, sizes=SIZES, data=st.data())
def test_no_route_runs_further_ahead_than_allowed_when_others_are_full(
    weights, sizes, data
):
    scheduler = RouteScheduler(weights)
    scheduled: Counter[int] = Counter()

    for size in sizes:
        free = data.draw(st.sets(st.sampled_from(sorted(weights))))
        route = scheduler.choose(size, free.__contains__)
        if route is None:
            continue
        assert route in free
        scheduled[route] += size
        total = sum(scheduled.values())
        ahead = scheduled[route] - weights[route] * total
        assert ahead <= MAX_AHEAD_SPANS * max(sizes) + 1e-6


def test_route_without_room_is_skipped_until_too_far_behind(halves):
    chosen = [halves.choose(10, raw_only) for _ in range(50)]
    assert chosen == ["raw"] * 4 + [None] * 46
    # Spans that had to wait add no deficit.
    later = [halves.choose(10, always) for _ in range(8)]
    assert later.count("push") == 6


def test_changed_weights_apply_at_once():
    scheduler = RouteScheduler({"raw": 1.0})
    for _ in range(100):
        assert scheduler.choose(8, always) == "raw"
    scheduler.change({"push": 0.75, "raw": 0.25})
    scheduled = Counter(scheduler.choose(8, always) for _ in range(40))
    assert scheduled == {"push": 30, "raw": 10}
    assert scheduler.weights == {"push": 0.75, "raw": 0.25}


@pytest.mark.parametrize(
    "weights", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": 0.6, "b": 0.6}]
)
def test_weights_that_are_no_shares_are_refused(weights):
    with pytest.raises(ValueError, match="do not sum to 1"):
        RouteScheduler(weights)


def test_avoided_route_gets_its_deficit_of_a_few_spans_later(halves):
    last = [halves.choose(8, always, {"raw"}) for _ in range(20)]
    first = [halves.choose(8, always) for _ in range(20)]
    assert last == ["push"] * 20
    assert first[:3] == ["raw"] * 3
    assert 11 <= first.count("raw") <= 13


def test_other_routes_keep_their_shares_while_one_is_avoided():
    scheduler = RouteScheduler({"a": 0.6, "b": 0.3, "c": 0.1})
    scheduled = Counter(scheduler.choose(8, always, {"c"}) for _ in range(60))
    assert scheduled["c"] == 0
    assert 35 <= scheduled["a"] <= 45
    alone = [scheduler.choose(8, "b".__eq__, {"c"}) for _ in range(40)]
    assert alone.count("b") <= 8


def test_avoided_route_is_used_only_if_there_is_no_other(halves):
    assert halves.choose(8, raw_only, {"raw"}) is None
    assert RouteScheduler({"a": 1.0}).choose(8, always, {"a"}) == "a"


SLOW_RAW = {"raw": 4.0, "push": 0.5}
SLOW_PUSH = {"raw": 0.1, "push": 3.0}


@pytest.mark.parametrize(
    ("raw_weight", "seconds", "rate", "left", "unfinished", "stragglers"),
    [
        # The others load 120 samples in the time of one raw span.
        (0.25, SLOW_RAW, 40.0, 200, {}, set()),
        (0.25, SLOW_RAW, 40.0, 100, {}, {"raw"}),
        (0.25, SLOW_RAW, 40.0, 1, {}, {"raw"}),
        # A route's own spans do not keep the others busy.
        (0.5, SLOW_PUSH, 40.0, 128, {"push": 64}, set()),
        (0.5, SLOW_PUSH, 40.0, 120, {"push": 64}, {"push"}),
        (0.5, SLOW_PUSH, 40.0, 120, {"raw": 64}, set()),
        # Nothing is known yet.
        (0.25, {}, 40.0, 1, {}, set()),
        (0.25, SLOW_RAW, 0.0, 1, {}, set()),
    ],
)
def test_routes_that_finish_after_all_others_are_stragglers(
    raw_weight, seconds, rate, left, unfinished, stragglers
):
    weights = {"raw": raw_weight, "push": 1 - raw_weight}
    late = straggling_routes(weights, seconds, rate, left, unfinished)
    assert late == stragglers


@given(weights=WEIGHTS, data=st.data())
def test_one_route_is_never_a_straggler(weights, data):
    seconds = {route: data.draw(st.floats(0.001, 100.0)) for route in weights}
    left = data.draw(st.integers(1, 1000))
    unfinished = {route: data.draw(st.integers(0, left)) for route in weights}
    rate = data.draw(st.floats(0, 1e4))
    stragglers = straggling_routes(weights, seconds, rate, left, unfinished)
    assert stragglers < set(weights)
