"""Refusals of annotated requests for one object: status and code of each."""

import json

import pytest
from swift.common.swob import Response

from filter_under_test import MODEL, PACKAGE, SHARD, SOURCE, annotation, s3_env
from hapi_middleware.requests.subrequests import ObjectBody
from hapi_protocol.errors import CODES, UnavailableError, make_error
from hapi_protocol.job_messages import JobGrant


@pytest.fixture
def filter_options():
    return {"max_object_bytes": "300000", "max_package_bytes": "9000"}


def with_header(name):
    return {"headers": {**annotation(), name: "bytes=0-9"}}


def with_query(query):
    return {"headers": annotation(), "query": query}


def annotated(**changes):
    return {"headers": annotation(**changes)}


# Values of single headers: tests/unit/protocol/test_headers.py.
REFUSED_BY_HEADERS = [
    ("bad_model", {"headers": {"X-Hapi-Cut": "3"}}),
    ("bad_model", annotated(model="/a/c/%00null")),
    ("bad_annotation", annotated(model="/a/c/m\xf6dell")),
    ("bad_cut", annotated(cut=None)),
    ("unknown_encoding", annotated(encoding="float8")),
    ("unsupported_numerics", annotated(numerics="fast")),
    ("bad_range", annotated(range="bytes=0-9", samples="0-1")),
    ("bad_annotation", annotated(modle="x")),
    ("range_not_allowed", with_header("Range")),
    ("conditional_not_allowed", with_header("If-Match")),
    ("conditional_not_allowed", with_header("If-Modified-Since")),
    ("conditional_not_allowed", with_header("If-Unmodified-Since")),
    ("conditional_not_allowed", with_header("If-Range")),
    ("manifest_not_allowed", with_query("?multipart-manifest=get")),
    ("manifest_not_allowed", with_query("?format=raw&multipart-manifest=get")),
    ("manifest_not_allowed", with_query("?symlink=get")),
    ("range_not_allowed", with_query("?part-number=1")),
    ("range_not_allowed", with_query("?part-number")),
]


@pytest.mark.parametrize(("code", "sent"), REFUSED_BY_HEADERS)
def test_wrong_headers_are_refused_first(world, code, sent):
    for path in (SOURCE, "/AUTH_other/none/none"):
        answer = world.send(path=path, **sent)
        head = world.send("HEAD", path, **sent)

        assert answer.refusal == (CODES[code], code)
        assert answer.json["trans_id"] == "tx1"
        for each in (answer, head):
            assert each.status == CODES[code]
            content_type = each.headers["Content-Type"]
            assert content_type.startswith("application/json")
    assert world.swift.requests() == []
    assert world.worker.calls == []


@pytest.mark.parametrize("path", ["/AUTH_test", "/AUTH_test/data"])
def test_annotation_of_an_account_or_container_is_refused(world, path):
    answer = world.send(path=path, headers=annotation())

    assert answer.refusal == (400, "bad_annotation")


def ranged(last):
    """Headers for a range of the source's current version."""
    return lambda world: annotation(
        range=f"bytes=0-{last}",
        samples="0-1",
        if_source_etag=world.swift.objects[SOURCE].etag,
    )


def source_answers(method, respond):
    """Swift answers this method on the source in another way."""

    def prepare(world):
        world.swift.may_be_unread = True
        world.swift.objects[SOURCE].on_request = lambda request: (
            respond(request) if request.method == method else None
        )

    return prepare


def source_changes_before_get(world):
    def change(request):
        source = world.swift.objects[SOURCE]
        source.body, source.etag = SHARD + b"new", "newer"

    source_answers("GET", change)(world)


def put(path, body):
    return lambda world: world.swift.put(path, body)


def nothing(world):
    """Changes nothing."""


def no_length(request):
    return Response(request=request, app_iter=iter(()), headers={"Etag": "e"})


def missing(request):
    return Response(status=404, request=request)


@pytest.mark.parametrize(
    ("code", "headers", "prepare"),
    [
        ("object_too_large", annotation(), put(SOURCE, bytes(300_001))),
        ("package_too_large", annotation(), put(MODEL, PACKAGE * 2)),
        ("bad_range", ranged(len(SHARD)), nothing),
        ("source_changed", annotation(if_source_etag="old"), nothing),
        ("source_changed", ranged(9), source_changes_before_get),
        ("service_unavailable", annotation(), source_changes_before_get),
        (
            "unsupported_object",
            annotation(),
            source_answers("HEAD", no_length),
        ),
        ("service_unavailable", annotation(), source_answers("HEAD", missing)),
        (
            "service_unavailable",
            {**annotation(), "If-None-Match": "*"},
            source_answers("HEAD", missing),
        ),
    ],
)
def test_unsuitable_object_is_refused(world, code, headers, prepare):
    headers = headers(world) if callable(headers) else headers
    prepare(world)
    answer = world.send(headers=headers)

    assert answer.refusal == (CODES[code], code)
    assert ("Retry-After" in answer.headers) == (answer.status == 503)
    if prepare is not source_changes_before_get:
        assert world.worker.calls == []


def test_refusals_name_the_facts(world):
    unknown = world.send(headers={"X-Hapi-Modle": "x"}).json
    assert "X-Hapi-Modle" in unknown["message"]
    assert "X-Hapi-Model" in unknown["allowed"]
    old = annotation(if_source_etag="old")
    changed = world.send(headers=old).json
    assert (changed["wanted_etag"], changed["object"]) == ("old", SOURCE)
    assert world.send("HEAD", headers=old).status == 412
    world.swift.put(SOURCE, bytes(300_001))
    too_large = world.send(headers=annotation()).json
    assert too_large["max_object_bytes"] == 300_000
    assert world.worker.calls == []


def test_object_limit_applies_to_the_range(world):
    etag = world.swift.put(SOURCE, bytes(range(65, 91)) * 20_000).etag
    part = {"range": "bytes=26-51", "samples": "1-1", "if_source_etag": etag}

    assert world.send(headers=annotation(**part)).status == 200
    # The model is loaded now, so a HEAD checks the cut as well.
    assert world.send("HEAD", headers=annotation(**part)).status == 200
    wrong = annotation(cut="10", **part)
    assert world.send("HEAD", headers=wrong).status == 422


def test_object_with_more_bytes_than_announced_breaks_off():
    response = Response(app_iter=iter([b"abc", b"de", b"f"]))
    chunks = iter(ObjectBody(response.app_iter, 4, "/a/c/o"))

    assert next(chunks) == b"abc"
    with pytest.raises(UnavailableError, match="-1 bytes"):
        next(chunks)


def test_source_refused_after_the_grant_is_answered_as_swift_does(world):
    # A static large object with a segment that the caller may not read.
    source_answers(
        "GET", lambda r: Response(status=409, request=r, body=b"segment")
    )(world)
    answer = world.send(headers=annotation())

    assert (answer.status, answer.body) == (409, b"segment")


@pytest.mark.parametrize(
    ("code", "retry_after", "s3_status"),
    [
        ("cut_out_of_range", None, 400),
        ("unknown_transform", None, 400),
        ("unsupported_transform", None, 400),
        ("object_too_large", None, 400),
        ("does_not_fit", None, 400),
        ("digest_mismatch", None, 409),
        ("share_exceeded", 7, 429),
        ("internal", None, 500),
        ("queue_full", 3, 503),
        ("draining", 1, 503),
        ("too_slow", None, 503),
    ],
)
def test_refused_job_is_reported(world, code, retry_after, s3_status):
    world.worker.refuse_job = make_error(
        code, "no", retry_after=retry_after, details={"num_cuts": 4}
    )
    answer = world.send(headers=annotation())

    assert answer.refusal == (CODES[code], code)
    assert (answer.json["num_cuts"], answer.json["trans_id"]) == (4, "tx1")
    expected = str(retry_after) if retry_after else None
    assert answer.headers.get("Retry-After") == expected
    assert ("GET", f"/v1{SOURCE}", "HP") not in world.swift.requests()

    # s3api turns other statuses into errors that S3 clients retry.
    s3_answer = world.send(headers=annotation(), env=s3_env())
    assert s3_answer.refusal == (s3_status, code)


@pytest.mark.parametrize("code", ["not_found", "unauthorized", "forbidden"])
def test_refused_job_never_looks_like_missing_rights(world, code):
    world.worker.refuse_job = make_error(code, "no")

    refusal = world.send(headers=annotation()).refusal
    assert refusal == (503, "worker_unavailable")


@pytest.mark.parametrize("code", ["digest_mismatch", "package_too_large"])
def test_refused_package_is_reported_to_the_client(world, code):
    # The worker may refuse before it was sent all.
    world.swift.may_be_unread = True
    world.worker.refuse_model = make_error(code, "no")

    assert world.send(headers=annotation()).refusal == (CODES[code], code)


@pytest.mark.parametrize("num_bytes", [0, 9])
def test_worker_that_ends_during_its_answer_is_unavailable(world, num_bytes):
    assert world.send(headers=annotation()).status == 200
    world.worker.ends_after = num_bytes
    answer = world.send(headers=annotation())

    assert answer.refusal == (503, "worker_unavailable")
    assert answer.headers["Retry-After"] == "2"
    assert world.worker.calls[-1] == ("POST", "/jobs")


def test_malformed_answer_is_an_internal_error(world, monkeypatch):
    monkeypatch.setattr(JobGrant, "to_body", lambda self: b"granted")

    assert world.send(headers=annotation()).refusal == (500, "internal")


def test_uploads_end_if_the_worker_keeps_no_model(world):
    world.worker.is_forgetful = True
    answer = world.send(headers=annotation())

    assert answer.refusal == (503, "service_unavailable")
    assert world.worker.calls.count(("PUT", "/models")) <= 3


def test_unexpected_failure_is_an_internal_error(world, caplog):
    def fail(request):
        raise RuntimeError("surprise")

    world.swift.objects[SOURCE].on_request = fail
    answer = world.send(headers=annotation())

    assert answer.refusal == (500, "internal")
    assert "surprise" not in json.dumps(answer.json)
    assert "surprise" in caplog.text


def test_filter_left_of_an_unknown_authentication_names_the_mistake(world):
    world.swift.may_be_unread = True
    world.use(app=world.pipeline)
    world.auth.app = world.swift
    answer = world.send(headers=annotation(), app=world.filter)

    assert answer.refusal == (503, "service_unavailable")
    assert "right of the authentication" in answer.json["message"]
