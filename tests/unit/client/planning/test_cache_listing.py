"""Listings of the cache: their requests and failures."""

import json
import logging
from urllib.parse import parse_qs, urlsplit

import pytest

from hapi_client.planning import cache_listing as module
from hapi_client.planning.cache_listing import CacheListing
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import IndexRow, Span
from scripted_swift import Answer

INFO = Answer(200, b'{"hapi": {"version": 1, "cache": true}}')


class Tracker(CacheTracker):
    """Records the listed entries."""

    def __init__(self):
        super().__init__("readwrite")
        self.identify("digest", "exact")
        self.pages = []
        self.whole = None

    def add(self, entries):
        self.pages.append(set(entries))

    def replace(self, entries, started):
        self.whole = set(entries)


def page(marker, *names):
    listed = [
        {"source": name, "key": f"key of {name}", "bytes": 1, "stored": ""}
        for name in names
    ]
    fields = {"entries": 9, "bytes": 9, "listed": listed, "marker": marker}
    return Answer(200, json.dumps(fields).encode())


def spans(*shards):
    rows = (IndexRow(0, "k", 0, 512, None),)
    return [Span(shard, "etag", rows, "photos") for shard in shards]


ONE_SPLIT = (spans("train/a.tar"),)


@pytest.fixture
def listed(swift, connection):
    """Returns the queries of listings, except those of ``/info``."""

    def queries(tracker, *answers, splits=ONE_SPLIT, times=1):
        swift.script(*answers)
        listing = CacheListing(connection, splits, tracker)
        for _ in range(times):
            listing.read()
        paths = [urlsplit(request.path) for request in swift.requests]
        return [
            parse_qs(path.query, keep_blank_values=True)
            for path in paths
            if path.path != "/info"
        ]

    return queries


def test_all_pages_are_read_and_tracked_at_once(listed):
    tracker = Tracker()
    queries = listed(
        tracker,
        INFO,
        page("m", "photos/train/a.tar"),
        page(None, "photos/train/b.tar"),
    )
    entries = {
        (f"photos/train/{name}.tar", f"key of photos/train/{name}.tar")
        for name in "ab"
    }
    assert tracker.whole == entries
    assert tracker.pages[0] | tracker.pages[1] == entries
    assert [query["marker"] for query in queries] == [[""], ["m"]]
    assert {query["limit"][0] for query in queries} == {"10000"}


@pytest.mark.parametrize(
    ("splits", "sources"),
    [
        ([spans("train/a.tar", "train/b.tar")], ["photos/train/"]),
        ([spans("train/a.tar"), spans("val/a.tar"), []],
         ["photos/train/", "photos/val/"]),
        ([spans("x/train/a.tar", "x/test/a.tar")], ["photos/x/"]),
        ([spans("a.tar", "b/a.tar")], ["photos"]),
        ([spans("a//b.tar", "a//c.tar")], ["photos/a//"]),
    ],
)  # fmt: skip
def test_only_the_folders_of_the_data_are_listed(listed, splits, sources):
    answers = [answer for _ in sources for answer in (INFO, page(None))]
    queries = listed(Tracker(), *answers, splits=splits)
    assert [query["source"] for query in queries] == [[s] for s in sources]


@pytest.mark.parametrize("status", [401, 403])
def test_refused_listing_is_not_repeated(listed, status, caplog):
    tracker = Tracker()
    # A 401 is tried again with another token.
    refusals = [Answer(status)] * (2 if status == 401 else 1)
    queries = listed(tracker, INFO, *refusals, times=3)
    assert len(queries) == len(refusals)
    assert tracker.whole is None
    assert tracker.state().hit_rate == 0.0
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_failure_is_logged_once_and_changes_nothing(listed, caplog):
    tracker = Tracker()
    answers = [INFO, page("m", "photos/train/a.tar"), Answer(503)]
    queries = listed(tracker, *answers, INFO, Answer(503), times=2)
    # No retry: another listing follows at the next epoch.
    assert len(queries) == 3
    assert tracker.whole is None
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert [r.name for r in warnings] == [module.__name__]
    assert "cannot list the cached features of photos" in caplog.text


def test_a_listing_ends_at_its_deadline(listed, monkeypatch, caplog):
    monkeypatch.setattr(module, "LISTING_SECONDS", 0.0)
    tracker = Tracker()
    assert listed(tracker, INFO) == []
    assert tracker.whole is None
    assert "could not be listed in time" in caplog.text


@pytest.mark.parametrize("mode", ["off", "readwrite"])
def test_nothing_is_listed_without_a_cache_or_a_model(listed, mode):
    assert listed(CacheTracker(mode)) == []


def test_a_listing_is_read_in_a_thread_of_its_own(swift, connection):
    tracker = Tracker()
    swift.script(INFO, page(None, "photos/train/a.tar"))
    listing = CacheListing(connection, ONE_SPLIT, tracker)
    listing.start(CancelScope())
    listing._thread.join(20)
    assert len(tracker.whole) == 1
