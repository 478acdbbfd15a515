"""The filter in a real Swift, with a stub in the worker's place.

What is judged here is Swift's verdict: who may read what, by token, read
ACL or S3, and that nothing else of Swift changes where the filter stands in
the pipeline.  Temporary URLs are in test_swift_semantics.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from access_methods import Answer, s3_client, with_headers
from caller import SECONDS, Caller
from hapi_cluster import Cluster
from hapi_protocol.encodings import ENCODINGS
from hapi_protocol.headers import CONTENT_TYPE_STREAM
from stub_worker import StubWorker

OWNER, READER, STRANGER = "test:tester", "test:tester3", "test2:tester2"
ADMIN = "admin:admin"
SHARD = b"abcdefgh" * 40_000
PACKAGE = b"PK" + b"weights " * 1000
DATA, MODELS = "/AUTH_test/data", "/AUTH_test/models"
SOURCE, MODEL = f"{DATA}/s%200.tar", f"{MODELS}/net.hapi"
ASKED = {"X-Hapi-Model": MODEL, "X-Hapi-Cut": "3"}
VERSIONED = ("last-modified", "x-timestamp")


class Swift:
    """A cluster as its clients see it."""

    def __init__(self, cluster, worker=None):
        self.cluster = cluster
        self.worker = worker
        users = (OWNER, READER, STRANGER, ADMIN, None)
        self._callers = {user: Caller(cluster, user) for user in users}

    def ask(self, method, path, headers=None, *, user=OWNER, body=None):
        return self._callers[user].request(method, path, headers, body)

    def put(self, path, body=b"", headers=None):
        self._callers[OWNER].put(path, body, headers)

    def allow(self, acl, *containers):
        for container in containers:
            self.put(container, headers={"X-Container-Read": acl})


@pytest.fixture(scope="module")
def swift(tmp_path_factory):
    worker = StubWorker(str(tmp_path_factory.mktemp("stub") / "worker.sock"))
    options = {
        "worker_socket": worker.socket_path,
        "allow_unauthenticated_compute": "true",
    }
    with (
        worker.running(),
        Cluster.temporary(worker=False, filter_options=options) as cluster,
    ):
        yield Swift(cluster, worker)


@pytest.fixture
def stocked(swift):
    """A private shard and a private model."""
    swift.allow("", DATA, MODELS)
    swift.put(SOURCE, SHARD, {"X-Object-Meta-Colour": "blue"})
    swift.put(MODEL, PACKAGE)
    swift.worker.calls.clear()
    return swift


def _computed(answer):
    is_stream = answer.headers["Content-Type"] == CONTENT_TYPE_STREAM
    return answer.status_code == 200 and is_stream


def test_owner_gets_features(stocked):
    answer = stocked.ask("GET", SOURCE, ASKED)
    head = stocked.ask("HEAD", SOURCE, ASKED)

    assert answer.content == SHARD.upper()
    for each in (answer, head):
        assert _computed(each)
        for name in (
            "Content-Length",
            "Last-Modified",
            "X-Object-Meta-Colour",
        ):
            assert name not in each.headers
    assert answer.headers["Transfer-Encoding"] == "chunked"
    assert answer.headers["X-Trans-Id"].startswith("tx")
    # The HEAD computes nothing.
    job = stocked.worker.jobs[-1]
    assert job.charged_account == "AUTH_test"
    assert job.trans_id == answer.headers["X-Trans-Id"]


@pytest.mark.parametrize(
    ("user", "model", "status"),
    [
        (OWNER, f"{MODELS}/none", 404),
        *((READER, model, 403) for model in (MODEL, f"{MODELS}/none")),
        *((STRANGER, model, 403) for model in (MODEL, f"{MODELS}/none")),
        *((None, model, 401) for model in (MODEL, f"{MODELS}/none")),
    ],
)
def test_unreadable_model_has_the_status_of_its_own_get(
    stocked, user, model, status
):
    stocked.allow(f"{READER},{STRANGER},.r:*", DATA)
    plain = stocked.ask("GET", model, user=user)
    asked = {**ASKED, "X-Hapi-Model": model}
    answer = stocked.ask("GET", SOURCE, asked, user=user)

    assert answer.status_code == plain.status_code == status
    assert answer.json()["object"] == model
    assert answer.json()["object_role"] == "model"
    assert stocked.worker.calls == []


@pytest.mark.parametrize(
    ("user", "acl", "charged"),
    [
        (READER, READER, "AUTH_test"),
        (STRANGER, STRANGER, "AUTH_test2"),
        (None, ".r:*", ".unauthenticated"),
    ],
)
def test_reader_by_acl_computes_and_pays_itself(stocked, user, acl, charged):
    stocked.allow(acl, DATA, MODELS)

    assert _computed(stocked.ask("GET", SOURCE, ASKED, user=user))
    assert stocked.worker.jobs[-1].charged_account == charged


def test_symlinked_model_needs_the_right_on_its_target(stocked):
    stocked.allow(READER, "/AUTH_test/links", DATA)
    link = "/AUTH_test/links/net"
    stocked.put(link, b"", {"X-Symlink-Target": "models/net.hapi"})
    asked = {**ASKED, "X-Hapi-Model": link}

    assert stocked.ask("GET", SOURCE, asked, user=READER).status_code == 403
    assert _computed(stocked.ask("GET", SOURCE, asked))


@pytest.mark.parametrize("name", ["slo", "link", "dlo"])
def test_large_object_as_a_package_is_refused(stocked, name):
    parts = json.dumps([{"path": "/models/net.hapi"}]).encode()
    stocked.put(f"{MODELS}/slo?multipart-manifest=put", parts)
    stocked.put(f"{MODELS}/link", b"", {"X-Symlink-Target": "models/slo"})
    stocked.put(f"{MODELS}/dlo", b"", {"X-Object-Manifest": "models/net"})
    asked = {**ASKED, "X-Hapi-Model": f"{MODELS}/{name}"}
    answer = stocked.ask("GET", SOURCE, asked)

    assert answer.status_code == 422
    assert answer.json()["code"] == "package_is_manifest"


@pytest.mark.parametrize("verb", ["COPY", "PUT"])
def test_copy_with_an_annotation_copies_bytes(stocked, verb):
    copy = f"{DATA}/copy-by-{verb}"
    if verb == "COPY":
        headers = {**ASKED, "Destination": copy.removeprefix("/AUTH_test/")}
        answer = stocked.ask("COPY", SOURCE, headers)
    else:
        headers = {**ASKED, "X-Copy-From": "data/s%200.tar"}
        answer = stocked.ask("PUT", copy, headers, body=b"")

    assert answer.status_code == 201
    found = stocked.ask("GET", copy)
    assert found.content == SHARD
    assert found.headers["X-Object-Meta-Colour"] == "blue"
    assert stocked.worker.calls == []


def test_info_announces_the_filter(stocked):
    url = f"{stocked.cluster.proxy_url}/info"
    info = requests.get(url, timeout=SECONDS).json()["hapi"]

    assert (info["version"], info["profile"]) == (1, True)
    assert info["encodings"] == list(ENCODINGS)


@pytest.fixture(scope="module")
def alone():
    """Swift without the filter."""
    with Cluster.temporary(worker=False, hapi_filter=False) as cluster:
        yield Swift(cluster)


def test_deletion_of_the_cache_is_none_of_the_account_to_swift_alone(alone):
    alone.put(DATA)
    answer = alone.ask("DELETE", "/AUTH_test?hapi-cache", user=ADMIN)

    assert answer.status_code == 400
    assert "data" in alone.ask("GET", "/AUTH_test").text.split()


@pytest.mark.parametrize(
    ("method", "path", "headers", "user"),
    [
        ("GET", SOURCE, {}, OWNER),
        ("HEAD", SOURCE, {}, OWNER),
        ("GET", SOURCE, {"Range": "bytes=3-9"}, OWNER),
        ("GET", SOURCE, {"If-None-Match": "*"}, OWNER),
        ("GET", SOURCE, {}, READER),
        ("GET", SOURCE, {}, None),
        ("GET", f"{DATA}/none", {}, OWNER),
        ("OPTIONS", SOURCE, {}, None),
        ("POST", SOURCE, {"X-Object-Meta-Colour": "blue"}, OWNER),
    ],
)
def test_plain_request_is_answered_as_without_the_filter(
    stocked, alone, method, path, headers, user
):
    alone.put(DATA)
    alone.put(SOURCE, SHARD, {"X-Object-Meta-Colour": "blue"})
    told = []
    for each in (stocked, alone):
        answer = Answer.of(each.ask(method, path, headers, user=user))
        fields = {
            k: v for k, v in answer.headers.items() if k not in VERSIONED
        }
        # Swift writes a set, in any order.
        fields["allow"] = sorted(fields.get("allow", "").split(", "))
        told.append(replace(answer, headers=fields))

    assert told[0] == told[1]


def test_worker_that_is_down_costs_a_503_and_nothing_else(stocked):
    socket = Path(stocked.worker.socket_path)
    elsewhere = socket.rename(socket.with_suffix(".elsewhere"))
    try:
        answer = stocked.ask("GET", SOURCE, ASKED)
        assert stocked.ask("GET", SOURCE).content == SHARD
    finally:
        elsewhere.rename(socket)

    assert answer.status_code == 503
    assert answer.json()["code"] == "worker_unavailable"
    assert answer.json()["trans_id"] == answer.headers["X-Trans-Id"]
    assert int(answer.headers["Retry-After"]) >= 1


def test_stream_that_breaks_in_the_worker_is_no_clean_end(
    stocked, monkeypatch
):
    def answer(source):
        yield next(source)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(stocked.worker, "answer", answer)
    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        stocked.ask("GET", SOURCE, ASKED)


def test_s3_client_pays_for_itself(stocked):
    pytest.importorskip("boto3", reason="S3 clients use boto3")
    client = s3_client(stocked.cluster, OWNER)
    where = {"Bucket": "data", "Key": "s 0.tar"}
    answer = with_headers(client, ASKED, lambda: client.get_object(**where))

    assert answer["Body"].read() == SHARD.upper()
    assert stocked.worker.jobs[-1].charged_account == "AUTH_test"
