"""The filter in a real Swift, with a stub in the worker's place.

What is judged here is Swift's verdict: who may read what, by token, read
ACL, referrer ACL, temporary URL or S3, and that nothing else of Swift
changes where the filter stands in the pipeline.
"""

from __future__ import annotations

import hmac
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pytest
import requests

from hapi_cluster import Cluster
from hapi_cluster.configs import USERS
from hapi_protocol.encodings import ENCODINGS
from hapi_protocol.headers import CONTENT_TYPE_STREAM
from stub_worker import StubWorker

OWNER, READER, STRANGER = "test:tester", "test:tester3", "test2:tester2"
SHARD = b"abcdefgh" * 40_000
PACKAGE = b"PK" + b"weights " * 1000
CHANGING = ("date", "x-trans-id", "x-openstack-request-id")
VERSIONED = ("last-modified", "x-timestamp")
TIMEOUT_SECONDS = 30


@dataclass
class Swift:
    """A cluster as its clients see it."""

    cluster: Cluster
    worker: StubWorker
    account: str = "AUTH_test"
    tokens: dict[str, str] = field(default_factory=dict)

    def ask(
        self, method, path, headers=None, *, user=OWNER, body=None, query=""
    ):
        sent = {"X-Auth-Token": self.token(user)} if user else {}
        return requests.request(
            method,
            f"{self.cluster.proxy_url}/v1/{quote(path)}{query}",
            headers={"Accept-Encoding": "identity", **sent, **(headers or {})},
            data=body,
            timeout=TIMEOUT_SECONDS,
        )

    def token(self, user):
        if user not in self.tokens:
            answer = requests.get(
                self.cluster.auth_url,
                headers={"X-Auth-User": user, "X-Auth-Key": USERS[user][0]},
                timeout=TIMEOUT_SECONDS,
            )
            self.tokens[user] = answer.headers["X-Auth-Token"]
        return self.tokens[user]

    def put(self, path, body, **headers):
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        answer = self.ask("PUT", f"{self.account}/{path}", named, body=body)
        assert answer.status_code == 201, answer.text

    def allow(self, container, acl):
        headers = {"X-Container-Read": acl}
        path = f"{self.account}/{container}"
        assert self.ask("POST", path, headers).status_code == 204

    def signed(self, path, method="GET"):
        """A temporary URL's query."""
        key = {"X-Account-Meta-Temp-Url-Key": "secret"}
        assert self.ask("POST", self.account, key).status_code == 204
        expires = int(time.time()) + 600
        text = f"{method}\n{expires}\n/v1/{path}".encode()
        found = hmac.new(b"secret", text, "sha256").hexdigest()
        return f"?temp_url_sig={found}&temp_url_expires={expires}"


@pytest.fixture(scope="module")
def swift(tmp_path_factory):
    directory: Path = tmp_path_factory.mktemp("stub")
    worker = StubWorker(str(directory / "worker.sock"))
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
    for container in ("data", "models"):
        path = f"{swift.account}/{container}"
        headers = {"X-Container-Read": ""}
        assert swift.ask("PUT", path, headers).ok
        swift.allow(container, "")
    swift.put("data/s 0.tar", SHARD, X_Object_Meta_Colour="blue")
    swift.put("models/net.hapi", PACKAGE)
    swift.worker.refuse_job = None
    swift.worker.calls.clear()
    return swift


SOURCE = "AUTH_test/data/s 0.tar"
MODEL = "AUTH_test/models/net.hapi"
ASKED = {"X-Hapi-Model": f"/{MODEL}", "X-Hapi-Cut": "3"}


def _computed(answer):
    is_stream = answer.headers["Content-Type"] == CONTENT_TYPE_STREAM
    return answer.status_code == 200 and is_stream


def _told(answer):
    headers = {
        k.lower(): v
        for k, v in answer.headers.items()
        if k.lower() not in CHANGING
    }
    return (answer.status_code, headers, answer.content)


def test_owner_gets_features(stocked):
    answer = stocked.ask("GET", SOURCE, ASKED)

    assert _computed(answer)
    assert answer.content == SHARD.upper()
    assert answer.headers["Transfer-Encoding"] == "chunked"
    assert "Content-Length" not in answer.headers
    assert "Last-Modified" not in answer.headers
    assert "X-Object-Meta-Colour" not in answer.headers
    assert answer.headers["X-Trans-Id"].startswith("tx")
    job = stocked.worker.jobs[-1]
    assert job.charged_account == "AUTH_test"
    assert job.trans_id == answer.headers["X-Trans-Id"]


def test_annotated_head_computes_nothing(stocked):
    jobs = len(stocked.worker.jobs)
    answer = stocked.ask("HEAD", SOURCE, ASKED)

    assert _computed(answer)
    assert "Content-Length" not in answer.headers
    assert len(stocked.worker.jobs) == jobs


def test_if_none_match_of_the_answer_is_304(stocked):
    etag = stocked.ask("GET", SOURCE, ASKED).headers["ETag"]
    answer = stocked.ask("GET", SOURCE, {**ASKED, "If-None-Match": etag})

    assert (answer.status_code, answer.content) == (304, b"")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("user", [OWNER, READER, STRANGER, None])
@pytest.mark.parametrize("path", [SOURCE, "AUTH_test/data/none"])
def test_unreadable_source_is_answered_as_swift_does(
    stocked, method, user, path
):
    plain = stocked.ask(method, path, user=user)
    if plain.ok:
        return
    answer = stocked.ask(method, path, ASKED, user=user)

    assert _told(answer) == _told(plain)
    assert stocked.worker.calls == []


@pytest.mark.parametrize("user", [READER, STRANGER, None])
@pytest.mark.parametrize("model", [MODEL, "AUTH_test/models/none"])
def test_unreadable_model_has_the_status_of_its_own_get(stocked, user, model):
    stocked.allow("data", f"{READER},{STRANGER},.r:*")
    plain = stocked.ask("GET", model, user=user)
    asked = {**ASKED, "X-Hapi-Model": f"/{model}"}
    answer = stocked.ask("GET", SOURCE, asked, user=user)

    assert answer.status_code == plain.status_code in (401, 403)
    assert answer.json()["object"] == f"/{model}"
    assert answer.json()["object_role"] == "model"
    assert stocked.worker.calls == []


def test_missing_model_is_404_to_its_owner(stocked):
    asked = {**ASKED, "X-Hapi-Model": "models/none"}
    answer = stocked.ask("GET", SOURCE, asked)

    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("user", "charged"), [(READER, "AUTH_test"), (STRANGER, "AUTH_test2")]
)
def test_reader_by_acl_computes_and_pays_itself(stocked, user, charged):
    stocked.allow("data", user)
    stocked.allow("models", user)

    assert _computed(stocked.ask("GET", SOURCE, ASKED, user=user))
    assert stocked.worker.jobs[-1].charged_account == charged


def test_public_objects_are_computed_for_anybody_if_allowed(stocked):
    stocked.allow("data", ".r:*")
    stocked.allow("models", ".r:*")

    assert _computed(stocked.ask("GET", SOURCE, ASKED, user=None))
    assert stocked.worker.jobs[-1].charged_account == ".unauthenticated"


def test_temporary_url_opens_no_private_model(stocked):
    query = stocked.signed(SOURCE)
    plain = stocked.ask("GET", SOURCE, user=None, query=query)
    answer = stocked.ask("GET", SOURCE, ASKED, user=None, query=query)
    inside = {**ASKED, "X-Hapi-Model": f"/{SOURCE}"}
    same = stocked.ask("GET", SOURCE, inside, user=None, query=query)

    assert plain.content == SHARD
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
    assert same.status_code == 401
    assert stocked.worker.calls == []


def test_temporary_url_computes_with_a_public_model(stocked):
    stocked.allow("models", ".r:*")
    query = stocked.signed(SOURCE)

    assert _computed(stocked.ask("GET", SOURCE, ASKED, user=None, query=query))
    assert stocked.worker.jobs[-1].charged_account == ".unauthenticated"


def test_symlinked_model_needs_the_right_on_its_target(stocked):
    stocked.ask("PUT", "AUTH_test/links")
    stocked.put("links/net", b"", X_Symlink_Target="models/net.hapi")
    stocked.allow("links", READER)
    stocked.allow("data", READER)
    asked = {**ASKED, "X-Hapi-Model": "links/net"}

    assert stocked.ask("GET", SOURCE, asked, user=READER).status_code == 403
    assert _computed(stocked.ask("GET", SOURCE, asked))


@pytest.mark.parametrize("through_link", [False, True])
def test_large_object_as_a_package_is_refused(stocked, through_link):
    parts = json.dumps([{"path": "/models/net.hapi"}]).encode()
    path = "AUTH_test/models/slo"
    query = "?multipart-manifest=put"
    assert stocked.ask("PUT", path, body=parts, query=query).ok
    if through_link:
        stocked.put("models/link", b"", X_Symlink_Target="models/slo")
    model = "models/link" if through_link else "models/slo"
    answer = stocked.ask("GET", SOURCE, {**ASKED, "X-Hapi-Model": model})

    assert answer.status_code == 422
    assert answer.json()["code"] == "package_is_manifest"


def test_dynamic_large_object_as_a_package_is_refused(stocked):
    stocked.put("models/dlo", b"", X_Object_Manifest="models/net")
    asked = {**ASKED, "X-Hapi-Model": "models/dlo"}
    answer = stocked.ask("GET", SOURCE, asked)

    assert answer.json()["code"] == "package_is_manifest"


@pytest.mark.parametrize("kind", ["slo", "dlo", "symlink", "version"])
def test_assembled_sources_are_computed_from_their_content(stocked, kind):
    path, query = f"AUTH_test/data/{kind}", ""
    if kind == "slo":
        parts = json.dumps([{"path": "/data/s 0.tar"}] * 2).encode()
        how = "?multipart-manifest=put"
        assert stocked.ask("PUT", path, body=parts, query=how).ok
    elif kind == "dlo":
        stocked.put("data/dlo", b"", X_Object_Manifest="data/s%200")
    elif kind == "symlink":
        stocked.put("data/symlink", b"", X_Symlink_Target="data/s%200.tar")
    else:
        stocked.ask("PUT", "AUTH_test/old", {"X-Versions-Enabled": "true"})
        stocked.put("old/version", SHARD)
        head = stocked.ask("HEAD", "AUTH_test/old/version")
        query = f"?version-id={head.headers['X-Object-Version-Id']}"
        stocked.put("old/version", b"newer")
        path = "AUTH_test/old/version"
    plain = stocked.ask("GET", path, query=query)
    answer = stocked.ask("GET", path, ASKED, query=query)

    assert plain.content == SHARD * (2 if kind == "slo" else 1)
    assert _computed(answer)
    assert answer.content == plain.content.upper()


@pytest.mark.parametrize("kind", ["plain", "slo"])
def test_range_reads_the_part_of_the_version_that_is_named(stocked, kind):
    path = SOURCE
    if kind == "slo":
        path = "AUTH_test/data/parts"
        parts = json.dumps([{"path": "/data/s 0.tar"}] * 2).encode()
        how = "?multipart-manifest=put"
        assert stocked.ask("PUT", path, body=parts, query=how).ok
    etag = stocked.ask("HEAD", path).headers["ETag"]
    asked = {
        **ASKED,
        "X-Hapi-Samples": "1-1",
        "X-Hapi-Range": "bytes=8-15",
        "X-Hapi-If-Source-Etag": etag,
    }

    assert stocked.ask("GET", path, asked).content == b"ABCDEFGH"
    asked["X-Hapi-If-Source-Etag"] = "other"
    assert stocked.ask("GET", path, asked).status_code == 412


def test_segments_without_right_fail_as_in_swift(stocked):
    stocked.ask("PUT", "AUTH_test/open")
    parts = json.dumps([{"path": "/data/s 0.tar"}]).encode()
    query = "?multipart-manifest=put"
    path = "AUTH_test/open/slo"
    assert stocked.ask("PUT", path, body=parts, query=query).ok
    stocked.allow("open", READER)
    stocked.allow("models", READER)
    plain = stocked.ask("GET", path, user=READER)
    answer = stocked.ask("GET", path, ASKED, user=READER)

    assert plain.status_code == answer.status_code == 409
    assert answer.content == plain.content


@pytest.mark.parametrize("verb", ["COPY", "PUT"])
def test_copy_with_an_annotation_copies_bytes(stocked, verb):
    stocked.ask("PUT", "AUTH_test/copies")
    copy = "AUTH_test/copies/c"
    if verb == "COPY":
        headers = {**ASKED, "Destination": "copies/c"}
        answer = stocked.ask("COPY", SOURCE, headers)
    else:
        headers = {**ASKED, "X-Copy-From": "data/s%200.tar"}
        answer = stocked.ask("PUT", copy, headers, body=b"")

    assert answer.status_code == 201
    found = stocked.ask("GET", copy)
    assert found.content == SHARD
    assert found.headers["X-Object-Meta-Colour"] == "blue"
    assert stocked.worker.calls == []


@pytest.mark.parametrize("path", ["AUTH_test", "AUTH_test/data"])
def test_annotated_listings_are_refused(stocked, path):
    answer = stocked.ask("GET", path, ASKED)

    assert answer.json()["code"] == "bad_annotation"


def test_info_announces_the_filter(stocked):
    info = requests.get(
        f"{stocked.cluster.proxy_url}/info", timeout=TIMEOUT_SECONDS
    ).json()

    assert info["hapi"]["version"] == 1
    assert info["hapi"]["encodings"] == list(ENCODINGS)


@pytest.fixture(scope="module")
def alone(swift):
    """Swift without the filter."""
    with Cluster.temporary(worker=False, hapi_filter=False) as cluster:
        yield Swift(cluster, swift.worker)


def test_deletion_of_the_cache_is_none_of_the_account_to_swift_alone(alone):
    alone.ask("PUT", "AUTH_test/data")
    answer = alone.ask(
        "DELETE", "AUTH_test", user="admin:admin", query="?hapi-cache"
    )

    assert answer.status_code == 400
    assert "data" in alone.ask("GET", "AUTH_test").text.split()


def test_plain_requests_are_answered_as_without_the_filter(stocked, alone):
    stocked.allow("data", "")
    alone.ask("PUT", "AUTH_test/data")
    alone.put("data/s 0.tar", SHARD, X_Object_Meta_Colour="blue")
    asked: list[tuple[str, str, dict[str, str], str | None]] = [
        ("GET", SOURCE, {}, OWNER),
        ("HEAD", SOURCE, {}, OWNER),
        ("GET", SOURCE, {"Range": "bytes=3-9"}, OWNER),
        ("GET", SOURCE, {"If-None-Match": "*"}, OWNER),
        ("GET", SOURCE, {}, READER),
        ("GET", SOURCE, {}, None),
        ("GET", "AUTH_test/data/none", {}, OWNER),
        ("OPTIONS", SOURCE, {}, None),
        ("POST", SOURCE, {"X-Object-Meta-Colour": "blue"}, OWNER),
    ]
    for method, path, headers, user in asked:
        told = [
            _told(each.ask(method, path, headers, user=user))
            for each in (stocked, alone)
        ]
        for _, fields, _ in told:
            for name in VERSIONED:
                fields.pop(name, None)
            # Swift writes a set, in any order.
            fields["allow"] = sorted(fields.get("allow", "").split(", "))
        assert told[0] == told[1], (method, path, headers, user)


def test_worker_that_is_down_costs_a_503_and_nothing_else(stocked, tmp_path):
    options = {"worker_socket": str(tmp_path / "none.sock")}
    with Cluster.temporary(worker=False, filter_options=options) as cluster:
        bare = Swift(cluster, stocked.worker)
        for container in ("data", "models"):
            bare.ask("PUT", f"AUTH_test/{container}")
        bare.put("data/s 0.tar", SHARD)
        bare.put("models/net.hapi", PACKAGE)
        answer = bare.ask("GET", SOURCE, ASKED)

        assert answer.status_code == 503
        assert answer.json()["code"] == "worker_unavailable"
        assert answer.json()["trans_id"] == answer.headers["X-Trans-Id"]
        assert int(answer.headers["Retry-After"]) >= 1
        assert bare.ask("GET", SOURCE).content == SHARD

        # Default options: those without a project do not compute.
        for container in ("data", "models"):
            bare.allow(container, ".r:*")
        refused = bare.ask("GET", SOURCE, ASKED, user=None)
        assert refused.json()["code"] == "compute_not_allowed"


def test_stream_that_breaks_in_the_worker_is_no_clean_end(
    stocked, monkeypatch
):
    def answer(source):
        yield next(source)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(stocked.worker, "answer", answer)
    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        stocked.ask("GET", SOURCE, ASKED)


def test_s3_client_computes_by_its_own_keys(stocked):
    boto3 = pytest.importorskip("boto3", reason="S3 clients use boto3")
    from botocore.config import Config
    from botocore.exceptions import ClientError

    def client(user):
        found = boto3.client(
            "s3",
            endpoint_url=stocked.cluster.proxy_url,
            aws_access_key_id=user,
            aws_secret_access_key=USERS[user][0],
            region_name="us-east-1",
            config=Config(
                s3={"addressing_style": "path"}, retries={"max_attempts": 0}
            ),
        )
        found.meta.events.register("before-sign.s3.GetObject", _annotate)
        return found

    def _annotate(request, **_):
        for name, value in ASKED.items():
            request.headers[name] = value

    answer = client(OWNER).get_object(Bucket="data", Key="s 0.tar")
    assert answer["Body"].read() == SHARD.upper()
    assert stocked.worker.jobs[-1].charged_account == "AUTH_test"
    with pytest.raises(ClientError) as caught:
        client(READER).get_object(Bucket="data", Key="s 0.tar")
    status = caught.value.response["ResponseMetadata"]["HTTPStatusCode"]
    assert status == 403
