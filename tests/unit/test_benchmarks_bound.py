"""``benchmarks.bound``: optima that can be had by hand."""

from __future__ import annotations

import pytest
from benchmarks.bound import STREAM, Route, bound_of, rate_of

FAST = 1e9


def stream(client: float = 0.1, size: float = 100.0) -> Route:
    return Route(STREAM, 0.0, client, size)


def test_streaming_alone_is_as_fast_as_core_or_link() -> None:
    assert bound_of([stream()], FAST).samples_per_second == pytest.approx(10)
    assert bound_of([stream()], 500).samples_per_second == pytest.approx(5)
    assert bound_of([stream()], 500).speedup == pytest.approx(1)


def test_two_equal_cores_share_the_samples() -> None:
    pushed = Route("all", 0.1, 0.0, 1.0)
    found = bound_of([stream(), pushed], FAST)
    assert found.samples_per_second == pytest.approx(20)
    assert found.streaming == pytest.approx(10)
    assert found.speedup == pytest.approx(2)
    assert found.mix == pytest.approx({STREAM: 0.5, "all": 0.5})


def test_slower_storage_gets_fewer_samples() -> None:
    """10 a second there and 30 here, of which each has a quarter, or three."""
    found = bound_of([stream(1 / 30), Route("all", 0.1, 0.0, 1.0)], FAST)
    assert found.samples_per_second == pytest.approx(40)
    assert found.mix == pytest.approx({STREAM: 0.75, "all": 0.25})


def test_narrow_link_carries_what_is_left_beside_the_small_ones() -> None:
    """10 of 1 byte a second leave 90 bytes of 100, for 0.9 of an image."""
    found = bound_of([stream(), Route("all", 0.1, 0.0, 1.0)], 100.0)
    assert found.samples_per_second == pytest.approx(10.9)
    assert found.streaming == pytest.approx(1)
    assert found.mix == pytest.approx({STREAM: 0.9 / 10.9, "all": 10 / 10.9})


def test_way_that_takes_more_of_everything_is_left_out() -> None:
    worse = Route("early", 0.1, 0.1, 400.0)
    found = bound_of([stream(), worse], 1000.0)
    assert found.mix == {STREAM: 1}


def test_serving_keeps_the_storage_core_from_computing() -> None:
    """Half a second of a core for each: both ways together make two."""
    ways = [Route(STREAM, 0.5, 0.0, 1.0), Route("all", 0.5, 0.0, 1.0)]
    assert bound_of(ways, FAST).samples_per_second == pytest.approx(2)


def test_cores_that_disturb_each_other_do_less() -> None:
    """A quarter longer: two do what 2 / 1.25 would."""
    ways = [stream(), Route("all", 0.1, 0.0, 1.0)]
    found = bound_of(ways, FAST, crowding=0.25)
    assert found.samples_per_second == pytest.approx(10 * 2 / 1.25)
    assert found.streaming == pytest.approx(10)
    # Where one of them waits for the link, nothing disturbs the other.
    alone = bound_of([Route(STREAM, 0.0, 0.1, 100.0)], FAST, crowding=0.25)
    assert alone.samples_per_second == pytest.approx(10)


def test_rate_of_a_way_is_that_of_what_limits() -> None:
    way = Route("middle", 0.1, 0.2, 50.0)
    assert rate_of(way, FAST) == pytest.approx(5)
    assert rate_of(way, 100.0) == pytest.approx(2)


def test_unbounded_and_missing_ways_are_named() -> None:
    with pytest.raises(ValueError, match="all takes neither"):
        bound_of([stream(), Route("all", 0.0, 0.0, 0.0)], FAST)
    with pytest.raises(ValueError, match="no way is 'stream': all"):
        bound_of([Route("all", 0.1, 0.0, 1.0)], FAST)
