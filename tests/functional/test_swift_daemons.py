"""Swift's own daemons next to objects and cached features."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing

import pytest

from cached_features import (
    KEEP,
    READ,
    check_features,
    files_of_entries,
    keep,
    sources,
    state,
)
from caller import Caller
from hapi_middleware.cache.entries import CONTAINER
from jobs import connected
from networks import small_parts
from photos import jpegs, shard
from second_swift import OPEN, put_model, second_swift
from swift_daemons import order_shards, run_once
from waiting import until

OWNER = "AUTH_test"
MANY = f"/{OWNER}/many"
SHARDS = [f"{number}.tar" for number in range(6)]
IMAGES = [f"{number}.jpg" for number in range(3)]
ROWS = 2
"""Names of the shards of a container."""

Login = Callable[..., Caller]


@pytest.fixture
def login():
    with ExitStack() as stack:

        def log_in(cluster, user="test:tester"):
            return stack.enter_context(closing(Caller(cluster, user)))

        yield log_in


# --- the expirer ----------------------------------------------------------


def test_entry_that_expired_is_a_miss_and_goes_with_the_expirer(
    cluster, login
):
    options = {**OPEN, "cache_ttl_seconds": "1"}
    with second_swift(cluster, filter_options=options) as forgetful:
        owner = login(forgetful)
        put_model(owner, small_parts().frozen)
        path = f"/{OWNER}/old/a.tar"
        owner.put(f"/{OWNER}/old")
        owner.put(path, shard(2))
        keep(owner, OWNER, path)

        until(lambda: state(owner.get(path, READ)) == "miss")
        assert sources(owner, OWNER) == ["old/a.tar"]
        # By it the expirer's queue comes to be listed.
        run_once(forgetful, "container-updater")
        run_once(forgetful, "object-expirer")
        assert sources(owner, OWNER) == []
        assert files_of_entries(forgetful) == set()
        keep(owner, OWNER, path)


# --- the reaper, and the sharder ------------------------------------------


@pytest.fixture(scope="module")
def second(cluster):
    with second_swift(cluster) as running:
        with closing(Caller(running)) as owner:
            put_model(owner, small_parts().frozen)
        yield running


def test_account_that_is_deleted_takes_its_entries_with_it(second, login):
    account = "AUTH_test2"
    owner, admin = login(second, "test2:tester2"), login(second, "admin:admin")
    others = files_of_entries(second)
    owner.put(f"/{account}/c")
    owner.put(f"/{account}/c/a.tar", shard(2))
    keep(owner, account, f"/{account}/c/a.tar")
    assert len(files_of_entries(second) - others) == 1

    admin.request("DELETE", f"/{account}").raise_for_status()
    run_once(second, "account-reaper")
    assert files_of_entries(second) == others
    assert owner.get(f"/{account}/c/a.tar", KEEP).status_code == 404


@pytest.fixture(scope="module")
def sharded(second):
    """MANY, and what is kept of it, are spread over shards."""
    with closing(Caller(second)) as owner:
        owner.put(MANY)
        for number, name in enumerate(SHARDS):
            owner.put(f"{MANY}/{name}", shard(2, seed=number))
            keep(owner, OWNER, f"{MANY}/{name}")
        images = jpegs(len(IMAGES), size=90, seed=4)
        for name, (data, _) in zip(IMAGES, images, strict=True):
            owner.put(f"{MANY}/{name}", data)
    for container in ("many", CONTAINER):
        order_shards(second, OWNER, container, ROWS)
    log = run_once(second, "container-sharder", {"cleave_batch_size": "9"})
    assert log.count("DB set to sharded state") == 2
    return second


def test_objects_of_a_container_in_shards_are_computed(sharded, login):
    check_features(login(sharded), MANY, IMAGES)


def test_container_in_shards_is_listed(sharded, monkeypatch):
    monkeypatch.setattr("hapi_client.swift.account.LIST_LIMIT", ROWS)
    with connected(sharded) as connection:
        listed = [each.name for each in connection.list("many")]
        tars = [each.name for each in connection.list("many", "5.")]
    assert listed == sorted(SHARDS + IMAGES)
    assert tars == ["5.tar"]


def test_entries_in_shards_are_found_listed_and_purged(sharded, login):
    owner = login(sharded)
    for name in SHARDS:
        assert state(owner.get(f"{MANY}/{name}", READ)) == "hit"
    # By a listing the proxy learns of the shards; what is stored before is
    # listed when the object updater has come by.
    assert len(sources(owner, OWNER)) == len(SHARDS)
    owner.put(f"{MANY}/31.tar", shard(2, seed=31))
    keep(owner, OWNER, f"{MANY}/31.tar")
    present = sorted(f"many/{name}" for name in [*SHARDS, "31.tar"])

    assert sources(owner, OWNER) == present
    assert paged(owner) == present
    path = f"/{OWNER}?hapi-cache"
    gone = owner.request("DELETE", f"{path}&source=many/31.tar").json()
    assert gone == {"deleted": 1, "marker": None}
    gone = owner.request("DELETE", path).json()
    assert gone == {"deleted": len(SHARDS), "marker": None}
    assert sources(owner, OWNER) == []


def paged(owner):
    """All sources; the pages do not end where shards do."""
    found: list[str] = []
    marker: str | None = ""
    while marker is not None:
        query = f"hapi-cache&limit={ROWS + 1}&marker={marker}"
        page = owner.get(f"/{OWNER}?{query}").json()
        found += [each["source"] for each in page["listed"]]
        marker = page["marker"]
    return found
