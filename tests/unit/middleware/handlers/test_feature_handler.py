"""Annotated GETs and HEADs that succeed; requests that pass unchanged."""

import re
import time

import pytest
from swift.common.registry import get_swift_info
from swift.common.swob import Request, Response

from filter_under_test import MODEL, PACKAGE, SHARD, SOURCE, annotation, s3_env
from hapi_protocol.encodings import ENCODINGS
from hapi_protocol.errors import make_error
from hapi_protocol.feature_identity import feature_etag
from hapi_protocol.headers import (
    CONTENT_TYPE_STREAM,
    REQUEST_HEADERS,
    SampleRange,
)
from stub_worker import NUMERICS_TAG


def _etag(world):
    (digest,) = world.worker.digests.values()
    return feature_etag(
        source_etag=world.swift.objects[SOURCE].etag,
        model_digest=digest,
        cut=3,
        transform="eval",
        encoding="float32",
        samples=None,
        numerics_tag=NUMERICS_TAG,
    )


def test_features_stream_through_the_worker(world):
    answer = world.send(headers=annotation())

    assert (answer.status, answer.body) == (200, SHARD.upper())
    assert world.worker.sources == [SHARD]
    # The same for all answers of a worker, and without meaning.
    worker = answer.headers.pop("X-Hapi-Worker")
    assert re.fullmatch("[0-9a-f]{12}", worker)
    again = world.send(headers=annotation())
    assert again.headers["X-Hapi-Worker"] == worker
    assert answer.headers == {
        "Content-Type": CONTENT_TYPE_STREAM,
        "Cache-Control": "private, no-store",
        "Vary": ", ".join(REQUEST_HEADERS),
        "X-Hapi-Source-Etag": world.swift.objects[SOURCE].etag,
        "X-Hapi-Cache": "off",
        "Etag": _etag(world),
    }


@pytest.mark.parametrize("refusal", [None, make_error("queue_full", "no")])
def test_source_that_is_slow_to_open_gets_another_grant(world, refusal):
    world.send(headers=annotation())
    world.worker.lifetime_seconds = 0.2
    world.swift.may_be_unread = refusal is not None

    def hang(request):
        if request.method == "GET":
            time.sleep(0.3)
            world.worker.refuse_job = refusal

    world.swift.objects[SOURCE].on_request = hang
    answer = world.send(headers=annotation())

    _, first, second = world.worker.jobs[-3:]
    assert first == second
    if refusal is None:
        assert (answer.status, answer.body) == (200, SHARD.upper())
        assert answer.headers["Etag"] == _etag(world)
    else:
        assert answer.refusal == (503, "queue_full")


def test_job_names_caller_model_and_source(world):
    world.send(headers=annotation(samples="2-5", encoding="float16"))

    etag = world.swift.objects[MODEL].etag
    job = world.worker.jobs[-1]
    assert job.charged_account == "AUTH_test"
    assert (job.model.path, job.model.etag) == (MODEL, etag)
    assert job.model.length_bytes == len(PACKAGE)
    assert (job.kind, job.cut, job.encoding) == ("features", 3, "float16")
    assert job.samples == SampleRange(2, 5)
    assert (job.ranged, job.num_objects) == (False, None)
    assert job.source_name == SOURCE
    assert job.source_length_bytes == len(SHARD)
    assert job.trans_id == "tx1"
    assert set(world.worker.trans_ids) == {"tx1"}


def test_equal_encodings_have_equal_etags(world):
    tags = set()
    for encoding in ("uint8", "uint8;none"):
        answer = world.send(headers=annotation(encoding=encoding))
        tags.add(answer.headers["Etag"])
        assert world.worker.jobs[-1].encoding == "uint8"
    assert len(tags) == 1


def test_model_is_uploaded_once(world):
    for _ in range(3):
        assert world.send(headers=annotation()).status == 200

    assert world.swift.requests().count(("GET", f"/v1{MODEL}", "HP")) == 1
    assert world.worker.calls.count(("PUT", "/models")) == 1


def test_subrequests_are_marked_and_have_no_annotation(world):
    """Query and headers that select a version reach the source only."""
    selecting = {"X-Newest": "true", "X-Open-Expired": "true"}
    world.send(headers={**annotation(), **selecting}, query="?version-id=7")

    assert {source for _, _, source in world.swift.requests()} == {"HP"}
    for env in world.swift.calls:
        assert not [key for key in env if key.startswith("HTTP_X_HAPI")]
        is_source = env["PATH_INFO"] == f"/v1{SOURCE}"
        assert env["QUERY_STRING"] == ("version-id=7" if is_source else "")
        for key in ("HTTP_X_NEWEST", "HTTP_X_OPEN_EXPIRED"):
            assert (key in env) == is_source


def test_range_reads_only_the_requested_members(world):
    etag = world.swift.objects[SOURCE].etag
    part = {"range": "bytes=26-77", "samples": "7-8", "if_source_etag": etag}

    assert world.send(headers=annotation(**part)).status == 200
    assert world.worker.sources == [SHARD[26:78]]
    job = world.worker.jobs[-1]
    assert (job.ranged, job.source_length_bytes) == (True, 52)
    gets = [e for e in world.swift.calls if "HTTP_RANGE" in e]
    assert [e["HTTP_IF_MATCH"] for e in gets] == [f'"{etag}"']


def test_index_request_needs_no_model(world):
    assert world.send(headers={"X-Hapi-Index": "true"}).status == 200
    job = world.worker.jobs[-1]
    assert (job.kind, job.model, job.cut) == ("index", None, 0)
    assert f"/v1{MODEL}" not in [path for _, path, _ in world.swift.requests()]


def test_head_has_the_headers_and_computes_nothing(world):
    unknown = world.send("HEAD", headers=annotation())
    world.send(headers=annotation())
    jobs = len(world.worker.jobs)
    known = world.send("HEAD", headers=annotation())

    assert (unknown.status, known.status) == (200, 200)
    assert "etag" not in map(str.lower, unknown.headers)
    assert known.headers["ETag"] == _etag(world)
    assert known.headers["Content-Type"] == CONTENT_TYPE_STREAM
    assert "Content-Length" not in known.headers
    assert known.body == b""
    assert len(world.worker.jobs) == jobs


@pytest.mark.parametrize("form", ["{}", '"other", {}', "*"])
@pytest.mark.parametrize("is_model_known", [True, False])
def test_if_none_match_computes_nothing(world, form, is_model_known):
    etag = world.send(headers=annotation()).headers["Etag"]
    world.worker.sources.clear()
    jobs = len(world.worker.jobs)
    if not is_model_known:
        world.worker.digests.clear()

    headers = {**annotation(), "If-None-Match": form.format(etag)}
    answer = world.send(headers=headers)

    assert (answer.status, answer.body) == (304, b"")
    assert answer.headers["ETag"] == etag
    assert world.worker.sources == []
    assert (len(world.worker.jobs) == jobs) == is_model_known


def test_if_none_match_accepts_the_etag_as_s3api_writes_it(world):
    env = s3_env()
    other = {**annotation(), "If-None-Match": 'W/"0"'}
    answer = world.send(headers=other, env=env)
    assert answer.body == SHARD.upper()
    etag = answer.headers["Etag"]
    # swob's setter puts quotes around the whole value.
    s3_answer = Response(headers={"Etag": etag})
    s3_answer.etag = s3_answer.etag
    headers = {**annotation(), "If-None-Match": s3_answer.headers["Etag"]}

    assert s3_answer.headers["Etag"] != etag
    assert world.send(headers=headers, env=env).status == 304


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "POST", "DELETE"])
def test_plain_requests_pass_unchanged(world, method):
    request = world.request(method)
    passed = {}
    world.use(app=lambda env, start: passed.update(env) or [b"whatever"])

    assert world.filter(request.environ, None) == [b"whatever"]
    assert set(passed) == set(world.request(method).environ)


def test_header_that_resembles_ours_passes(world):
    headers = {"X-Http-X-Hapi-Model": MODEL}

    assert world.send(headers=headers).body == SHARD


@pytest.mark.parametrize(
    "method", ["PUT", "POST", "COPY", "DELETE", "OPTIONS"]
)
def test_other_methods_pass_without_their_annotation(world, method):
    headers = {**annotation(), "X-Copy-From": "data/shard 0.tar"}
    answer = world.send(method, headers=headers, app=world.filter, user=None)

    assert answer.status == 204
    assert world.swift.requests() == [(method, f"/v1{SOURCE}", None)]
    assert "HTTP_X_COPY_FROM" in world.swift.calls[0]
    assert not [k for k in world.swift.calls[0] if "HAPI" in k]
    assert world.worker.calls == []


@pytest.mark.parametrize(
    ("method", "path", "env"),
    [
        *(("GET", SOURCE, {"swift.source": s}) for s in ("EA", "SLO", "HP")),
        # s3api before a copy, a deletion, or a GET under s3_acl.
        ("HEAD", SOURCE, s3_env()),
        # s3api before a version is restored, and for a list of parts.
        ("GET", "/AUTH_test/data", s3_env()),
        ("HEAD", "/AUTH_test/data", s3_env()),
    ],
)
def test_requests_of_other_middleware_pass(world, method, path, env):
    answer = world.send(method, path, annotation(), env=env)
    plain = world.send(method, path, env=env)

    assert answer == plain
    assert answer.status in (200, 204)
    assert not [k for k in world.swift.calls[0] if "HAPI" in k]
    assert world.worker.calls == []


def test_other_paths_pass_without_their_annotation(world):
    seen = []
    world.use(app=lambda env, start: seen.append(env) or [b"{}"])
    request = Request.blank("/info", headers=annotation())

    assert world.filter(request.environ, None) == [b"{}"]
    assert not [k for k in seen[0] if "HAPI" in k]


def test_info_lists_the_capabilities(world):
    expected = {
        "version": 1,
        "encodings": list(ENCODINGS),
        "transforms": ["eval", "train"],
        "numerics": ["exact"],
        "max_object_bytes": 5 * 1024**3,
        "index": True,
    }
    assert expected.items() <= get_swift_info()["hapi"].items()


def test_non_ascii_names_reach_the_worker(world):
    source, model = "/AUTH_test/daté/ö ?.tar", "/AUTH_test/modèles/n€t;x"
    world.swift.put(source, SHARD)
    world.swift.put(model, PACKAGE)
    headers = annotation(model="/AUTH_test/mod%C3%A8les/n%E2%82%ACt%3Bx")

    assert world.send(path=source, headers=headers).status == 200
    job = world.worker.jobs[-1]
    assert (job.source_name, job.model.path) == (source, model)
