"""Requests for many objects: what is refused, read, sent and answered."""

from __future__ import annotations

import gc
import io
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import eventlet
import pytest
from swift.common.exceptions import ChunkReadTimeout
from swift.common.registry import get_swift_info
from swift.common.swob import HTTPConflict, HTTPServiceUnavailable, Request
from swift.common.utils import close_if_possible

from filter_under_test import (
    ACCOUNT,
    MODEL,
    OTHER,
    SHARD,
    SOURCE,
    Answer,
    FilterUnderTest,
    annotation,
    filter_and_worker,
)
from framed_objects import taken_apart
from hapi_middleware.concurrency import map_ahead
from hapi_middleware.requests.multi_object_reads import (
    FetchedObject,
    ObjectReader,
)
from hapi_middleware.requests.object_names import BODY_TIMEOUT_SECONDS
from hapi_protocol.errors import make_error
from hapi_protocol.headers import CONTENT_TYPE_STREAM, REQUEST_HEADERS

DATA = f"/{ACCOUNT}/data"
MODELS = f"/{ACCOUNT}/models"
READER = "test:tester3"
STRANGER = "test2:tester2"
GOOD = {f"{n}.jpg": f"content {n} ".encode() * 100 for n in range(6)}
CONCURRENCY = 3


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FilterUnderTest]:
    options = {
        "multi_concurrency": str(CONCURRENCY),
        "max_multi_object_bytes": "3000000",
        "max_multi_objects": "50",
        "worker_timeout": "5.0",
    }
    with filter_and_worker(tmp_path, **options) as world:
        for name, content in GOOD.items():
            world.swift.put(f"{DATA}/{name}", content)
        yield world
        world.swift.assert_nothing_is_open()


def ask(
    world: FilterUnderTest,
    names: list[str] | bytes,
    headers: dict[str, str] | None = None,
    *,
    path: str = DATA,
    query: str = "?hapi",
    **options: Any,
) -> Answer:
    """Asks for objects by their names, or by a body as it is."""
    body = names if isinstance(names, bytes) else body_of(names)
    if headers is None:
        headers = annotation()
    body = body or None  # a given one would hide that of "env"
    return world.send("POST", path, headers, query=query, body=body, **options)


def body_of(names: list[str]) -> bytes:
    return "\n".join(map(quote, names)).encode()


def sent(world: FilterUnderTest) -> list[tuple[dict[str, Any], bytes | None]]:
    return taken_apart(world.worker.sources[-1])


def reads(world: FilterUnderTest) -> list[str]:
    """Objects that were read, in the order of the requests."""
    return [
        path.removeprefix(f"/v1{DATA}/")
        for method, path, _ in world.swift.requests()
        if method == "GET" and path.startswith(f"/v1{DATA}/")
    ]


# --- objects that can be read ---------------------------------------------


def test_objects_are_sent_in_the_order_of_their_names(
    world: FilterUnderTest,
) -> None:
    names = ["4.jpg", "0.jpg", "5.jpg", "0.jpg", "1.jpg", "2.jpg", "3.jpg"]
    answer = ask(world, names)

    assert (answer.status, len(world.worker.sources)) == (200, 1)
    assert answer.body == world.worker.sources[0].upper()
    assert [data for _, data in sent(world)] == [GOOD[n] for n in names]
    assert [entry for entry, _ in sent(world)] == [
        {
            "index": index,
            "key": name,
            "status": 200,
            "etag": world.swift.objects[f"{DATA}/{name}"].etag,
            "error": None,
        }
        for index, name in enumerate(names)
    ]


def test_object_may_come_in_any_pieces(world: FilterUnderTest) -> None:
    """An empty one would end the worker's body."""
    pieces = [b"", b"a", b"", b"bc", b""]
    world.swift.put(f"{DATA}/x", b"abc").stream = lambda: iter(pieces)
    assert ask(world, ["x", "0.jpg"]).status == 200

    assert [data for _, data in sent(world)] == [b"abc", GOOD["0.jpg"]]


def test_job_says_how_many_objects_and_who_pays(
    world: FilterUnderTest,
) -> None:
    ask(world, ["0.jpg", "1.jpg"], annotation(encoding="uint8;zstd"))

    job = world.worker.jobs[-1]
    assert (job.num_objects, job.source_length_bytes) == (2, None)
    assert (job.cut, job.encoding, job.samples) == (3, "uint8;zstd", None)
    assert (job.source_name, job.source_etag) == (DATA, "")
    assert job.charged_account == ACCOUNT
    assert job.model is not None
    assert job.model.path == MODEL
    assert job.trans_id == "tx1"


def test_answer_has_a_streams_headers_and_no_etag(
    world: FilterUnderTest,
) -> None:
    answer = ask(world, ["0.jpg"])

    assert answer.headers == {
        "Content-Type": CONTENT_TYPE_STREAM,
        "Cache-Control": "private, no-store",
        "Vary": ", ".join(REQUEST_HEADERS),
        "X-Hapi-Cache": "off",
    }


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "ü/日.jpg",
        "new\nline",
        "per%cent",
        "what?",
        "dir/./..//x;y=1#z&w",
        "/leading",
        " ",
        "~" * 1024,
    ],
)
def test_any_name_of_an_object_can_be_asked_for(
    world: FilterUnderTest, name: str
) -> None:
    world.swift.put(f"{DATA}/{name}", b"found " + name.encode())
    answer = ask(world, ["0.jpg", name])

    assert answer.status == 200
    entry, data = sent(world)[1]
    assert (entry["key"], data) == (name, b"found " + name.encode())


def test_lines_are_stripped_and_empty_ones_passed_over(
    world: FilterUnderTest,
) -> None:
    answer = ask(world, b"\r\n\n  0.jpg \r\n\t\n1.jpg\n\n")

    assert answer.status == 200
    assert [entry["key"] for entry, _ in sent(world)] == ["0.jpg", "1.jpg"]


def test_body_may_be_chunked(world: FilterUnderTest) -> None:
    body = io.BytesIO(body_of(["1.jpg", "0.jpg"]))
    answer = ask(
        world,
        b"",
        env={"wsgi.input": body, "HTTP_TRANSFER_ENCODING": "chunked"},
    )

    assert answer.status == 200
    assert [entry["key"] for entry, _ in sent(world)] == ["1.jpg", "0.jpg"]


def test_other_paths_of_the_container_are_the_same(
    world: FilterUnderTest,
) -> None:
    assert ask(world, ["0.jpg"], path=f"{DATA}/").status == 200
    assert ask(world, ["0.jpg"], query="?%68api=").status == 200


def test_subrequests_are_plain_gets_of_the_callers_own(
    world: FilterUnderTest,
) -> None:
    extra = {"X-Newest": "true", "X-Container-Read": ".r:*"}
    ask(world, ["0.jpg", "1.jpg"], annotation() | extra)

    calls = [c for c in world.swift.calls if c["PATH_INFO"].startswith("/v1")]
    assert {c["REQUEST_METHOD"] for c in calls} <= {"GET", "HEAD"}
    assert {c.get("swift.source") for c in calls} == {"HP"}
    for call in calls:
        assert not any("HAPI" in key for key in call)
        assert call["QUERY_STRING"] == ""
        assert "HTTP_X_CONTAINER_READ" not in call
        assert "swift.authorize_override" not in call
    newest = [
        c["HTTP_X_NEWEST"] for c in calls if c["PATH_INFO"].endswith(".jpg")
    ]
    assert newest == ["true", "true"]


def test_model_that_is_missing_is_uploaded(world: FilterUnderTest) -> None:
    for _ in range(2):
        assert ask(world, ["0.jpg"]).status == 200

    assert world.worker.calls.count(("PUT", "/models")) == 1


# --- objects that cannot --------------------------------------------------


def test_objects_that_fail_are_rows_beside_the_others(
    world: FilterUnderTest,
) -> None:
    swift = world.swift
    swift.may_be_unread = True
    swift.put(f"{DATA}/long", bytes(3_000_001))
    swift.put(f"{DATA}/empty", b"")
    swift.put(f"{DATA}/busy", b"x").on_request = lambda request: (
        HTTPServiceUnavailable(request=request)
    )
    swift.put(f"{DATA}/conflict", b"x").on_request = lambda request: (
        HTTPConflict(request=request)
    )
    swift.put(f"{DATA}/short", b"12345").stream = lambda: iter([b"123"])
    swift.put(f"{DATA}/over", b"123").stream = lambda: iter([b"12345"])
    swift.put(f"{DATA}/breaks", b"12345").stream = breaking(OSError("disk"))
    swift.put(f"{DATA}/stalls", b"12345").stream = breaking(
        ChunkReadTimeout(None)
    )
    swift.put(f"{DATA}/no-etag", b"x").etag = ""
    names = ["missing", "long", "0.jpg", "empty", "busy", "conflict"]
    names += ["short", "over", "breaks", "stalls", "no-etag", "1.jpg"]

    assert ask(world, names).status == 200

    found = {
        entry["key"]: (entry["status"], (entry["error"] or "").split(":")[0])
        for entry, _ in sent(world)
    }
    assert found == {
        "missing": (404, "not_found"),
        "long": (413, "object_too_large"),
        "0.jpg": (200, ""),
        "empty": (200, ""),
        "busy": (503, "service_unavailable"),
        "conflict": (409, "unsupported_object"),
        "short": (503, "service_unavailable"),
        "over": (503, "service_unavailable"),
        "breaks": (503, "service_unavailable"),
        "stalls": (503, "service_unavailable"),
        "no-etag": (200, "unsupported_object"),
        "1.jpg": (200, ""),
    }
    with_bytes = {
        e["key"]: data for e, data in sent(world) if data is not None
    }
    assert with_bytes == {
        "0.jpg": GOOD["0.jpg"],
        "empty": b"",
        "1.jpg": GOOD["1.jpg"],
    }
    (long,) = [b for b in swift.bodies if b.what.endswith("/long")]
    assert not long.is_read


def breaking(error: BaseException) -> Callable[[], Iterator[bytes]]:
    def stream() -> Iterator[bytes]:
        yield b"12"
        raise error

    return stream


def test_request_that_cannot_be_made_is_one_objects_error(
    world: FilterUnderTest,
) -> None:
    def fail(request: Request) -> None:
        raise RuntimeError("http://10.0.0.7:6200/sdb1 is down")

    world.swift.objects[f"{DATA}/1.jpg"].on_request = fail
    assert ask(world, ["0.jpg", "1.jpg"]).status == 200

    entry, data = sent(world)[1]
    assert (entry["status"], entry["etag"], data) == (503, None, None)
    assert entry["error"].startswith("service_unavailable: ")
    assert "10.0.0.7" not in entry["error"]


def test_failed_objects_before_the_first_good_one_keep_their_places(
    world: FilterUnderTest,
) -> None:
    names = [f"none{n}" for n in range(2 * CONCURRENCY)] + ["3.jpg", "none"]
    assert ask(world, names).status == 200

    assert [entry["key"] for entry, _ in sent(world)] == names
    assert [entry["status"] for entry, _ in sent(world)] == (
        [404] * 2 * CONCURRENCY + [200, 404]
    )


@pytest.mark.parametrize("user", [READER, STRANGER, "test:tester"])
def test_where_none_can_be_read_swifts_answer_on_the_first_comes(
    world: FilterUnderTest, user: str
) -> None:
    world.swift.read_acls[MODELS] = f"{READER},{STRANGER}"
    first = "0.jpg" if user != "test:tester" else "none"
    plain = world.send(path=f"{DATA}/{first}", user=user)
    headers = annotation()
    answer = ask(world, [first, "none", "other"], headers, user=user)

    assert plain.status == (404 if first == "none" else 403)
    assert (answer.status, answer.body) == (plain.status, plain.body)
    assert answer.headers == plain.headers
    assert world.worker.calls == []


def test_none_that_can_be_read_now_is_503(world: FilterUnderTest) -> None:
    world.swift.may_be_unread = True
    world.swift.objects[f"{DATA}/0.jpg"].stream = breaking(OSError("disk"))
    answer = ask(world, ["0.jpg"])

    assert answer.refusal == (503, "service_unavailable")
    assert answer.headers["Retry-After"] == "1"
    assert world.worker.calls == []


# --- rights ---------------------------------------------------------------


def test_reader_by_acl_pays_itself(world: FilterUnderTest) -> None:
    world.swift.read_acls.update({DATA: STRANGER, MODELS: STRANGER})
    answer = ask(world, ["0.jpg", "none"], user=STRANGER)

    assert answer.status == 200
    assert world.worker.jobs[-1].charged_account == OTHER
    # As its own GET: without listing rights all is forbidden or there.
    plain = world.send(path=f"{DATA}/none", user=STRANGER)
    assert sent(world)[1][0]["status"] == plain.status


def test_rights_are_asked_for_each_object(world: FilterUnderTest) -> None:
    """As Swift does, at the moment of the GET."""
    world.swift.read_acls.update({DATA: READER, MODELS: READER})

    def take_back(request: Request) -> None:
        world.swift.read_acls[DATA] = ""

    world.swift.objects[f"{DATA}/0.jpg"].on_request = take_back
    names = [f"{n}.jpg" for n in range(6)]
    assert ask(world, names, user=READER).status == 200

    statuses = [entry["status"] for entry, _ in sent(world)]
    assert statuses[0] == 200
    assert statuses[-1] == 403
    assert sent(world)[-1][0]["error"].startswith("forbidden: ")


def test_model_is_asked_for_first(world: FilterUnderTest) -> None:
    world.swift.read_acls[DATA] = READER
    answer = ask(world, ["0.jpg"], user=READER)

    assert answer.refusal == (403, "forbidden")
    assert answer.json["object"] == MODEL
    assert reads(world) == []


def test_anonymous_caller_may_not_compute(world: FilterUnderTest) -> None:
    world.swift.read_acls.update({DATA: ".r:*", MODELS: ".r:*"})
    answer = ask(world, ["0.jpg"], user=None)

    assert answer.refusal == (403, "compute_not_allowed")
    assert reads(world) == []


def test_account_that_is_not_admitted_may_not(tmp_path: Path) -> None:
    options = {"allowed_accounts": OTHER}
    with filter_and_worker(tmp_path, **options) as world:
        answer = ask(world, ["shard 0.tar"])

        assert answer.json["code"] == "compute_not_allowed"
        assert reads(world) == []


def test_anonymous_reader_computes_where_that_is_allowed(
    tmp_path: Path,
) -> None:
    options = {"allow_unauthenticated_compute": "yes"}
    with filter_and_worker(tmp_path, **options) as world:
        world.swift.read_acls.update({DATA: ".r:*", MODELS: ".r:*"})
        world.swift.put(f"/{ACCOUNT}/data/x", b"x")
        assert ask(world, ["x"], user=None).status == 200
        world.swift.read_acls[DATA] = ""
        plain = world.send(path=f"{DATA}/x", user=None)
        answer = ask(world, ["x"], user=None)

        assert answer.status == plain.status == 401
        assert answer.body == plain.body


def test_overridden_authorisation_has_no_many_objects(
    world: FilterUnderTest,
) -> None:
    """TempURL and s3_acl let a request through by a nod to everything."""
    world.swift.read_acls.update({DATA: ".r:*", MODELS: ".r:*"})
    env = {
        "swift.authorize_override": True,
        "swift.authorize": lambda request: None,
    }
    answer = ask(world, ["0.jpg"], user=None, env=env)

    assert answer.refusal == (403, "multi_not_allowed")
    assert world.swift.calls == []


# --- requests that are wrong ----------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model": None}, "bad_model"),
        ({"cut": None}, "bad_cut"),
        ({"cut": "0"}, "bad_cut"),
        ({"samples": "0-3"}, "bad_annotation"),
        ({"range": "bytes=0-9"}, "bad_annotation"),
        ({"if_source_etag": "x"}, "bad_annotation"),
        ({"index": "true"}, "bad_annotation"),
        ({"index": "false"}, "bad_annotation"),
        ({"profile": "true"}, "bad_annotation"),
        ({"cache": "readwrite"}, "bad_cache"),
        ({"unheard_of": "1"}, "bad_annotation"),
        ({"encoding": "float64"}, "unknown_encoding"),
        ({"model": "m\xe9"}, "bad_annotation"),
    ],
)
def test_annotation_that_has_no_meaning_here_is_refused(
    world: FilterUnderTest, changes: dict[str, str | None], code: str
) -> None:
    answer = ask(world, ["0.jpg"], annotation(**changes))

    assert answer.refusal == (400, code)
    assert world.swift.calls == []


def test_cache_may_be_off(world: FilterUnderTest) -> None:
    assert ask(world, ["0.jpg"], annotation(cache="off")).status == 200


@pytest.mark.parametrize(
    ("header", "value", "code"),
    [
        ("Range", "bytes=0-1", "range_not_allowed"),
        ("If-Match", "x", "conditional_not_allowed"),
        ("If-None-Match", "*", "conditional_not_allowed"),
        ("If-Modified-Since", "x", "conditional_not_allowed"),
        ("If-Unmodified-Since", "x", "conditional_not_allowed"),
        ("If-Range", "x", "conditional_not_allowed"),
    ],
)
def test_conditions_and_ranges_are_refused(
    world: FilterUnderTest, header: str, value: str, code: str
) -> None:
    answer = ask(world, ["0.jpg"], {**annotation(), header: value})

    assert answer.refusal == (400, code)
    assert header in answer.json["message"]
    assert world.swift.calls == []


def test_container_that_is_no_text_is_refused(
    world: FilterUnderTest,
) -> None:
    env = {"PATH_INFO": f"/v1/{ACCOUNT}/\xff"}
    answer = ask(world, ["0.jpg"], env=env)

    assert answer.refusal == (400, "bad_annotation")
    assert world.swift.calls == []


@pytest.mark.parametrize("query", ["?hapi&format=json", "?x&hapi", "?hapi=1"])
def test_nothing_stands_beside_hapi(
    world: FilterUnderTest, query: str
) -> None:
    answer = ask(world, ["0.jpg"], query=query)

    assert answer.refusal == (400, "bad_annotation")
    assert world.swift.calls == []


@pytest.mark.parametrize("query", ["?hapi", "?hapi=", "?%68api", "?hapi&x=y"])
@pytest.mark.parametrize("path", [DATA, f"{DATA}/"])
@pytest.mark.parametrize("user", ["test:tester", READER, None])
def test_without_annotation_nothing_is_changed(
    world: FilterUnderTest, query: str, path: str, user: str | None
) -> None:
    headers = {"X-Container-Read": ".r:*", "X-Container-Meta-Colour": "red"}
    for given in ({}, headers):
        answer = ask(world, b"", given, path=path, query=query, user=user)

        assert answer.refusal == (400, "bad_annotation")
        assert "X-Hapi-Model" in answer.json["message"]
    assert world.swift.calls == []


@pytest.mark.parametrize(
    ("method", "path", "query"),
    [
        ("POST", DATA, ""),
        ("POST", DATA, "?hapi-cache"),
        ("POST", f"/{ACCOUNT}", "?hapi"),
        ("POST", SOURCE, "?hapi"),
        ("PUT", DATA, "?hapi"),
        ("DELETE", DATA, "?hapi"),
    ],
)
def test_other_requests_pass_without_their_annotation(
    world: FilterUnderTest, method: str, path: str, query: str
) -> None:
    world.send(method, path, annotation(), query=query, body=b"0.jpg")

    (call,) = world.swift.calls
    assert (call["REQUEST_METHOD"], call.get("swift.source")) == (method, None)
    assert not any("HAPI" in key for key in call)


@pytest.mark.parametrize("source", ["S3", "SW"])
def test_requests_of_other_middleware_pass(
    world: FilterUnderTest, source: str
) -> None:
    ask(world, ["0.jpg"], env={"swift.source": source})

    (call,) = world.swift.calls
    assert call["REQUEST_METHOD"] == "POST"
    assert not any("HAPI" in key for key in call)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_reads_of_a_container_stay_what_they_are(
    world: FilterUnderTest, method: str
) -> None:
    assert world.send(method, DATA, query="?hapi").status == 204
    annotated = world.send(method, DATA, annotation(), query="?hapi")
    assert annotated.status == 400


# --- names and bodies -----------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "code", "said"),
    [
        (b"", 400, "bad_names", "no object names"),
        (b"\n \r\n\n", 400, "bad_names", "no object names"),
        (b"0.jpg\n%ff", 400, "bad_names", "line 2"),
        (b"\xff", 400, "bad_names", "UTF-8"),
        (b"%ed%a0%80", 400, "bad_names", "UTF-8"),
        (b"%00reserved", 400, "bad_names", "NUL"),
        (b"a%00", 400, "bad_names", "NUL"),
        (b"a" * 1025, 400, "bad_names", "1025 bytes; at most 1024"),
        (b"a?multipart-manifest=get", 400, "bad_names", "quote '?'"),
        (b"a\n" * 51, 413, "request_too_large", "at most 50"),
        (b"\n" * 153_701, 413, "request_too_large", "at most 50"),
    ],
)
def test_bodies_that_name_no_objects_are_refused(
    world: FilterUnderTest, body: bytes, status: int, code: str, said: str
) -> None:
    for chunked in (False, True):
        env: dict[str, Any] = {}
        if chunked:
            env = {"HTTP_TRANSFER_ENCODING": "Chunked"}
            env["wsgi.input"] = io.BytesIO(body)
        answer = ask(world, b"" if chunked else body, env=env)

        assert answer.refusal == (status, code)
        assert said in answer.json["message"]
    assert reads(world) == []
    assert world.worker.calls == []


def test_most_names_are_allowed(world: FilterUnderTest) -> None:
    assert ask(world, ["0.jpg"] * 50).status == 200
    assert len(sent(world)) == 50


class Endless:
    """A body that is read to where it must not be."""

    def __init__(self, data: bytes = b"a") -> None:
        self.data = data
        self.num_read = 0

    def read(self, size: int) -> bytes:
        self.num_read += size
        assert self.num_read < 10_000_000
        return self.data * size


def test_body_over_its_bound_is_not_read_to_its_end(
    world: FilterUnderTest,
) -> None:
    body = Endless()
    answer = ask(
        world, b"", env={"wsgi.input": body, "CONTENT_LENGTH": "153701"}
    )
    assert answer.json["code"] == "request_too_large"
    assert body.num_read == 0

    env = {"wsgi.input": body, "HTTP_TRANSFER_ENCODING": "chunked"}
    answer = ask(world, b"", env=env)
    assert answer.json["code"] == "request_too_large"
    assert body.num_read < 500_000


class Breaks:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def read(self, size: int) -> bytes:
        if self.error:
            raise self.error
        return b""


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OSError("gone"), 400, "bad_request"),
        (ValueError("no chunk"), 400, "bad_request"),
        (None, 400, "bad_request"),
    ],
)
def test_body_that_breaks_off_is_refused(
    world: FilterUnderTest, error: BaseException | None, status: int, code: str
) -> None:
    env = {"wsgi.input": Breaks(error), "CONTENT_LENGTH": "10"}
    answer = ask(world, b"", env=env)

    assert answer.refusal == (status, code)
    assert reads(world) == []


def test_client_that_sends_its_names_too_slowly_is_refused(
    world: FilterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hapi_middleware.requests.object_names.BODY_TIMEOUT_SECONDS", 0.05
    )

    class Slow:
        def read(self, size: int) -> bytes:
            eventlet.sleep(BODY_TIMEOUT_SECONDS)
            return b"a"

    env = {"wsgi.input": Slow(), "HTTP_TRANSFER_ENCODING": "chunked"}
    answer = ask(world, b"", env=env)

    assert answer.refusal == (504, "too_slow")


# --- overlapped reads -----------------------------------------------------


class Gauge:
    """How many objects are being read."""

    def __init__(self) -> None:
        self.now = self.most = self.begun = 0

    def stream(
        self, content: bytes, seconds: float
    ) -> Callable[[], Iterator[bytes]]:
        def chunks() -> Iterator[bytes]:
            self.begun += 1
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                eventlet.sleep(seconds)
                yield content
            finally:
                self.now -= 1

        return chunks


def gauged(
    world: FilterUnderTest, count: int, size: int, seconds: float
) -> tuple[Gauge, list[str]]:
    gauge = Gauge()
    names = [f"slow{n}" for n in range(count)]
    for number, name in enumerate(names):
        content = bytes([65 + number % 26]) * size
        found = world.swift.put(f"{DATA}/{name}", content)
        # The later ones come first.
        delay = seconds * (2 - number % 2)
        found.stream = gauge.stream(content, delay)
    return gauge, names


def test_reads_overlap_and_keep_their_order(world: FilterUnderTest) -> None:
    gauge, names = gauged(world, 12, 1000, 0.01)
    assert ask(world, names).status == 200

    assert gauge.most == CONCURRENCY
    assert gauge.now == 0
    for number, (entry, data) in enumerate(sent(world)):
        assert entry["key"] == names[number]
        assert data == bytes([65 + number % 26]) * 1000


def test_reads_of_names_that_fail_overlap_too(world: FilterUnderTest) -> None:
    begun: list[int] = []
    now = 0

    def slow(request: Request) -> Any:
        nonlocal now
        now += 1
        begun.append(now)
        eventlet.sleep(0.01)
        now -= 1
        return HTTPServiceUnavailable(request=request)

    names = [f"busy{n}" for n in range(9)]
    for name in names:
        world.swift.put(f"{DATA}/{name}", b"x").on_request = slow
    assert ask(world, names).status == 503

    assert max(begun) == CONCURRENCY


def stalled(release: threading.Event) -> Any:
    """An answer of a worker that takes no more for a while."""

    def answer(source: Iterator[bytes]) -> Iterator[bytes]:
        first = next(source)
        yield b"first"
        release.wait(10)
        yield first
        for _ in source:
            yield b"."

    return answer


def opened(world: FilterUnderTest, names: list[str]) -> tuple[int, Any]:
    request = world.request(
        "POST", DATA, annotation(), query="?hapi", body=body_of(names)
    )
    status, _, chunks = request.call_application(world.pipeline)
    return int(status.split()[0]), chunks


def test_slow_worker_stops_the_reads(world: FilterUnderTest) -> None:
    release = threading.Event()
    world.worker.answer = stalled(release)
    gauge, names = gauged(world, 20, 2_900_000, 0.001)
    status, chunks = opened(world, names)
    try:
        assert (status, next(iter(chunks))) == (200, b"first")
        eventlet.sleep(0.3)
        begun = gauge.begun
        # One is being sent, and one may fit into the socket's buffer.
        assert begun <= CONCURRENCY + 2
        eventlet.sleep(0.2)
        assert (gauge.begun, gauge.now) == (begun, 0)
        release.set()
        rest = b"".join(chunks)
    finally:
        close_if_possible(chunks)

    assert gauge.begun == 20
    assert rest.count(b".") >= 20


def test_client_that_leaves_ends_all_reads_and_the_job(
    world: FilterUnderTest,
) -> None:
    world.swift.may_be_unread = True
    open_fds = len(os.listdir("/proc/self/fd"))
    gauge, names = gauged(world, 20, 1000, 30.0)
    names = ["0.jpg", *names]
    world.worker.answer = lambda source: (chunk[:1] for chunk in source)
    status, chunks = opened(world, names)
    assert status == 200
    assert next(iter(chunks))
    eventlet.sleep(0.05)
    assert gauge.now == CONCURRENCY
    before = time.monotonic()
    chunks.close()

    assert time.monotonic() - before < 2
    assert gauge.now == 0
    assert world.worker.ended.wait(5)
    eventlet.sleep(0.05)
    assert gauge.begun == CONCURRENCY
    assert len(os.listdir("/proc/self/fd")) <= open_fds


@pytest.mark.parametrize("in_begin", [True, False])
def test_worker_that_is_gone_ends_all_reads(
    world: FilterUnderTest, in_begin: bool
) -> None:
    world.swift.may_be_unread = True
    gauge, names = gauged(world, 20, 1000, 30.0)

    def answer(source: Iterator[bytes]) -> Iterator[bytes]:
        next(source)
        if in_begin:
            raise RuntimeError("killed")
        yield b"first"
        raise RuntimeError("killed")

    world.worker.answer = answer
    if in_begin:
        assert ask(world, ["0.jpg", *names]).status == 503
    else:
        _, chunks = opened(world, ["0.jpg", *names])
        with pytest.raises(Exception, match="before it could go on"):
            list(chunks)
    assert gauge.now == 0
    assert gauge.begun <= CONCURRENCY


@pytest.mark.parametrize("code", ["queue_full", "bad_package"])
def test_refusal_of_the_job_ends_all_reads(
    world: FilterUnderTest, code: str
) -> None:
    world.swift.may_be_unread = True
    gauge, names = gauged(world, 20, 1000, 30.0)
    world.worker.refuse_job = make_error(code, "no")
    answer = ask(world, ["0.jpg", *names])

    assert answer.json["code"] == code
    assert gauge.now == 0
    assert gauge.begun <= CONCURRENCY


def test_worker_that_is_not_there_is_503(world: FilterUnderTest) -> None:
    os.unlink(world.worker.socket_path)
    answer = ask(world, ["0.jpg", "1.jpg"])

    assert answer.refusal == (503, "worker_unavailable")


def test_results_come_in_order_and_no_more_are_held_than_asked() -> None:
    held = most = 0

    def work(number: int) -> int:
        nonlocal held, most
        held += 1
        most = max(most, held)
        eventlet.sleep(0.003 * (3 - number % 3))
        return number

    results = []
    for number in map_ahead(work, range(10), 4):
        results.append(number)
        eventlet.sleep(0.02)
        held -= 1

    assert results == list(range(10))
    assert most == 4


def test_failure_of_one_piece_of_work_ends_the_others() -> None:
    ended = []

    def work(number: int) -> int:
        try:
            if number == 0:
                raise ValueError("no")
            eventlet.sleep(30)
        finally:
            ended.append(number)
        return number

    with pytest.raises(ValueError, match="no"):
        list(map_ahead(work, range(10), 3))
    # A thread that has not begun never does.
    assert ended == [0] or sorted(ended) == [0, 1, 2]


def test_all_work_ends_where_its_reader_is_ended_meanwhile() -> None:
    ended: list[int] = []

    def work(number: int) -> int:
        try:
            eventlet.sleep(30 if number else 0)
        finally:
            ended.append(number)
            if len(ended) == 2:
                reader.kill()
        return number

    def read() -> None:
        results = map_ahead(work, range(10), 4)
        assert next(results) == 0
        results.close()

    reader = eventlet.spawn(read)
    eventlet.sleep(0.05)

    assert reader.dead
    assert sorted(ended) == [0, 1, 2, 3]


def test_work_that_is_given_up_holds_nothing() -> None:
    class Socket:
        pass

    held: list[weakref.ref[Socket]] = []

    def work(number: int) -> int:
        mine = Socket()
        held.append(weakref.ref(mine))
        eventlet.sleep(30 if number else 0)
        return number

    gc.collect()
    gc.disable()
    try:
        results = map_ahead(work, range(10), 4)
        assert next(results) == 0
        results.close()
        assert len(held) == 4
        assert not any(ref() for ref in held)
    finally:
        gc.enable()


def test_stream_that_is_given_up_holds_no_objects(
    world: FilterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even until the next collection of garbage, which may be far."""
    world.swift.may_be_unread = True
    _, names = gauged(world, 20, 1000, 30.0)
    held: list[weakref.ref[FetchedObject]] = []

    plain_read = ObjectReader.read
    monkeypatch.setattr(
        ObjectReader,
        "read",
        lambda reader, numbered: noted(plain_read(reader, numbered)),
    )

    def noted(found: FetchedObject) -> FetchedObject:
        held.append(weakref.ref(found))
        return found

    world.worker.answer = lambda source: (chunk[:1] for chunk in source)
    gc.collect()
    gc.disable()
    try:
        _, chunks = opened(world, ["0.jpg", names[0], "1.jpg", *names[1:]])
        assert next(iter(chunks))
        eventlet.sleep(0.05)
        assert len(held) == 2
        assert held[1]() is not None
        chunks.close()
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


# --- what operators and clients are told ----------------------------------


def test_info_says_how_many(world: FilterUnderTest) -> None:
    assert get_swift_info()["hapi"]["multi"] == {
        "max_objects": 50,
        "max_object_bytes": 3_000_000,
    }


def test_plain_requests_and_shards_stay_as_they_are(
    world: FilterUnderTest,
) -> None:
    assert world.send().body == SHARD
    assert world.send(headers=annotation()).body == SHARD.upper()
    assert world.worker.jobs[-1].num_objects is None


def test_what_swift_logs_of_an_object_names_the_request(
    world: FilterUnderTest,
) -> None:
    """Each object is read by a green thread of its own."""
    logger = world.filter.logger
    seen = []

    def note(request: Request) -> None:
        if request.method == "GET":
            seen.append(logger.thread_locals)
            logger.thread_locals = ("tx-another", None)

    for name in GOOD:
        world.swift.objects[f"{DATA}/{name}"].on_request = note
    logger.thread_locals = ("tx1", "192.0.2.1")
    assert ask(world, list(GOOD)).status == 200
    logger.thread_locals = (None, None)

    assert seen == [("tx1", "192.0.2.1")] * len(GOOD)


def test_no_row_says_more_than_json_can(world: FilterUnderTest) -> None:
    world.swift.put(f"{DATA}/\x1b\x07", b"x")
    assert ask(world, ["\x1b\x07"]).status == 200
    assert json.dumps(sent(world)[0][0])
