"""Full and missing disks while features are being cached."""

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from caller import Caller
from hapi_cluster import Cluster
from hapi_protocol.feature_reader import read_features
from jobs import connected, store_package
from networks import small_parts
from photos import shard
from plain_traffic import PlainTraffic, Request
from waiting import until

FULL = {"object-server.conf": {"DEFAULT": {"fallocate_reserve": "100%"}}}
"""Swift's own guard: every write is refused as if the disk were full."""
SOURCE = "/AUTH_test/full/shard.tar"
SHARD = shard(12)


@pytest.fixture
def folder():
    made = Path(tempfile.mkdtemp(prefix="hapi-full-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@contextmanager
def swift_in(folder, **settings):
    with Cluster.start(
        folder,
        die_with_parent=True,
        worker_options={"device": "cpu"},
        filter_options={"cache": "true"},
        **settings,
    ) as cluster:
        caller = Caller(cluster)
        yield cluster, caller
        caller.close()


def stored_model(cluster, folder):
    with connected(cluster) as connection:
        return store_package(connection, folder, small_parts().frozen).quoted()


def lines(cluster, text):
    return cluster.log("proxy").read_text().count(text)


def kept_features(model):
    """Headers that request features and their caching."""
    return {
        "X-Hapi-Model": model,
        "X-Hapi-Cut": "1",
        "X-Hapi-Cache": "readwrite",
    }


def assert_whole(answer):
    rows = [row for b in read_features(answer.content) for row in b.rows]
    assert [row.error for row in rows] == [None] * 12


def test_full_disk_caches_nothing_and_breaks_no_request(folder, tmp_path):
    with swift_in(folder, worker=False) as (cluster, caller):
        caller.put("/AUTH_test/full")
        caller.put(SOURCE, SHARD)
        model = stored_model(cluster, tmp_path)
    asked = kept_features(model)
    # A server reads this option only where it is a process of its own.
    full = swift_in(folder, swift_options=FULL, processes=True)
    with full as (cluster, caller):
        etag = caller.get(SOURCE).headers["ETag"]
        first = caller.get(SOURCE, asked)
        assert first.headers["X-Hapi-Cache"] == "store"
        until(lambda: lines(cluster, "cannot be stored"))
        # Swift shuns its only disk, for a second here.
        until(lambda: caller.get(SOURCE).status_code == 200)
        for _ in range(3):
            answer = caller.get(SOURCE, asked)
            assert answer.headers["X-Hapi-Cache"] == "miss"
            assert_whole(first)
            assert_whole(answer)
            found = caller.get(SOURCE)
            assert found.content == SHARD
            assert found.headers["ETag"] == etag
        assert lines(cluster, "cannot be stored") == 1
        assert caller.get("/AUTH_test?hapi-cache").json()["listed"] == []


def test_lost_disk_fails_no_request(folder, tmp_path):
    """One of four disks with three replicas fails; Swift sees 507."""
    with swift_in(folder, layout="replicated") as (cluster, caller):
        caller.put("/AUTH_test/full")
        caller.put(SOURCE, SHARD)
        model = stored_model(cluster, tmp_path)
        asked = kept_features(model)
        assert_whole(caller.get(SOURCE, {**asked, "X-Hapi-Cache": "off"}))
        disk = folder / "srv" / "d1"
        disk.rename(folder / "lost")
        parts = urlsplit(cluster.proxy_url)
        traffic = PlainTraffic(
            (str(parts.hostname), int(parts.port or 0)),
            {"X-Auth-Token": str(caller._session.headers["X-Auth-Token"])},
            [
                Request("GET", f"/v1{SOURCE}", expected=SHARD),
                Request("PUT", "/v1/AUTH_test/full/new-{}", b"plain"),
                Request("GET", "/v1/AUTH_test/full?format=json"),
            ],
        )
        with traffic:
            for samples in range(12):
                wanted = {**asked, "X-Hapi-Samples": f"0-{samples}"}
                answer = caller.get(SOURCE, wanted)
                assert answer.status_code == 200
                rows = [
                    r for b in read_features(answer.content) for r in b.rows
                ]
                assert [row.index for row in rows] == list(range(samples + 1))
            until(lambda: traffic.count >= 100)
        assert traffic.failures == []
        (folder / "lost").rename(disk)
