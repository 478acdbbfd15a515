"""Requests for many objects: refusals, reads, the job's body, answers."""

import gc
import io
import os
import threading
import time
import weakref
from contextlib import contextmanager
from hashlib import md5
from itertools import product
from unittest.mock import Mock
from urllib.parse import quote

import eventlet
import pytest
from swift.common.exceptions import ChunkReadTimeout
from swift.common.registry import get_swift_info
from swift.common.swob import HTTPConflict, HTTPServiceUnavailable
from swift.common.utils import close_if_possible

from filter_under_test import ACCOUNT, MODEL, OTHER, SOURCE, annotation
from framed_objects import taken_apart
from hapi_middleware.requests import object_names
from hapi_middleware.requests.multi_object_reads import ObjectReader
from hapi_protocol.errors import make_error
from hapi_protocol.headers import CONTENT_TYPE_STREAM, REQUEST_HEADERS

DATA = f"/{ACCOUNT}/data"
MODELS = f"/{ACCOUNT}/models"
READER = "test:tester3"
STRANGER = "test2:tester2"
GOOD = {f"{n}.jpg": f"content {n} ".encode() * 100 for n in range(6)}
CONCURRENCY = 3


@pytest.fixture
def filter_options():
    return {
        "multi_concurrency": str(CONCURRENCY),
        "max_multi_object_bytes": "3000000",
        "max_multi_objects": "50",
        "worker_timeout": "5.0",
    }


@pytest.fixture
def world(world):
    for name, content in GOOD.items():
        world.swift.put(f"{DATA}/{name}", content)
    return world


def chunked(body):
    """The environment of a request with this body in chunks."""
    source = io.BytesIO(body) if isinstance(body, bytes) else body
    return {"wsgi.input": source, "HTTP_TRANSFER_ENCODING": "Chunked"}


def ask(world, names, headers=None, *, path=DATA, query="?hapi", **options):
    """Requests objects by their names, or with a raw body."""
    body = names if isinstance(names, bytes) else body_of(names)
    if headers is None:
        headers = annotation()
    body = body or None  # A body would hide the one in "env".
    return world.send("POST", path, headers, query=query, body=body, **options)


def body_of(names):
    return "\n".join(map(quote, names)).encode()


def sent(world):
    return taken_apart(world.worker.sources[-1])


def reads(world):
    """Names of the objects that were read, in order."""
    return [
        path.removeprefix(f"/v1{DATA}/")
        for method, path, _ in world.swift.requests()
        if method == "GET" and path.startswith(f"/v1{DATA}/")
    ]


def keys(world):
    return [entry["key"] for entry, _ in sent(world)]


def test_objects_are_sent_in_the_order_of_their_names(world):
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


def test_object_may_arrive_in_any_chunks(world):
    """An empty chunk would end the body to the worker."""
    pieces = [b"", b"a", b"", b"bc", b""]
    world.swift.put(f"{DATA}/x", b"abc").stream = lambda: iter(pieces)
    assert ask(world, ["x", "0.jpg"]).status == 200

    assert [data for _, data in sent(world)] == [b"abc", GOOD["0.jpg"]]


def test_job_has_the_number_of_objects_and_the_answer_no_etag(world):
    names = ["0.jpg", "1.jpg"]
    answer = ask(world, names, annotation(encoding="uint8;zstd"))

    job = world.worker.jobs[-1]
    assert (job.num_objects, job.source_length_bytes) == (2, None)
    assert (job.cut, job.encoding, job.samples) == (3, "uint8;zstd", None)
    assert (job.source_name, job.source_etag) == (DATA, "")
    assert (job.charged_account, job.model.path) == (ACCOUNT, MODEL)
    assert job.trans_id == "tx1"
    assert answer.headers.pop("X-Hapi-Worker")
    assert answer.headers == {
        "Content-Type": CONTENT_TYPE_STREAM,
        "Cache-Control": "private, no-store",
        "Vary": ", ".join(REQUEST_HEADERS),
        "X-Hapi-Cache": "off",
    }
    # The model is uploaded once.
    assert ask(world, names).status == 200
    assert world.worker.calls.count(("PUT", "/models")) == 1


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
        "\x1b\x07",
        "~" * 1024,
    ],
)
def test_objects_with_any_name_can_be_requested(world, name):
    world.swift.put(f"{DATA}/{name}", b"found " + name.encode())
    answer = ask(world, ["0.jpg", name])

    assert answer.status == 200
    entry, data = sent(world)[1]
    assert (entry["key"], data) == (name, b"found " + name.encode())


@pytest.mark.parametrize(
    "form",
    [
        {"names": b"\r\n\n  0.jpg \r\n\t\n1.jpg\n\n"},
        {"path": f"{DATA}/"},
        {"query": "?%68api="},
        {"headers": annotation(cache="off")},
        {"names": b"", "env": chunked(b"0.jpg\n1.jpg")},
    ],
)
def test_request_may_have_other_forms(world, form):
    answer = ask(world, **{"names": ["0.jpg", "1.jpg"], **form})

    assert answer.status == 200
    assert keys(world) == ["0.jpg", "1.jpg"]


def test_subrequests_are_plain_requests_of_the_caller(world):
    extra = {"X-Newest": "true", "X-Container-Read": ".r:*"}
    ask(world, ["0.jpg", "1.jpg"], annotation() | extra)

    calls = [c for c in world.swift.calls if c["PATH_INFO"].startswith("/v1")]
    assert {c["REQUEST_METHOD"] for c in calls} <= {"GET", "HEAD"}
    assert {c.get("swift.source") for c in calls} == {"HP"}
    newest = []
    for call in calls:
        assert not any("HAPI" in key for key in call)
        assert call["QUERY_STRING"] == ""
        assert "HTTP_X_CONTAINER_READ" not in call
        assert "swift.authorize_override" not in call
        if call["PATH_INFO"].endswith(".jpg"):
            newest.append(call["HTTP_X_NEWEST"])
    assert newest == ["true", "true"]


def test_failed_objects_are_rows_with_errors_among_the_others(world):
    swift = world.swift
    swift.may_be_unread = True
    swift.put(f"{DATA}/long", bytes(3_000_001))
    swift.put(f"{DATA}/empty", b"")
    for name, refusal in (
        ("busy", HTTPServiceUnavailable),
        ("conflict", HTTPConflict),
    ):
        swift.put(f"{DATA}/{name}", b"x").on_request = answering(refusal)
    swift.put(f"{DATA}/short", b"12345").stream = lambda: iter([b"123"])
    swift.put(f"{DATA}/over", b"123").stream = lambda: iter([b"12345"])
    swift.put(f"{DATA}/breaks", b"12345").stream = breaking(OSError("disk"))
    stall = breaking(ChunkReadTimeout(None))
    swift.put(f"{DATA}/stalls", b"12345").stream = stall
    swift.put(f"{DATA}/no-etag", b"x").etag = ""
    other = md5(b"12345").hexdigest()
    swift.put(f"{DATA}/damaged", b"12347", other)
    swift.put(f"{DATA}/slo", b"12345", other[::-1], X_Static_Large_Object="1")
    expected = {
        "missing": (404, "not_found", None),
        "long": (413, "object_too_large", None),
        "0.jpg": (200, "", GOOD["0.jpg"]),
        "empty": (200, "", b""),
        "busy": (503, "service_unavailable", None),
        "conflict": (409, "unsupported_object", None),
        "short": (503, "service_unavailable", None),
        "over": (503, "service_unavailable", None),
        "breaks": (503, "service_unavailable", None),
        "stalls": (503, "service_unavailable", None),
        "no-etag": (200, "unsupported_object", None),
        "damaged": (503, "source_damaged", None),
        "slo": (200, "", b"12345"),
        "1.jpg": (200, "", GOOD["1.jpg"]),
    }

    assert ask(world, list(expected)).status == 200
    found = {
        entry["key"]: (entry["status"], _code(entry["error"]), data)
        for entry, data in sent(world)
    }
    assert found == expected
    (long,) = [b for b in swift.bodies if b.what.endswith("/long")]
    assert not long.is_read


def _code(error):
    return (error or "").split(":")[0]


def answering(refusal):
    return lambda request: refusal(request=request)


def breaking(error):
    def stream():
        yield b"12"
        raise error

    return stream


def test_failed_subrequest_is_the_error_of_one_object(world):
    def fail(request):
        raise RuntimeError("http://10.0.0.7:6200/sdb1 is down")

    world.swift.objects[f"{DATA}/1.jpg"].on_request = fail
    assert ask(world, ["0.jpg", "1.jpg"]).status == 200

    entry, data = sent(world)[1]
    assert (entry["status"], entry["etag"], data) == (503, None, None)
    assert entry["error"].startswith("service_unavailable: ")
    assert "10.0.0.7" not in entry["error"]


def test_failed_objects_before_the_first_readable_one_keep_their_order(world):
    names = [f"none{n}" for n in range(2 * CONCURRENCY)] + ["3.jpg", "none"]
    assert ask(world, names).status == 200

    statuses = [entry["status"] for entry, _ in sent(world)]
    assert keys(world) == names
    assert statuses == [404] * 2 * CONCURRENCY + [200, 404]


@pytest.mark.parametrize(
    ("user", "first", "status"),
    [
        (READER, "0.jpg", 403),
        (STRANGER, "0.jpg", 403),
        ("test:tester", "none", 404),
    ],
)
def test_answer_is_swifts_if_none_is_readable(world, user, first, status):
    world.swift.read_acls[MODELS] = f"{READER},{STRANGER}"
    plain = world.send(path=f"{DATA}/{first}", user=user)

    assert plain.status == status
    assert ask(world, [first, "none", "other"], user=user) == plain
    assert world.worker.calls == []


def test_answer_is_503_if_no_object_can_be_read_now(world):
    world.swift.may_be_unread = True
    world.swift.objects[f"{DATA}/0.jpg"].stream = breaking(OSError("disk"))
    answer = ask(world, ["0.jpg"])

    assert answer.refusal == (503, "service_unavailable")
    assert answer.headers["Retry-After"] == "1"
    assert world.worker.calls == []


def test_reader_by_acl_is_charged_itself(world):
    world.swift.read_acls.update({DATA: STRANGER, MODELS: STRANGER})
    answer = ask(world, ["0.jpg", "none"], user=STRANGER)

    assert answer.status == 200
    assert world.worker.jobs[-1].charged_account == OTHER
    # Without the right to list, a missing object is forbidden as well.
    plain = world.send(path=f"{DATA}/none", user=STRANGER)
    assert sent(world)[1][0]["status"] == plain.status


def test_rights_are_checked_at_the_get_of_each_object(world):
    world.swift.read_acls.update({DATA: READER, MODELS: READER})

    def revoke(request):
        world.swift.read_acls[DATA] = ""

    world.swift.objects[f"{DATA}/0.jpg"].on_request = revoke
    names = [f"{n}.jpg" for n in range(6)]
    assert ask(world, names, user=READER).status == 200

    statuses = [entry["status"] for entry, _ in sent(world)]
    assert statuses[0] == 200
    assert statuses[-1] == 403
    assert sent(world)[-1][0]["error"].startswith("forbidden: ")


def test_caller_is_refused_before_any_object_is_read(world):
    world.swift.read_acls[DATA] = f"{READER},.r:*"
    answer = ask(world, ["0.jpg"], user=READER)
    assert answer.refusal == (403, "forbidden")
    assert answer.json["object"] == MODEL

    world.swift.read_acls[MODELS] = ".r:*"
    answer = ask(world, ["0.jpg"], user=None)
    assert answer.refusal == (403, "compute_not_allowed")

    world.configure(allowed_accounts=frozenset({OTHER}))
    answer = ask(world, ["0.jpg"])
    assert answer.refusal == (403, "compute_not_allowed")
    assert reads(world) == []


def test_anonymous_caller_computes_if_that_is_allowed(world):
    world.configure(allow_unauthenticated_compute=True)
    world.swift.read_acls.update({DATA: ".r:*", MODELS: ".r:*"})
    assert ask(world, ["0.jpg"], user=None).status == 200
    world.swift.read_acls[DATA] = ""
    plain = world.send(path=f"{DATA}/0.jpg", user=None)
    answer = ask(world, ["0.jpg"], user=None)

    assert plain.status == 401
    assert (answer.status, answer.body) == (401, plain.body)


def test_request_with_an_overridden_authorisation_is_refused(world):
    """TempURL and s3_acl put a function there that allows everything."""
    world.swift.read_acls.update({DATA: ".r:*", MODELS: ".r:*"})
    env = {
        "swift.authorize_override": True,
        "swift.authorize": lambda request: None,
    }
    answer = ask(world, ["0.jpg"], user=None, env=env)

    assert answer.refusal == (403, "multi_not_allowed")
    assert world.swift.calls == []


def with_header(name):
    return {"headers": {**annotation(), name: "bytes=0-1"}}


def annotated(**changes):
    return {"headers": annotation(**changes)}


@pytest.mark.parametrize(
    ("code", "request_"),
    [
        ("bad_model", annotated(model=None)),
        ("bad_cut", annotated(cut=None)),
        ("bad_annotation", annotated(samples="0-3")),
        ("bad_annotation", annotated(range="bytes=0-9")),
        ("bad_annotation", annotated(if_source_etag="x")),
        ("bad_annotation", annotated(index="true")),
        ("bad_annotation", annotated(index="false")),
        ("bad_annotation", annotated(profile="true")),
        ("bad_cache", annotated(cache="readwrite")),
        ("unknown_encoding", annotated(encoding="float64")),
        ("range_not_allowed", with_header("Range")),
        ("conditional_not_allowed", with_header("If-Match")),
        ("conditional_not_allowed", with_header("If-None-Match")),
        ("conditional_not_allowed", with_header("If-Modified-Since")),
        ("conditional_not_allowed", with_header("If-Unmodified-Since")),
        ("conditional_not_allowed", with_header("If-Range")),
        ("bad_annotation", {"env": {"PATH_INFO": f"/v1/{ACCOUNT}/\xff"}}),
        ("bad_annotation", {"query": "?hapi&format=json"}),
        ("bad_annotation", {"query": "?x&hapi"}),
        ("bad_annotation", {"query": "?hapi=1"}),
    ],
)
def test_wrong_request_is_refused_first(world, code, request_):
    answer = ask(world, ["0.jpg"], **request_)

    assert answer.refusal == (400, code)
    assert world.swift.calls == []


METADATA = {"X-Container-Read": ".r:*", "X-Container-Meta-Colour": "red"}


def test_request_without_annotation_is_refused(world):
    for query, path, user, headers in product(
        ("?hapi", "?hapi=", "?%68api", "?hapi&x=y"),
        (DATA, f"{DATA}/"),
        ("test:tester", READER, None),
        ({}, METADATA),
    ):
        answer = ask(world, b"", headers, path=path, query=query, user=user)

        assert answer.refusal == (400, "bad_annotation")
        assert "X-Hapi-Model" in answer.json["message"]
    assert world.swift.calls == []


@pytest.mark.parametrize(
    ("method", "path", "query", "source"),
    [
        ("POST", DATA, "", None),
        ("POST", DATA, "?hapi-cache", None),
        ("POST", f"/{ACCOUNT}", "?hapi", None),
        ("POST", SOURCE, "?hapi", None),
        ("PUT", DATA, "?hapi", None),
        ("DELETE", DATA, "?hapi", None),
        ("POST", DATA, "?hapi", "S3"),
        ("POST", DATA, "?hapi", "SW"),
    ],
)
def test_other_requests_pass_as_plain_ones(world, method, path, query, source):
    env = {"swift.source": source} if source else {}
    world.send(method, path, annotation(), query=query, body=b"0", env=env)

    (call,) = world.swift.calls
    assert call["REQUEST_METHOD"] == method
    assert call.get("swift.source") == source
    assert not any("HAPI" in key for key in call)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_reads_of_a_container_are_not_changed(world, method):
    assert world.send(method, DATA, query="?hapi").status == 204
    annotated = world.send(method, DATA, annotation(), query="?hapi")
    assert annotated.status == 400


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
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
def test_wrong_body_is_refused(world, body, status, code, words):
    for answer in (ask(world, body), ask(world, b"", env=chunked(body))):
        assert answer.refusal == (status, code)
        assert words in answer.json["message"]
    assert reads(world) == []
    assert world.worker.calls == []


def test_maximum_number_of_names_is_allowed(world):
    limits = {"max_objects": 50, "max_object_bytes": 3_000_000}
    assert get_swift_info()["hapi"]["multi"] == limits
    assert ask(world, ["0.jpg"] * 50).status == 200
    assert len(sent(world)) == 50


class Body:
    """A ``wsgi.input`` that calls a function at each read."""

    def __init__(self, respond):
        self._respond = respond
        self.num_read = 0

    def read(self, size):
        self.num_read += size
        assert self.num_read < 10_000_000
        return self._respond(size)


def test_body_over_its_limit_is_not_read_to_its_end(world):
    body = Body(lambda size: b"a" * size)
    env = {"wsgi.input": body, "CONTENT_LENGTH": "153701"}
    assert ask(world, b"", env=env).refusal == (413, "request_too_large")
    assert body.num_read == 0

    answer = ask(world, b"", env=chunked(body))
    assert answer.refusal == (413, "request_too_large")
    assert body.num_read < 500_000


@pytest.mark.parametrize(
    "read", [OSError("disconnected"), ValueError("no chunk"), [b""]]
)
def test_incomplete_body_is_refused(world, read):
    body = Mock(**{"read.side_effect": read})
    env = {"wsgi.input": body, "CONTENT_LENGTH": "10"}

    assert ask(world, b"", env=env).refusal == (400, "bad_request")
    assert reads(world) == []


def test_client_that_sends_its_names_too_slowly_is_refused(world, monkeypatch):
    monkeypatch.setattr(object_names, "BODY_TIMEOUT_SECONDS", 0.05)
    body = Body(lambda size: eventlet.sleep(60))

    answer = ask(world, b"", env=chunked(body))
    assert answer.refusal == (504, "too_slow")


class Gauge:
    """Counts objects that are being read."""

    def __init__(self):
        self.now = self.peak = self.begun = 0

    @contextmanager
    def counting(self):
        self.begun += 1
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            yield
        finally:
            self.now -= 1

    def stream(self, content, seconds):
        def chunks():
            with self.counting():
                eventlet.sleep(seconds)
                yield content

        return chunks


def gauged(world, count, size, seconds):
    gauge = Gauge()
    names = [f"slow{n}" for n in range(count)]
    for number, name in enumerate(names):
        content = bytes([65 + number % 26]) * size
        found = world.swift.put(f"{DATA}/{name}", content)
        # Later objects arrive first.
        found.stream = gauge.stream(content, seconds * (2 - number % 2))
    return gauge, names


def test_reads_overlap_and_keep_their_order(world):
    gauge, names = gauged(world, 12, 1000, 0.01)
    assert ask(world, names).status == 200

    assert (gauge.peak, gauge.now) == (CONCURRENCY, 0)
    assert keys(world) == names
    for number, (_, data) in enumerate(sent(world)):
        assert data == bytes([65 + number % 26]) * 1000


def test_failing_reads_overlap_as_well(world):
    gauge = Gauge()

    def slow(request):
        with gauge.counting():
            eventlet.sleep(0.01)
        return HTTPServiceUnavailable(request=request)

    names = [f"busy{n}" for n in range(9)]
    for name in names:
        world.swift.put(f"{DATA}/{name}", b"x").on_request = slow
    assert ask(world, names).status == 503

    assert gauge.peak == CONCURRENCY


def stalled(release):
    """An answer of a worker that pauses its reads."""

    def answer(source):
        first = next(source)
        yield b"first"
        release.wait(10)
        yield first
        for _ in source:
            yield b"."

    return answer


def opened(world, names):
    request = world.request(
        "POST", DATA, annotation(), query="?hapi", body=body_of(names)
    )
    status, _, chunks = request.call_application(world.pipeline)
    return int(status.split()[0]), chunks


def test_slow_worker_stops_the_reads(world):
    release = threading.Event()
    world.worker.answer = stalled(release)
    gauge, names = gauged(world, 20, 2_900_000, 0.001)
    status, chunks = opened(world, names)
    try:
        assert (status, next(iter(chunks))) == (200, b"first")
        eventlet.sleep(0.3)
        begun = gauge.begun
        # One object is being sent, one may be in the socket's buffer.
        assert begun <= CONCURRENCY + 2
        eventlet.sleep(0.2)
        assert (gauge.begun, gauge.now) == (begun, 0)
        release.set()
        rest = b"".join(chunks)
    finally:
        close_if_possible(chunks)

    assert gauge.begun == 20
    assert rest.count(b".") >= 20


def test_disconnected_client_ends_all_reads_and_the_job(world):
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

    assert time.monotonic() - before < 20
    assert gauge.now == 0
    assert world.worker.ended.wait(5)
    eventlet.sleep(0.05)
    assert gauge.begun == CONCURRENCY
    assert len(os.listdir("/proc/self/fd")) <= open_fds


@pytest.mark.parametrize("end", ["refused", "in begin", "in stream"])
def test_refused_job_or_ended_worker_ends_all_reads(world, end):
    world.swift.may_be_unread = True
    gauge, names = gauged(world, 20, 1000, 30.0)
    names = ["0.jpg", *names]

    def answer(source):
        next(source)
        if end == "in stream":
            yield b"first"
        raise RuntimeError("killed")

    world.worker.answer = answer
    if end == "refused":
        world.worker.refuse_job = make_error("queue_full", "no")
        assert ask(world, names).refusal == (503, "queue_full")
    elif end == "in begin":
        assert ask(world, names).status == 503
    else:
        _, chunks = opened(world, names)
        with pytest.raises(Exception, match="before it could go on"):
            list(chunks)
    assert gauge.now == 0
    assert gauge.begun <= CONCURRENCY


def test_closed_stream_keeps_no_objects_in_memory(world, monkeypatch):
    """Not even until the next garbage collection."""
    world.swift.may_be_unread = True
    _, names = gauged(world, 20, 1000, 30.0)
    held = []
    read = ObjectReader.read

    def noted(reader, numbered):
        found = read(reader, numbered)
        held.append(weakref.ref(found))
        return found

    monkeypatch.setattr(ObjectReader, "read", noted)
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


def test_swifts_log_lines_about_an_object_name_the_request(world):
    """Each object is read in its own green thread."""
    logger = world.filter.logger
    seen = []

    def note(request):
        if request.method == "GET":
            seen.append(logger.thread_locals)
            logger.thread_locals = ("tx-another", None)

    for name in GOOD:
        world.swift.objects[f"{DATA}/{name}"].on_request = note
    logger.thread_locals = ("tx1", "192.0.2.1")
    assert ask(world, list(GOOD)).status == 200
    logger.thread_locals = (None, None)

    assert seen == [("tx1", "192.0.2.1")] * len(GOOD)
