"""Bad luck around a job: the job says what it is and what helps."""

import hashlib
import io
import json
import logging

import pytest

from gateway import gateway_to
from hapi_client.data import index as index_module
from hapi_client.data.index import find_index, load_index
from hapi_client.data.indexing import update_index
from hapi_client.data.upload import upload
from hapi_client.progress import SilentReporter
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import (
    ClientError,
    ConflictError,
    HapiError,
    NotFoundError,
)
from jobs import connected, small_job, upload_shards
from photos import shard, shards_of

CONTAINER = "bad-luck"
CUTS = ("stream", "freeze", "auto")


@pytest.fixture
def place(connection, request):
    connection.put_container(CONTAINER)
    name = request.node.name.replace("[", "-").strip("]")
    return Location(CONTAINER, name)


def put_shards(connection, place, count=3):
    upload_shards(connection, place, shards_of([8] * count, size=40))


def epoch(place, connection, cut, **options):
    with small_job(place, connection=connection, cut=cut, **options) as job:
        return sum(len(labels) for _, labels in job.pipeline.loader())


@pytest.mark.parametrize("cut", CUTS)
def test_deleted_shard(connection, place, cut):
    put_shards(connection, place)
    connection.delete(CONTAINER, place.object_name("1.tar"))
    with pytest.raises(
        NotFoundError,
        match=r"1\.tar is in the index, and was deleted or has expired since "
        r"\(404\); upload it again, or run 'hapi index'",
    ):
        epoch(place, connection, cut)


@pytest.mark.parametrize(
    ("cut", "number"), [("stream", 0), ("freeze", 1), ("auto", 0)]
)
def test_replaced_segment_of_a_large_object(
    connection, place, owner, cut, number
):
    data = shard(40, size=80)
    half = len(data) // 2
    manifest = []
    for n, part in enumerate((data[:half], data[half:])):
        name = place.object_name(f"segments/{n}")
        connection.put(CONTAINER, name, io.BytesIO(part), len(part))
        manifest.append(
            {
                "path": f"/{CONTAINER}/{name}",
                "etag": hashlib.md5(part).hexdigest(),
                "size_bytes": len(part),
            }
        )
    large = place.object_name("0.tar")
    owner.put(
        f"/{connection.account}/{CONTAINER}/{large}?multipart-manifest=put",
        json.dumps(manifest).encode(),
    )
    update_index(connection, place)
    changed = place.object_name(f"segments/{number}")
    connection.put(CONTAINER, changed, io.BytesIO(b"x" * half), half)
    with pytest.raises(
        HapiError, match="or the segment was replaced or deleted; then upload"
    ):
        epoch(place, connection, cut, retry_seconds=1)


@pytest.mark.parametrize(
    "info",
    [(404, b"<h1>nginx</h1>"), (403, b"no"), (200, b"<html>"), (302, b"")],
    ids=lambda info: str(info[0]),
)
def test_info_that_a_gateway_answers(cluster, connection, place, info, caplog):
    put_shards(connection, place)
    with (
        gateway_to(cluster.proxy_url) as gateway,
        connected(cluster, auth_url=f"{gateway.url}/auth/v1.0") as through,
    ):
        gateway.info = info
        with pytest.raises(
            ClientError, match=r"ask the operator to let /info through"
        ):
            epoch(place, through, "freeze")
        with caplog.at_level(logging.WARNING):
            assert epoch(place, through, "stream") == 24
            assert epoch(place, through, "auto") == 24


def test_proxy_of_the_environment_that_is_dead(cluster, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with connected(cluster) as made, pytest.raises(ClientError) as caught:
        made.log_in()
    assert "through the proxy http://127.0.0.1:9 (http_proxy)" in str(
        caught.value
    )
    assert "add 127.0.0.1 to no_proxy" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_proxy_that_dies_later(connection, cluster, monkeypatch):
    with connected(cluster) as made:
        made.log_in()
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", "")
        with pytest.raises(ClientError, match=r"proxy http://127\.0\.0\.1:9"):
            made.head_account()


class Meanwhile(SilentReporter):
    """Does something in the middle of an upload."""

    def __init__(self, action):
        self._action = action

    def reading(self, file, description, length_bytes):
        action, self._action = self._action, lambda: None
        action()
        return file


@pytest.mark.parametrize("has_index", [False, True])
def test_later_of_two_uploads_notices_the_other(
    connection, place, tmp_path, has_index
):
    if has_index:
        put_shards(connection, place, count=1)
    mine, other = tmp_path / "mine.tar", tmp_path / "other.tar"
    mine.write_bytes(shard(4, seed=10))
    other.write_bytes(shard(4, seed=11))
    during = Meanwhile(
        lambda: upload(connection, place, [other], SilentReporter())
    )
    with pytest.raises(ConflictError, match="another upload to swift://bad-l"):
        upload(connection, place, [mine], during)
    # Nothing is lost: the remedy finds both.
    update_index(connection, place)
    names = [entry.name for entry in load_index(connection, place).shards]
    assert place.object_name("mine.tar") in names
    assert place.object_name("other.tar") in names
    # The same upload twice is no conflict.
    during = Meanwhile(
        lambda: upload(connection, place, [mine], SilentReporter())
    )
    upload(connection, place, [mine], during)


def test_uploads_that_store_their_indexes_at_once_lose_nothing(
    connection, place, tmp_path, monkeypatch
):
    """One ends between the other's last look and its write."""
    names = ("first", "second")
    paths = [tmp_path / f"{name}.tar" for name in names]
    for seed, path in enumerate(paths):
        path.write_bytes(shard(4, seed=20 + seed))
    store = index_module.store_index
    others = [lambda: upload(connection, place, paths[:1], SilentReporter())]

    def stored(*arguments):
        if others:
            others.pop()()
        store(*arguments)

    monkeypatch.setattr(index_module, "store_index", stored)
    with pytest.raises(ConflictError, match=r"stored .*first\.tar meanwhile"):
        upload(connection, place, paths[1:], SilentReporter())
    update_index(connection, place)
    assert len(load_index(connection, place).shards) == 2


def test_index_notices_an_upload(connection, place, tmp_path):
    put_shards(connection, place, count=2)
    for shard_number in range(2):
        connection.delete(CONTAINER, place.object_name(f"{shard_number}.tar"))
    late = tmp_path / "late.tar"
    late.write_bytes(shard(4, seed=12))
    connection.put(
        CONTAINER,
        place.object_name("0.tar"),
        io.BytesIO(shard(3, seed=13)),
        len(shard(3, seed=13)),
    )

    def on_shard(name):
        upload(connection, place, [late], SilentReporter())

    with pytest.raises(ConflictError, match="another 'hapi index'"):
        update_index(connection, place, on_shard)
    update_index(connection, place)
    index = find_index(connection, place)
    assert sum(len(entry.rows) for entry in index.shards) == 7
