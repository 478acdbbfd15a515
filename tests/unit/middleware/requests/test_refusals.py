"""Everything that is refused, with its status and code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from swift.common.swob import HTTPNotFound, Request, Response

from filter_under_test import (
    MODEL,
    PACKAGE,
    SHARD,
    SOURCE,
    FilterUnderTest,
    annotation,
    filter_and_worker,
    s3_env,
)
from hapi_middleware.requests.subrequests import ObjectBody
from hapi_protocol.errors import CODES, UnavailableError, make_error
from hapi_protocol.job_messages import JobGrant


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FilterUnderTest]:
    limits = {"max_object_bytes": "300000", "max_package_bytes": "9000"}
    with filter_and_worker(tmp_path, **limits) as world:
        yield world
        world.swift.assert_nothing_is_open()


BAD_ANNOTATIONS = [
    ({"X-Hapi-Cut": "3"}, "bad_model"),
    (annotation(model=""), "bad_model"),
    (annotation(model="/only/two"), "bad_model"),
    (annotation(model="lonely"), "bad_model"),
    (annotation(model="/a/c/%ff"), "bad_model"),
    (annotation(model="/a/c/%00null"), "bad_model"),
    (annotation(model="/a/c/%ed%a0%80"), "bad_model"),
    (annotation(model="/a/c/m\xf6dell"), "bad_annotation"),
    (annotation(cut=None), "bad_cut"),
    (annotation(cut="0"), "bad_cut"),
    (annotation(cut="-1"), "bad_cut"),
    (annotation(cut="three"), "bad_cut"),
    (annotation(cut="9" * 30), "bad_cut"),
    (annotation(encoding="float8"), "unknown_encoding"),
    (annotation(transform="train;seed=1"), "unknown_transform"),
    (annotation(numerics="sloppy"), "unknown_numerics"),
    (annotation(numerics="fast"), "unsupported_numerics"),
    (annotation(samples="5-2"), "bad_samples"),
    (annotation(samples="all"), "bad_samples"),
    (annotation(range="bytes=0-9", samples="0-1"), "bad_range"),
    (annotation(range="bytes=0-9", if_source_etag="e"), "bad_samples"),
    (annotation(range="bytes=-9"), "bad_range"),
    (annotation(range="0-9"), "bad_range"),
    (annotation(cache="always"), "bad_cache"),
    (annotation(index="maybe"), "bad_annotation"),
    (annotation(index="true"), "bad_annotation"),
    (annotation(modle="x"), "bad_annotation"),
    ({"X-Hapi-Modle": "x"}, "bad_annotation"),
]


@pytest.mark.parametrize(("headers", "code"), BAD_ANNOTATIONS)
@pytest.mark.parametrize("path", [SOURCE, "/AUTH_other/none/none"])
def test_bad_annotation_is_refused_before_anything_is_looked_at(
    world: FilterUnderTest, headers: dict[str, str], code: str, path: str
) -> None:
    answer = world.send(path=path, headers=headers)

    assert answer.json["code"] == code
    assert answer.status == CODES[code]
    assert answer.json["trans_id"] == "tx1"
    assert answer.headers["Content-Type"].startswith("application/json")
    assert world.swift.requests() == []
    assert world.worker.calls == []


def test_unknown_header_is_named_with_the_allowed_ones(
    world: FilterUnderTest,
) -> None:
    answer = world.send(headers={"X-Hapi-Modle": "x"})

    assert "X-Hapi-Modle" in answer.json["message"]
    assert "X-Hapi-Model" in answer.json["allowed"]


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("Range", "range_not_allowed"),
        ("If-Match", "conditional_not_allowed"),
        ("If-Modified-Since", "conditional_not_allowed"),
        ("If-Unmodified-Since", "conditional_not_allowed"),
        ("If-Range", "conditional_not_allowed"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_partial_and_conditional_requests_are_refused(
    world: FilterUnderTest, header: str, code: str, method: str
) -> None:
    headers = {**annotation(), header: "bytes=0-9"}
    answer = world.send(method, headers=headers)

    assert answer.status == 400
    if method == "GET":
        assert answer.json["code"] == code
        assert header in answer.json["message"]
    assert world.swift.requests() == []


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("?multipart-manifest=get", "manifest_not_allowed"),
        ("?format=raw&multipart-manifest=get", "manifest_not_allowed"),
        ("?symlink=get", "manifest_not_allowed"),
        ("?part-number=1", "range_not_allowed"),
        ("?part-number", "range_not_allowed"),
    ],
)
def test_queries_for_less_than_the_object_are_refused(
    world: FilterUnderTest, query: str, code: str
) -> None:
    answer = world.send(headers=annotation(), query=query)

    assert (answer.status, answer.json["code"]) == (400, code)
    assert world.swift.requests() == []


@pytest.mark.parametrize("path", ["/AUTH_test", "/AUTH_test/data"])
def test_annotation_of_accounts_and_containers_is_refused(
    world: FilterUnderTest, path: str
) -> None:
    answer = world.send(path=path, headers=annotation())

    assert (answer.status, answer.json["code"]) == (400, "bad_annotation")
    assert "object" in answer.json["message"]


def test_object_over_the_limit_is_refused(world: FilterUnderTest) -> None:
    world.swift.put(SOURCE, bytes(300_001))
    answer = world.send(headers=annotation())

    assert (answer.status, answer.json["code"]) == (413, "object_too_large")
    assert answer.json["max_object_bytes"] == 300_000
    assert world.worker.calls == []


def test_limit_is_on_the_part_that_is_read(world: FilterUnderTest) -> None:
    etag = world.swift.put(SOURCE, bytes(range(65, 91)) * 20_000).etag
    headers = annotation(
        range="bytes=26-51", samples="1-1", if_source_etag=etag
    )

    assert world.send(headers=headers).status == 200


def test_range_beyond_the_object_is_refused(world: FilterUnderTest) -> None:
    headers = annotation(
        range=f"bytes=0-{len(SHARD)}",
        samples="0-1",
        if_source_etag=world.swift.objects[SOURCE].etag,
    )
    answer = world.send(headers=headers)

    assert (answer.status, answer.json["code"]) == (400, "bad_range")
    assert str(len(SHARD)) in answer.json["message"]


def test_package_over_the_limit_is_refused(world: FilterUnderTest) -> None:
    world.swift.put(MODEL, PACKAGE * 2)
    answer = world.send(headers=annotation())

    assert (answer.status, answer.json["code"]) == (413, "package_too_large")
    assert world.worker.calls == []


def test_object_without_length_is_refused(world: FilterUnderTest) -> None:
    world.swift.objects[SOURCE].on_request = lambda request: Response(
        request=request, app_iter=iter(()), headers={"Etag": "e"}
    )
    answer = world.send(headers=annotation())

    assert (answer.status, answer.json["code"]) == (422, "unsupported_object")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_source_of_another_version_is_refused(
    world: FilterUnderTest, method: str
) -> None:
    answer = world.send(method, headers=annotation(if_source_etag="old"))

    assert answer.status == 412
    if method == "GET":
        assert answer.json["code"] == "source_changed"
        assert answer.json["wanted_etag"] == "old"
        assert answer.json["object"] == SOURCE
    assert world.worker.calls == []


def _changes_before_get(world: FilterUnderTest) -> None:
    world.swift.may_be_unread = True

    def change(request: Request) -> None:
        if request.method == "GET":
            found = world.swift.objects[SOURCE]
            found.body, found.etag = SHARD + b"new", "newer"

    world.swift.objects[SOURCE].on_request = change


def test_range_of_a_source_that_changes_meanwhile_is_refused(
    world: FilterUnderTest,
) -> None:
    headers = annotation(
        range="bytes=0-9",
        samples="0-1",
        if_source_etag=world.swift.objects[SOURCE].etag,
    )
    _changes_before_get(world)
    answer = world.send(headers=headers)

    assert (answer.status, answer.json["code"]) == (412, "source_changed")


def test_whole_source_that_changes_meanwhile_is_asked_for_again(
    world: FilterUnderTest,
) -> None:
    _changes_before_get(world)
    answer = world.send(headers=annotation())

    assert (answer.status, answer.json["code"]) == (503, "service_unavailable")
    assert "changed" in answer.json["message"]
    assert "Retry-After" in answer.headers


@pytest.mark.parametrize("headers", [{}, {"If-None-Match": "*"}])
def test_source_that_appears_meanwhile_is_not_given_raw(
    world: FilterUnderTest, headers: dict[str, str]
) -> None:
    world.swift.may_be_unread = True
    world.swift.objects[SOURCE].on_request = lambda request: (
        Response(status=404, request=request)
        if request.method == "HEAD"
        else None
    )
    answer = world.send(headers={**annotation(), **headers})

    assert (answer.status, answer.json["code"]) == (503, "service_unavailable")


def test_object_with_more_bytes_than_announced_is_cut_off() -> None:
    response = Response(app_iter=iter([b"abc", b"de", b"f"]))
    body = ObjectBody(response, 4, "/a/c/o")
    chunks = iter(body)

    assert next(chunks) == b"abc"
    with pytest.raises(UnavailableError, match="-1 bytes"):
        next(chunks)


def test_source_refused_after_the_grant_is_answered_as_swift_does(
    world: FilterUnderTest,
) -> None:
    # A static large object with a segment that the caller may not read.
    world.swift.objects[SOURCE].on_request = lambda request: (
        Response(status=409, request=request, body=b"segment")
        if request.method == "GET"
        else None
    )
    answer = world.send(headers=annotation())

    assert (answer.status, answer.body) == (409, b"segment")


@pytest.mark.parametrize(
    ("code", "retry_after"),
    [
        ("cut_out_of_range", None),
        ("unknown_transform", None),
        ("unsupported_transform", None),
        ("share_exceeded", 7),
        ("queue_full", 3),
        ("draining", 1),
        ("does_not_fit", None),
        ("too_slow", None),
        ("internal", None),
        ("digest_mismatch", None),
    ],
)
def test_refusal_of_the_job_is_passed_on(
    world: FilterUnderTest, code: str, retry_after: float | None
) -> None:
    world.worker.refuse_job = make_error(
        code, "no", retry_after=retry_after, details={"num_cuts": 4}
    )
    answer = world.send(headers=annotation())

    assert (answer.status, answer.json["code"]) == (CODES[code], code)
    assert answer.json["num_cuts"] == 4
    assert answer.json["trans_id"] == "tx1"
    wanted = str(retry_after) if retry_after else None
    assert answer.headers.get("Retry-After") == wanted
    assert ("GET", f"/v1{SOURCE}", "HP") not in world.swift.requests()


@pytest.mark.parametrize("code", ["not_found", "unauthorized", "forbidden"])
def test_refusal_of_the_job_never_looks_like_one_of_rights(
    world: FilterUnderTest, code: str
) -> None:
    world.worker.refuse_job = make_error(code, "no")
    answer = world.send(headers=annotation())

    assert (answer.status, answer.json["code"]) == (503, "worker_unavailable")


@pytest.mark.parametrize("num_bytes", [0, 9])
def test_worker_that_ends_in_the_middle_of_its_answer_is_unavailable(
    world: FilterUnderTest, num_bytes: int
) -> None:
    assert world.send(headers=annotation()).status == 200
    world.worker.ends_after = num_bytes
    answer = world.send(headers=annotation())

    assert (answer.status, answer.json["code"]) == (503, "worker_unavailable")
    assert answer.headers["Retry-After"] == "2"
    assert world.worker.calls[-1] == ("POST", "/jobs")


def test_answer_of_the_worker_that_is_no_grant_is_no_fault_of_the_request(
    world: FilterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobGrant, "to_body", lambda self: b"granted")
    answer = world.send(headers=annotation())

    assert (answer.status, answer.json["code"]) == (500, "internal")
    assert "the worker's answer on a job" in answer.json["message"]


@pytest.mark.parametrize(
    "code", ["bad_package", "digest_mismatch", "package_too_large"]
)
def test_refusal_of_the_package_is_passed_on(
    world: FilterUnderTest, code: str
) -> None:
    # The worker may refuse before it was sent all.
    world.swift.may_be_unread = True
    world.worker.refuse_model = make_error(code, "no")
    answer = world.send(headers=annotation())

    assert (answer.status, answer.json["code"]) == (CODES[code], code)


def test_worker_that_keeps_no_model_is_not_fed_for_ever(
    world: FilterUnderTest,
) -> None:
    world.worker.is_forgetful = True
    answer = world.send(headers=annotation())

    assert (answer.status, answer.json["code"]) == (503, "service_unavailable")
    assert world.worker.calls.count(("PUT", "/models")) <= 3


def test_head_knows_cuts_of_a_resident_model(world: FilterUnderTest) -> None:
    world.send(headers=annotation())

    assert world.send("HEAD", headers=annotation(cut="10")).status == 422


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("share_exceeded", 429),
        ("object_too_large", 400),
        ("does_not_fit", 400),
        ("too_slow", 503),
        ("queue_full", 503),
        ("digest_mismatch", 409),
    ],
)
def test_s3_callers_get_statuses_that_s3api_passes_on(
    world: FilterUnderTest, code: str, status: int
) -> None:
    world.worker.refuse_job = make_error(code, "no")
    answer = world.send(headers=annotation(), env=s3_env())

    assert (answer.status, answer.json["code"]) == (status, code)


def test_failure_of_the_filter_is_a_named_500(
    world: FilterUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: Request) -> Response:
        raise RuntimeError("surprise")

    world.swift.objects[SOURCE].on_request = fail
    answer = world.send(headers=annotation())

    assert (answer.status, answer.json["code"]) == (500, "internal")
    assert "surprise" not in json.dumps(answer.json)
    assert "surprise" in caplog.text


def test_filter_left_of_the_authentication_is_told_so(
    world: FilterUnderTest,
) -> None:
    """An authentication of which nothing is known at the start."""
    auth = world.pipeline
    world.filter.app = auth
    auth.app.app = world.swift
    headers = annotation()

    answer = world.send(headers=headers, app=world.filter)

    assert (answer.status, answer.json["code"]) == (503, "service_unavailable")
    assert "right of the authentication" in answer.json["message"]
    assert "401" in answer.json["message"]
    world.swift.may_be_unread = True


def test_object_that_appears_meanwhile_is_to_be_asked_for_again(
    world: FilterUnderTest,
) -> None:
    def on_request(request: Request) -> Response | None:
        is_head = request.method == "HEAD"
        return HTTPNotFound(request=request) if is_head else None

    world.swift.objects[SOURCE].on_request = on_request
    world.swift.may_be_unread = True

    answer = world.send(headers=annotation())

    assert answer.status == 503
    assert "appeared while it was being read" in answer.json["message"]
