"""Streams that break, stall or are closed: their errors and resources."""

import http.client
import os
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import eventlet
import eventlet.wsgi
import pytest
from swift.common.middleware import catch_errors, gatekeeper, proxy_logging

from filter_under_test import MODEL, SHARD, SOURCE, annotation
from hapi_middleware.concurrency import SEND_BUFFER_BYTES, connect_unix
from hapi_middleware.requests.package import KnownPackages
from hapi_protocol.errors import make_error
from stub_worker import break_off

BIG = bytes(1 << 20) * 24


@pytest.fixture
def filter_options():
    return {"worker_connect_timeout": "0.3", "worker_timeout": "2.0"}


@pytest.fixture
def world(world):
    world.swift.may_be_unread = True
    world.send(headers=annotation())
    return world


def _paused(release, before, after):
    """An answer of the worker that pauses between two batches."""

    def answer(source):
        if before:
            yield before
        release.wait(5)
        yield after

    return answer


@pytest.mark.parametrize("has_left_its_socket", [False, True])
def test_missing_worker_is_503(world, has_left_its_socket):
    path = world.worker.socket_path
    os.unlink(path)
    if has_left_its_socket:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(path)
    answer = world.send(headers=annotation())

    assert answer.refusal == (503, "worker_unavailable")
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.json["trans_id"] == "tx1"
    assert world.send().body == SHARD


def test_full_backlog_is_503_after_the_connect_timeout(world):
    path = world.worker.socket_path
    os.unlink(path)
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(path)
        busy.listen(0)
        with connect_unix(path, 1.0):
            before = time.monotonic()
            answer = world.send(headers=annotation())
            waited = time.monotonic() - before

    assert answer.refusal == (503, "worker_unavailable")
    assert 0.25 < waited < 1.9


def test_sources_are_sent_through_the_largest_possible_buffer(world):
    maximum = int(Path("/proc/sys/net/core/wmem_max").read_text())
    with connect_unix(world.worker.socket_path, 1.0) as connected:
        size = connected.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    # Linux doubles the requested size (socket(7)).
    assert size == 2 * min(SEND_BUFFER_BYTES, maximum)


def test_worker_that_does_not_answer_is_504(world):
    world.worker.delay_seconds = 3.0

    assert world.send(headers=annotation()).refusal == (504, "too_slow")


@pytest.mark.parametrize("shard", [SHARD, BIG])
@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (make_error("damaged_shard", "no tar"), (422, "damaged_shard")),
        (make_error("not_found", "lapsed"), (503, "worker_unavailable")),
        (RuntimeError("killed"), (503, "worker_unavailable")),
    ],
)
def test_error_before_the_stream_is_reported(world, shard, error, refusal):
    """Even if the source is not yet sent to its end."""

    def answer(source):
        next(source)
        raise error
        yield b""

    world.swift.put(SOURCE, shard)
    world.worker.answer = answer

    assert world.send(headers=annotation()).refusal == refusal


def test_worker_that_never_starts_its_answer_is_504(world):
    release = threading.Event()
    world.worker.answer = _paused(release, b"", b"")
    refused = world.send(headers=annotation())
    release.set()

    assert refused.refusal == (504, "too_slow")


def _breaks_after(good):
    def stream():
        yield good
        raise OSError("disk failed")

    return stream


@pytest.mark.parametrize(
    "stream", [lambda: iter([b"abc"]), _breaks_after(b"abc")]
)
def test_source_that_breaks_before_the_stream_is_503(world, stream):
    world.swift.objects[SOURCE].stream = stream
    world.worker.answer = lambda source: iter([b"".join(source)])
    answer = world.send(headers=annotation())

    # A worker that waits for the missing bytes would end as 504.
    assert answer.refusal == (503, "service_unavailable")
    assert SOURCE in answer.json["message"]


@pytest.mark.parametrize(
    ("is_chunked", "features"), [(False, b"features"), (True, b"")]
)
def test_answer_without_an_end_is_refused(world, is_chunked, features):
    world.worker.is_chunked = is_chunked
    world.worker.answer = lambda source: iter([features])
    answer = world.send(headers=annotation())

    assert answer.refusal == (500, "internal")


def test_incomplete_package_is_503_and_not_stored(world):
    world.worker.digests.clear()
    world.swift.objects[MODEL].stream = _breaks_after(b"PK")

    refusal = world.send(headers=annotation()).refusal
    assert refusal == (503, "service_unavailable")
    assert world.worker.digests == {}


def test_package_refused_before_it_is_sent_to_its_end_is_reported(world):
    world.use(known_packages=KnownPackages())
    world.swift.put(MODEL, BIG)
    world.worker.refuse_model = make_error("bad_package", "no zip")

    assert world.send(headers=annotation()).refusal == (422, "bad_package")


def test_worker_that_ends_between_grant_and_stream_is_503(world):
    def kill(request):
        if request.method == "GET":
            os.unlink(world.worker.socket_path)

    world.swift.objects[SOURCE].on_request = kill
    answer = world.send(headers=annotation())

    assert answer.refusal == (503, "worker_unavailable")


@contextmanager
def _response(world):
    """A client's response from eventlet's WSGI server and all filters."""
    app = proxy_logging.ProxyLoggingMiddleware(world.pipeline, {})
    app = catch_errors.CatchErrorMiddleware(
        gatekeeper.GatekeeperMiddleware(app, {}), {}
    )
    ready, stop = threading.Event(), threading.Event()
    address = []

    def serve():
        listener = eventlet.listen(("127.0.0.1", 0))
        address.extend(listener.getsockname())
        with open(os.devnull, "w") as log:
            server = eventlet.spawn(
                eventlet.wsgi.server, listener, app, log=log
            )
            ready.set()
            while not stop.is_set():
                eventlet.sleep(0.01)
            server.kill()
        listener.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(5)
        connection = http.client.HTTPConnection(*address, timeout=10)
        headers = {**annotation(), "X-Auth-Token": world.token("test:tester")}
        # The response alone has the socket then, and its close() closes it.
        headers["Connection"] = "close"
        connection.request("GET", f"/v1{quote(SOURCE)}", None, headers)
        yield connection.getresponse()
    finally:
        stop.set()
        thread.join(5)


def test_clean_stream_ends_cleanly_for_the_client(world):
    with _response(world) as response:
        assert response.status == 200
        assert response.getheader("Transfer-Encoding") == "chunked"
        assert response.getheader("Content-Length") is None
        assert response.getheader("X-Trans-Id")
        assert response.read() == SHARD.upper()


def test_batches_reach_the_client_immediately(world):
    release = threading.Event()
    world.worker.answer = _paused(release, b"first", b"second")
    with _response(world) as response:
        assert response.read1(100) == b"first"
        release.set()
        assert response.read() == b"second"


def test_stream_that_breaks_in_the_worker_breaks_for_the_client(world):
    world.worker.answer = break_off
    with _response(world) as response:
        assert response.status == 200
        with pytest.raises(http.client.IncompleteRead):
            response.read()


def test_source_that_breaks_breaks_the_stream_for_the_client(world):
    # Even if the worker ends its answer cleanly.
    def answer(source):
        try:
            yield from source
        except (ConnectionError, ValueError):
            yield b"all there was"

    world.worker.answer = answer
    world.swift.objects[SOURCE].stream = _breaks_after(SHARD[:1000])
    with (
        _response(world) as response,
        pytest.raises(http.client.IncompleteRead),
    ):
        response.read()


def test_stalled_worker_breaks_the_stream_after_the_timeout(world):
    release = threading.Event()
    world.worker.answer = _paused(release, b"first", b"late")
    with _response(world) as response:
        before = time.monotonic()
        with pytest.raises(http.client.IncompleteRead):
            response.read()
        release.set()

    assert time.monotonic() - before > 1.8


def test_disconnected_client_frees_everything(world):
    world.swift.put(SOURCE, BIG)
    with _response(world) as response:
        world.worker.ended.clear()
        assert response.read1(10)
        response.close()

        assert world.worker.ended.wait(5), "the worker still streams"
        _wait_until(lambda: all(b.is_closed for b in world.swift.bodies))


def _wait_until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.01)


def test_stalled_client_stops_the_reading_of_the_source(world):
    sent = []

    def stream():
        for start in range(0, len(BIG), 1 << 16):
            sent.append(start)
            yield BIG[start : start + (1 << 16)]

    world.swift.put(SOURCE, BIG).stream = stream
    with _response(world) as response:
        time.sleep(0.5)

        # Socket buffers hold a few MB of 24 MB.
        assert len(sent) << 16 < len(BIG) // 2
        response.close()


def test_worker_that_needs_only_the_start_ends_the_source(world):
    world.swift.put(SOURCE, BIG)
    world.worker.answer = lambda source: iter([next(source)[:5]])

    assert world.send(headers=annotation()).body == BIG[:5]
    assert not world.swift.bodies[-1].is_read


def _open(world):
    request = world.request(headers=annotation())
    return request.get_response(world.pipeline)


def test_response_closed_unread_frees_everything(world):
    response = _open(world)
    assert response.status_int == 200
    response.app_iter.close()
    response.app_iter.close()

    assert list(response.app_iter) == []


def test_response_closed_early_ends_the_thread_that_reads_the_source(world):
    ended = []

    def stream():
        try:
            yield SHARD[:1000]
            eventlet.sleep(60)
        finally:
            ended.append(True)

    world.swift.objects[SOURCE].stream = stream
    response = _open(world)
    assert next(iter(response.app_iter))
    assert not ended
    response.app_iter.close()

    assert ended


def test_waiting_request_does_not_block_another(world):
    release = threading.Event()
    world.worker.answer = _paused(release, b"", b"late")
    late = []
    waiting = eventlet.spawn(
        lambda: late.append(world.send(headers=annotation()))
    )
    eventlet.sleep(0.1)
    assert world.send().body == SHARD
    assert late == []
    release.set()
    waiting.wait()
    assert late[0].body == b"late"
