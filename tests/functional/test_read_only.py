"""Accounts that Swift's ``read_only`` protects are read, and not written."""

import json
from contextlib import closing

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
from hapi_client.swift.cache_admin import CacheAdminClient
from hapi_protocol.errors import HapiError
from jobs import connected
from local_rows import received_rows
from networks import small_parts
from photos import jpegs, shard
from read_only import make_read_only, with_read_only
from second_swift import ASKED, put_model, second_swift
from waiting import until

OWNER = "AUTH_test"
DATA = f"/{OWNER}/archive"
IMAGES = ["0.jpg", "1.jpg"]


@pytest.fixture(scope="module")
def archive(cluster):
    """OWNER's account is read-only; features of 0.tar are kept."""
    with (
        second_swift(cluster, swift_options=with_read_only()) as running,
        closing(Caller(running)) as owner,
    ):
        put_model(owner, small_parts().frozen)
        owner.put(DATA)
        for number, name in enumerate(("0", "other", "more")):
            owner.put(f"{DATA}/{name}.tar", shard(2, seed=number))
        images = jpegs(len(IMAGES), size=90, seed=4)
        for name, (data, _) in zip(IMAGES, images, strict=True):
            owner.put(f"{DATA}/{name}", data)
        keep(owner, OWNER, f"{DATA}/0.tar")
        make_read_only(running, OWNER, owner)
        yield running


@pytest.fixture
def owner(archive):
    with closing(Caller(archive)) as caller:
        yield caller


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "COPY"])
def test_annotation_does_not_help_a_write(owner, method):
    headers = {**ASKED, "Destination": "archive/copy.tar"}
    answer = owner.request(method, f"{DATA}/0.tar", headers, b"")
    assert answer.status_code == 405
    assert owner.get(f"{DATA}/copy.tar").status_code == 404


def test_shards_and_many_objects_are_computed(owner):
    check_features(owner, DATA, IMAGES)


def test_features_are_found_and_no_more_are_kept(archive, owner):
    before = files_of_entries(archive)
    assert state(owner.get(f"{DATA}/0.tar", KEEP)) == "hit"
    assert state(owner.get(f"{DATA}/other.tar", KEEP)) == "store"
    # Once it was refused, it is not tried again for a while.
    until(lambda: state(owner.get(f"{DATA}/more.tar", KEEP)) == "miss")
    assert files_of_entries(archive) == before
    assert sources(owner, OWNER) == ["archive/0.tar"]


def test_purge_is_refused_once(archive, owner):
    answer = owner.request("DELETE", f"/{OWNER}?hapi-cache")
    assert answer.status_code == 405
    assert answer.json()["code"] == "method_not_allowed"
    with connected(archive) as connection, pytest.raises(HapiError) as caught:
        list(CacheAdminClient(connection).purge())
    assert caught.value.code == "method_not_allowed"
    assert sources(owner, OWNER) == ["archive/0.tar"]


def test_damaged_entry_is_no_hit_and_is_not_deleted(archive, owner):
    [file] = files_of_entries(archive)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x40
    file.write_bytes(content)
    answer = owner.get(f"{DATA}/0.tar", READ)
    assert state(answer) == "miss"
    assert len(received_rows(answer.content).facts) == 2
    refused = "cannot be deleted: _RefusedError('Swift answers 405"
    until(lambda: refused in archive.log("swift").read_text())


def test_other_accounts_keep_features(archive):
    account = "AUTH_test2"
    with closing(Caller(archive, "test2:tester2")) as other:
        other.put(f"/{account}/c")
        other.put(f"/{account}/c/a.tar", shard(2))
        keep(other, account, f"/{account}/c/a.tar")
        gone = other.request("DELETE", f"/{account}?hapi-cache")
    assert json.loads(gone.text) == {"deleted": 1, "marker": None}
