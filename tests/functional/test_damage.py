"""Bytes that a disk of the store has changed never become good rows."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from caller import Caller
from hapi_client.data.index import load_index, store_index
from hapi_client.data.indexing import update_index
from hapi_client.swift.swift_url import Location
from hapi_cluster import Cluster
from hapi_protocol.data_index import DataIndex
from hapi_protocol.errors import HapiError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.headers import Annotation, ModelPath
from jobs import connected, small_job, store_package, upload_shards
from networks import small_parts
from photos import shard

PLACE = Location("damage", "photos")
SHARD = "damage/photos/a.tar"
MODEL = ModelPath("AUTH_test", "damage", "net.hapi")
BROKEN_OFF = {"truncated", "not_connected", "worker_unavailable"}
"""The worker had sent its status."""
ROUTES = {
    "whole": {},
    "whole, kept": {"cache": "readwrite"},
    "range": {},
    "range, kept": {"cache": "readwrite"},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A cluster whose disk can be damaged, with a shard and a package."""
    with (
        Cluster.temporary(
            worker_options={"device": "cpu"}, filter_options={"cache": "true"}
        ) as cluster,
        connected(cluster) as connection,
    ):
        upload_shards(connection, PLACE, {"a.tar": shard(12)})
        folder = tmp_path_factory.mktemp("package")
        store_package(connection, folder, small_parts().frozen, "packages")
        caller = Caller(cluster)
        made = SimpleNamespace(
            cluster=cluster,
            connection=connection,
            caller=caller,
            shard=shard(12),
            package=(folder / "model.hapi").read_bytes(),
            span=load_index(connection, PLACE).spans()[0],
        )
        caller.put(f"/AUTH_test/damage/{MODEL.object}", made.package)
        yield made
        caller.close()


def damage(store, name, data, place):
    """Stores an object, and flips one bit of it on the disk."""
    store.caller.put(f"/AUTH_test/{name}", data)
    folder = Path(store.cluster.directory) / "srv"
    files = [
        path
        for path in folder.glob("*/objects/**/*.data")
        if path.read_bytes() == data
    ]
    file = max(files, key=lambda path: path.stat().st_mtime_ns)
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(bytes([data[place] ^ 1 << place % 8]))


def features(store, annotation):
    """Features of the shard, and the state of the cache."""
    with store.connection.get_features(
        "damage", "photos/a.tar", annotation, retry=False
    ) as body:
        batches = [batch for batch in read_features(body) if batch.rows]
        state = body.headers["X-Hapi-Cache"]
        return np.concatenate([batch.features for batch in batches]), state


def annotation_of(store, route, model=MODEL):
    span = store.span
    part = {
        "samples": span.samples,
        "byte_range": span.byte_range,
        "crc32s": span.crc32s,
        "if_source_etag": span.etag,
    }
    return Annotation(
        model, 1, **ROUTES[route], **(part if "range" in route else {})
    )


@pytest.mark.parametrize("route", ROUTES)
def test_pushed_damage_is_an_error_and_is_not_kept(store, route):
    asked = annotation_of(store, route)
    end = store.span.byte_range.last if "range" in route else len(store.shard)
    for place in random.Random(route).sample(range(end), 20):
        damage(store, SHARD, store.shard, place)
        with pytest.raises(HapiError) as caught:
            features(store, asked)
        code = caught.value.code
        assert code in {"source_damaged", *BROKEN_OFF}, (place, caught.value)
    logs = [store.cluster.log(server) for server in ("swift", "worker")]
    told = f"/AUTH_test/{SHARD} is damaged: "
    assert any(told in log.read_text() for log in logs)
    store.caller.put(f"/AUTH_test/{SHARD}", store.shard)
    actual, state = features(store, asked)
    assert state == ("store" if "kept" in route else "off")
    expected, _ = features(store, Annotation(MODEL, 1))
    count = len(store.span.rows) if "range" in route else len(expected)
    assert len(actual) == count
    np.testing.assert_array_equal(actual, expected[:count])


def streamed(store, **options):
    """Features of the shard, by a job that reads the samples themselves."""
    job = small_job(
        options.pop("data", PLACE),
        connection=store.connection,
        cut="stream",
        batch_size=4,
        **options,
    )
    with job:
        return torch.cat([batch for batch, _ in job.pipeline.loader(0)])


def test_streamed_damage_is_an_error_and_is_not_kept(store, tmp_path):
    end = store.span.byte_range.last
    for place in random.Random(1).sample(range(end), 10):
        damage(store, SHARD, store.shard, place)
        with pytest.raises(HapiError, match="is damaged") as caught:
            streamed(store, directory=tmp_path)
        assert caught.value.code == "source_damaged", place
    store.caller.put(f"/AUTH_test/{SHARD}", store.shard)
    actual = streamed(store, directory=tmp_path)
    torch.testing.assert_close(actual, streamed(store), rtol=0, atol=0)


def test_index_without_checksums_works_and_says_so(store, caplog):
    place = Location("damage", "old")
    upload_shards(store.connection, place, {"a.tar": store.shard})
    [whole] = load_index(store.connection, place).shards
    rows = tuple(replace(row, crc32=None) for row in whole.rows)
    index = DataIndex((replace(whole, rows=rows),))
    store_index(store.connection, place, index)
    assert len(streamed(store, data=place)) == 12
    assert "no checksums for 1 of 1 shards" in caplog.text
    assert f"'hapi index {place}'" in caplog.text
    assert update_index(store.connection, place).indexed == 1
    caplog.clear()
    assert load_index(store.connection, place).shards == (whole,)
    assert "checksums" not in caplog.text


def test_damaged_package_never_runs(store):
    expected, _ = features(store, Annotation(MODEL, 1))
    places = random.Random(2).sample(range(len(store.package)), 10)
    for number, place in enumerate(places):
        model = ModelPath("AUTH_test", "damage", f"net-{number}.hapi")
        damage(store, f"damage/{model.object}", store.package, place)
        with pytest.raises(HapiError) as caught:
            features(store, Annotation(model, 1))
        assert caught.value.code == "source_damaged", place
    store.caller.put(f"/AUTH_test/damage/{model.object}", store.package)
    actual, _ = features(store, Annotation(model, 1))
    np.testing.assert_array_equal(actual, expected)
