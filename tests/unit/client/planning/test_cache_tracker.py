"""The cached entries of a job, by listings and responses."""

import pytest

from clock import Clock
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.feature_identity import cache_key, feature_etag
from hapi_protocol.transforms import Training
from hapi_splitter.planner.cache_plan import CacheState

DEEP = (9, "float32")
EARLY = (3, "float32")


def span(shard, first, etag="e"):
    rows = tuple(
        IndexRow(first + n, f"k{first + n}", 512 * n, 512, None)
        for n in range(10)
    )
    return Span(shard, etag, rows)


FIRST, SECOND = span("a.tar", 0), span("a.tar", 10)


def entry(span, transform="eval", tag="exact"):
    etag = feature_etag(
        source_etag=span.etag,
        model_digest="digest",
        cut=9,
        transform=transform,
        encoding="float32",
        samples=span.samples,
        numerics_tag=tag,
    )
    return span.path, cache_key(etag, span.byte_range)


@pytest.fixture
def clock():
    return Clock(100.0)


def tracker_of(clock, mode="readwrite", variants=1):
    tracker = CacheTracker(mode, variants, clock=clock)
    tracker.identify("digest", "exact")
    tracker.use([DEEP, EARLY])
    return tracker


def test_listed_features_are_found(clock):
    tracker = tracker_of(clock)
    assert tracker.cached_route(FIRST, None) is None
    tracker.replace([entry(FIRST, tag="of another torch")], clock())
    assert tracker.cached_route(FIRST, None) is None
    tracker.replace([entry(FIRST)], clock())
    assert tracker.cached_route(FIRST, None) == DEEP
    for other in (
        SECOND,
        span("b.tar", 0),
        span("a.tar", 0, "new"),
        FIRST.part(0, 4),
    ):
        assert tracker.cached_route(other, None) is None
    assert tracker.cached_route(FIRST, Training(7, 0)) is None


def test_routes_in_use_are_read_the_fastest_first(clock):
    tracker = tracker_of(clock)
    for route in (EARLY, DEEP):
        tracker.record(route, FIRST, None, "store")
    assert tracker.cached_route(FIRST, None) == DEEP
    tracker.use([EARLY, DEEP])
    assert tracker.cached_route(FIRST, None) == EARLY
    tracker.use([])
    assert tracker.cached_route(FIRST, None) is None


@pytest.mark.parametrize(
    ("states", "is_cached"),
    [
        (["store"], True),
        (["hit"], True),
        (["miss"], False),
        (["off"], False),
        (["hit", "miss"], False),
        # Announced, but missing when it is read.
        (["store", "store"], False),
        (["store", "store", "hit"], True),
    ],
)
def test_responses_show_what_is_cached(clock, states, is_cached):
    tracker = tracker_of(clock)
    for state in states:
        tracker.record(DEEP, FIRST, None, state)
    assert (tracker.cached_route(FIRST, None) == DEEP) is is_cached


def test_entries_missing_in_a_listing_are_forgotten_unless_new(clock):
    tracker = tracker_of(clock)
    tracker.record(DEEP, FIRST, None, "store")
    tracker.record(DEEP, SECOND, None, "hit")
    clock.now += 1
    tracker.replace([], clock())
    assert tracker.cached_route(FIRST, None) == DEEP
    clock.now += 60
    tracker.replace([entry(SECOND)], clock())
    assert tracker.cached_route(FIRST, None) is None
    assert tracker.cached_route(SECOND, None) == DEEP


def test_page_of_a_listing_only_adds_entries(clock):
    tracker = tracker_of(clock)
    tracker.record(DEEP, FIRST, None, "hit")
    tracker.add([entry(SECOND)])
    assert tracker.cached_route(FIRST, None) == DEEP
    assert tracker.cached_route(SECOND, None) == DEEP


def test_hit_rate_is_the_listed_share_of_computed_features(clock):
    tracker = tracker_of(clock)
    spans = [span("a.tar", 10 * n) for n in range(9)]
    for listed in spans:
        tracker.record(DEEP, listed, None, "store")
    assert state_of(tracker).hit_rates == {DEEP: 1.0}
    clock.now += 60
    tracker.replace([entry(listed) for listed in spans[:4]], clock())
    assert state_of(tracker).hit_rates == {DEEP: 0.5}
    assert state_of(tracker).hit_rate == 1.0


@pytest.mark.parametrize("state", ["miss", "off"])
def test_hit_rate_is_low_if_nothing_is_stored(clock, state):
    tracker = tracker_of(clock)
    for _ in range(99):
        tracker.record(DEEP, FIRST, None, state)
    assert state_of(tracker).hit_rates == {DEEP: 0.01}


def state_of(tracker):
    state = tracker.state()
    assert state is not None
    return state


def test_plan_expects_no_new_entries_without_the_right_to_store(clock):
    reader, other = tracker_of(clock, "read"), tracker_of(clock)
    other.deny_storing()
    for tracker in (reader, other):
        tracker.record(DEEP, FIRST, None, "hit")
        assert state_of(tracker) == CacheState(0.0)
        assert tracker.cached_route(FIRST, None) == DEEP


def test_repeated_random_changes_have_entries_of_their_own(clock):
    tracker = tracker_of(clock, variants=2)
    first, second = Training(7, 0), Training(7, 1)
    tracker.replace([entry(FIRST, "train;seed=7;epoch=0")], clock())
    assert tracker.cached_route(FIRST, first) == DEEP
    assert tracker.cached_route(FIRST, second) is None
    assert state_of(tracker).period_epochs == 2


def test_random_changes_that_never_repeat_are_not_tracked(clock):
    tracker = tracker_of(clock, variants=None)
    tracker.record(DEEP, FIRST, Training(7, 0), "store")
    assert tracker.cached_route(FIRST, Training(7, 0)) is None
    assert tracker.state() is None
    # Evaluation is the same each time.
    tracker.record(DEEP, FIRST, None, "store")
    assert tracker.cached_route(FIRST, None) == DEEP


@pytest.mark.parametrize("mode", ["off", "readwrite"])
def test_nothing_is_tracked_without_a_cache_or_a_model(clock, mode):
    tracker = CacheTracker(mode, clock=clock)
    if mode == "off":
        tracker.identify("digest", "exact")
    tracker.use([DEEP])
    tracker.record(DEEP, FIRST, None, "hit")
    assert not tracker.is_active
    assert tracker.cached_route(FIRST, None) is None
    assert tracker.state() is None
