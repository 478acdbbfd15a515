"""Misbehaving clients of a worker, next to a well-behaved one.

Each test ends with what holds after all of them: the neighbour's rows were
right to the bit and none of its jobs was refused or slow, no job runs any
more, threads, descriptors and memory are back at their level, every failure
and refusal was counted with its reason, and the log tells of no defect.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import tarfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import bombs
from hapi_protocol.errors import CODES, HapiError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.job_messages import HEADER_IDENTITY, JobGrant
from hapi_protocol.unix_http import UnixConnection
from hapi_worker.jobs.admission import PATIENCE_SECONDS
from local_rows import Rows
from neighbour import (
    JOB_SECONDS,
    NUM_SAMPLES,
    Neighbour,
    exact_package,
    small_job,
    small_shard,
)
from photos import jpegs, tar_of
from waiting import until
from worker_process import WorkerProcess, grown
from worker_under_test import (
    TIMEOUT_SECONDS,
    Answer,
    NotGrantedError,
    Streaming,
    identity_of,
    in_two,
    job_for,
    pieces,
)

IDLE_SECONDS = 2.0
STALL_SECONDS = 2.0
SLACK_SECONDS = 15.0
"""Time for a busy machine to notice a deadline."""
MAX_PIXELS = 1 << 22
MAX_SAMPLES = 8000
MAX_EMPTY_MEMBERS = 12_000
"""Sent before their sender is stopped: samples, or directories in a row,
and what is on its way."""
OPTIONS: dict[str, object] = {
    "device": "cpu",
    "memory_limit": "1GiB",
    "decode_threads": 2,
    "torch_threads": 1,
    "max_streams": 8,
    "max_streams_per_account": 4,
    "buffer_bytes": "4MiB",
    "max_sample_bytes": "4MiB",
    "max_pixels": MAX_PIXELS,
    "max_samples": MAX_SAMPLES,
    "grant_seconds": 1,
    "model_wait_seconds": 20,
    "idle_seconds": IDLE_SECONDS,
    "stall_seconds": STALL_SECONDS,
    "batch_seconds": 20,
    "drain_seconds": 5,
    "queue_seconds": 1,
}

BROKEN = (OSError, http.client.HTTPException, HapiError)
"""Errors of a client whose worker ended or broke the stream."""
BAD = "AUTH_bad"
LARGEST_GROWTH_BYTES = 256 << 20
"""Limit of the growth of resident memory while a gigabyte is read.

Two jobs may hold ``buffer_bytes`` (64 MiB) of samples each; malloc keeps more.
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    worker = WorkerProcess(tmp_path_factory.mktemp("chaos"), OPTIONS)
    try:
        worker.wait_until_ready()
        worker.grant(small_job("AUTH_neighbour"), exact_package())
        yield worker
        assert worker.stop() == 0
    finally:
        worker.kill()


@pytest.fixture(scope="module")
def alone(running):
    """The neighbour's rows without other clients."""
    job = small_job("AUTH_neighbour")
    rows = Rows.of(running.run(job, None, small_shard()).batches)
    assert len(rows.facts) == NUM_SAMPLES
    return rows


@pytest.fixture(scope="module")
def level(running, alone):
    """Footprint of the worker after it has done each kind of work."""
    image = bombs.plain_image(2048)
    large = tar_of((f"{number}.png", image) for number in range(8))
    with ThreadPoolExecutor(3) as clients:
        runs = [
            clients.submit(running.run, job, None, tar)
            for job, tar in [
                (bad_job(len(large)), large),
                (small_job(BAD), small_shard()),
            ]
            * 3
        ]
    for run in runs:
        run.result()
    return running.footprint()


@pytest.fixture
def worker(running, alone, level):
    """The worker, with the neighbour on it, and all checks afterwards."""
    before = running.counts()
    with Neighbour(running, alone) as neighbour:
        yield running
        enough = neighbour.num_jobs + 2
        until(
            lambda: neighbour.num_jobs >= enough or not neighbour.is_alive(),
            JOB_SECONDS,
            lambda: "the neighbour is not served any more",
        )
    running.settle(level)
    check_reasons(grown(running.counts(), before))
    check_log(running)


def check_log(worker):
    assert "a defect" not in worker.log()
    assert "Traceback" not in worker.log()


def check_reasons(counted):
    """Every failure and refusal names one of the protocol's errors."""
    for name in counted:
        if "_refusals_total" in name or re.search("failed|refused", name):
            (reason,) = re.findall('reason="(.*?)"', name)
            assert reason in CODES, name
            assert reason != "internal", name


def bad_job(length_bytes):
    """A job of the misbehaving account."""
    job = job_for(b"", exact_package(), charged_account=BAD)
    return replace(job, source_length_bytes=length_bytes)


class Sent:
    """A body that counts its sent bytes."""

    def __init__(self, body):
        self._body = body
        self.num_bytes = 0

    def __iter__(self):
        for piece in self._body:
            yield piece
            self.num_bytes += len(piece)


def read_whole(answer):
    reader = read_features(answer)
    reader.batches = list(reader)  # type: ignore[attr-defined]
    answer.read()  # raises when the last chunk is missing
    return reader


def end_of(stream):
    """End of a job for its client: ``whole``, ``broken``, or a code."""
    try:
        answer = stream.answer()
        if answer.status != 200:
            return Answer(answer.status, {}, answer.read()).code
        read_whole(answer)
    except BROKEN:
        return "broken"
    return "whole"


def run_badly(worker, body, length_bytes):
    job = bad_job(length_bytes)
    with worker.streaming(job, None, body) as stream:
        return end_of(stream)


def ended(outcome, reason=""):
    """The name of a counter of jobs."""
    return (
        f'hapi_worker_jobs_total{{kind="features",outcome="{outcome}",'
        f'reason="{reason}"}}'
    )


def refused(reason):
    """The name of a counter of refusals."""
    return f'hapi_worker_refusals_total{{reason="{reason}"}}'


def wait_for_count(worker, before, name, seconds=SLACK_SECONDS, more=1):
    until(
        lambda: grown(worker.counts(), before).get(name, 0) >= more,
        seconds,
        lambda: f"no {name}: {grown(worker.counts(), before)}",
    )


def rows_in(reader):
    batches = reader.batches  # type: ignore[attr-defined]
    return [row for batch in batches for row in batch.rows]


def long_shard():
    """Its features are far more than a socket's buffers hold."""
    (image,) = small_images(1)
    return b"".join(bombs.large_samples(1000, image, 0))


def small_images(count):
    return [image for image, _ in jpegs(count, size=64)]


@contextlib.contextmanager
def long_stream(worker):
    tar = long_shard()
    with worker.streaming(bad_job(len(tar)), None, pieces(tar)) as stream:
        yield stream.answer()


def test_job_of_a_client_that_stops_reading_ends_in_time(worker):
    before = worker.counts()
    with long_stream(worker) as answer:
        assert answer.status == 200
        answer.read(1000)
        counter = ended("failed", "too_slow")
        wait_for_count(worker, before, counter, STALL_SECONDS + SLACK_SECONDS)
        with pytest.raises(BROKEN):
            answer.read()


def begun(worker, method, path, length, body, **headers):
    """Half a request, on a connection that the client leaves."""
    connection = UnixConnection(worker.socket, TIMEOUT_SECONDS)
    connection.putrequest(method, path)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.putheader("Content-Length", str(length))
    connection.endheaders(body)
    connection.close()


def connect_only(worker):
    connection = UnixConnection(worker.socket, TIMEOUT_SECONDS)
    connection.connect()
    connection.close()


def half_a_request(worker):
    begun(worker, "POST", "/jobs", 1000, b"{")


def half_a_package(worker):
    package = exact_package()
    identity = {HEADER_IDENTITY: identity_of(package, "half.hapi").to_json()}
    half = package[: len(package) // 2]
    begun(worker, "PUT", "/models", len(package), half, **identity)


def grant_only(worker):
    worker.ask(bad_job(1000))


def half_a_body(worker):
    tar = long_shard()
    body = pieces(tar[: len(tar) // 2])
    with worker.streaming(bad_job(len(tar)), None, body):
        pass


def half_an_answer(worker):
    with long_stream(worker) as answer:
        answer.read(1000)


DISCONNECTS = (
    connect_only,
    half_a_request,
    half_a_package,
    grant_only,
    half_a_body,
    half_an_answer,
)


def fell_silent(worker, body, length_bytes, *, cut_off=False):
    """Sends and pauses; or ends the connection's half, not the body."""
    stop = threading.Event()
    sent = in_two(body, stop, len(body))
    with worker.streaming(bad_job(length_bytes), None, sent) as stream:
        if cut_off:
            time.sleep(0.2)
            stream.socket.shutdown(socket.SHUT_WR)
        found = end_of(stream)
        stop.set()
    return found, ended("gone") if cut_off else ended("failed", "too_slow")


def ended_early(worker, body, length_bytes):
    found = run_badly(worker, pieces(body), length_bytes)
    return found, ended("failed", "bad_request")


@pytest.mark.parametrize(
    "send", [partial(fell_silent, cut_off=True), ended_early, fell_silent]
)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_half_a_body_is_never_answered_with_a_whole_stream(
    worker, send, share
):
    before = worker.counts()
    tar = small_shard()
    half = tar[: int(len(tar) * share) // 512 * 512] or tar[:700]
    started = time.monotonic()
    found, counter = send(worker, half, len(tar))
    assert time.monotonic() - started < IDLE_SECONDS + SLACK_SECONDS + 1
    # The answer may have begun when the second half does not come.
    allowed = {"bad_request", "too_slow"} | ({"broken"} if share else set())
    assert found in allowed
    wait_for_count(worker, before, counter)


def test_thousand_tiny_requests_are_answered_or_refused_and_counted(worker):
    before = worker.counts()
    (image,) = small_images(1)

    def request(number):
        answer = worker.ask(bad_job(len(image)))
        if answer.status != 201:
            assert int(answer.headers["Retry-After"]) >= 1
            return answer.code
        grant = JobGrant.from_body(answer.body)
        stream = Streaming(worker.socket, grant.job_id, [image])
        try:
            return end_of(stream)
        finally:
            stream.close()

    with ThreadPoolExecutor(16) as clients:
        ends = Counter(clients.map(request, range(1000)))
    assert ends["whole"]
    assert {CODES[code] for code in ends if code != "whole"} <= {429, 503}
    wait_for_count(worker, before, ended("done"), 5, ends.pop("whole"))
    counted = grown(worker.counts(), before)
    assert {refused(code): number for code, number in ends.items()} == {
        name: number for name, number in counted.items() if "refus" in name
    }


def test_shard_of_a_gigabyte_passes_in_bounded_memory(worker, level):
    (image,) = small_images(1)
    count, size = 1024, 1 << 20
    length = bombs.large_samples_bytes(count, image, size)
    assert length > bombs.GIB
    largest = 0
    done = threading.Event()

    def watch():
        nonlocal largest
        while not done.wait(0.05):
            largest = max(largest, worker.footprint().rss_bytes)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        body = bombs.large_samples(count, image, size)
        with worker.streaming(bad_job(length), None, body) as stream:
            reader = read_whole(stream.answer())
    finally:
        done.set()
        watcher.join()
    rows = rows_in(reader)
    assert [row.index for row in rows] == list(range(count))
    assert not [row.error for row in rows if row.error]
    features = np.concatenate([b.features for b in reader.batches])
    assert (features == features[:1]).all()
    assert largest < level.rss_bytes + LARGEST_GROWTH_BYTES


def member(name, kind=tarfile.REGTYPE):
    return bombs.header(name, bombs.GIB, kind)


LIMIT = "limit_exceeded"
MEMBER_BOMBS = {
    "json": (member("a.json"), LIMIT),
    "member": (member("a.jpg"), LIMIT),
    "pax": (bombs.pax_size(), LIMIT),
    "extended": (member("x", tarfile.XHDTYPE), LIMIT),
    "longname": (member("x", tarfile.GNUTYPE_LONGNAME), LIMIT),
    "npy": (b"\x93NUMPY\x01\x00", "unsupported_object"),
    "image": (b"\xff\xd8\xff", LIMIT),
}


def many_members(kind):
    count = 1_000_000
    return bombs.empty_members(count, kind), count * bombs.BLOCK_BYTES


@pytest.mark.parametrize("kind", MEMBER_BOMBS)
def test_gigabyte_at_a_wrong_place_is_refused_unread(worker, kind):
    before = worker.counts()
    start, code = MEMBER_BOMBS[kind]
    body = Sent(bombs.claiming(start))
    assert run_badly(worker, body, len(start) + bombs.GIB) == code
    assert body.num_bytes < bombs.MIB
    wait_for_count(worker, before, ended("failed", code))


@pytest.mark.parametrize("kind", ["directories", "one sample", "samples"])
def test_million_empty_members_end_in_a_named_error(worker, kind):
    before = worker.counts()
    members, length = many_members(kind)
    body = Sent(members)
    # The answer has begun with rows for the first samples.
    expected = "broken" if kind == "samples" else LIMIT
    assert run_badly(worker, body, length) == expected
    assert body.num_bytes < MAX_EMPTY_MEMBERS * bombs.BLOCK_BYTES
    wait_for_count(worker, before, ended("failed", LIMIT))


def image_bombs():
    """Image files, most of which no worker decodes."""
    (good,) = small_images(1)
    return {
        "good-first": good,
        "huge-png": bombs.huge_png(50_000),
        "huge-jpeg": bombs.huge_jpeg(),
        "pixels": bombs.plain_image(2049),
        "scans": bombs.jpeg_of_many_scans(2000),
        "text": bombs.huge_png(64, text=256 * bombs.MIB),
        "good-last": good,
    }


def send_images(worker, images):
    tar = tar_of((f"{key}.jpg", data) for key, data in images.items())
    with worker.streaming(bad_job(len(tar)), None, pieces(tar)) as stream:
        return read_whole(stream.answer())


def test_image_bombs_are_rows_with_errors_between_good_ones(worker):
    before = worker.counts()
    images = image_bombs()
    reader = send_images(worker, images)
    errors = {row.key: row.error for row in rows_in(reader)}
    assert list(errors) == list(images)
    assert errors.pop("good-first") is errors.pop("good-last") is None
    assert all(key in (error or "") for key, error in errors.items())
    features = np.concatenate([b.features for b in reader.batches])
    assert len(features) == 2
    assert np.array_equal(features[0], features[1])
    counted = grown(worker.counts(), before)
    assert counted["hapi_worker_sample_errors_total"] == len(errors)


def test_memory_of_images_at_the_limit_of_pixels_is_returned(worker):
    image = bombs.plain_image(2048)
    reader = send_images(worker, {str(n): image for n in range(20)})
    assert len(rows_in(reader)) == 20


def stop_reading(worker):
    with long_stream(worker) as answer:
        answer.read(1000)
        time.sleep(STALL_SECONDS + 1)


def send_image_bombs(worker):
    send_images(worker, image_bombs())


def fall_silent(worker):
    tar = small_shard()
    assert fell_silent(worker, tar[:30_000], len(tar))[0] != "whole"


def send_gigabytes(worker):
    for start, code in MEMBER_BOMBS.values():
        body = bombs.claiming(start)
        assert run_badly(worker, body, len(start) + bombs.GIB) == code


def send_many_members(worker):
    assert run_badly(worker, *many_members("samples")) == "broken"


ATTACKS = (
    stop_reading,
    send_image_bombs,
    fall_silent,
    send_gigabytes,
    send_many_members,
    *DISCONNECTS,
)


def test_all_faults_at_once_next_to_a_neighbour(worker):
    def attack(number):
        deadline = time.monotonic() + 40
        while True:
            try:
                return ATTACKS[number % len(ATTACKS)](worker)
            except NotGrantedError:  # the account has its share already
                assert time.monotonic() < deadline
                time.sleep(0.1)

    with ThreadPoolExecutor(len(ATTACKS)) as clients:
        list(clients.map(attack, range(2 * len(ATTACKS))))


def stays(stack, worker):
    """A connection that its client does not close."""
    connection = UnixConnection(worker.socket, TIMEOUT_SECONDS)
    connection.connect()
    stack.callback(connection.close)
    return connection.sock


def stream_of(stack, worker, num_bytes, account=BAD):
    """A stream whose sender stops sending."""
    tar, stop = long_shard(), threading.Event()
    body = in_two(tar, stop, num_bytes)
    job = replace(bad_job(len(tar)), charged_account=account)
    stream = stack.enter_context(worker.streaming(job, exact_package(), body))
    stack.callback(stop.set)
    return stream


def test_worker_ends_under_load(tmp_path):
    package = exact_package()
    length = len(package)
    identity = identity_of(package, "half.hapi").to_json()
    half_sent = [
        b"POST /jobs HT",
        b"POST /jobs HTTP/1.1\r\nHost: w\r\nContent-Length: 1000\r\n\r\n{",
        f"PUT /models HTTP/1.1\r\nHost: w\r\n{HEADER_IDENTITY}: {identity}"
        f"\r\nContent-Length: {length}\r\n\r\nPK".encode(),
        b"",
    ]
    answers: list[tuple[int, str]] = []

    def ask(worker, job):
        answer = worker.ask(job)
        while answer.code == "model_needed":
            # The worker has not come to the half-sent package yet.
            time.sleep(0.05)
            answer = worker.ask(job)
        answers.append((answer.status, answer.code))

    half = replace(bad_job(1000), model=identity_of(package, "half.hapi"))
    options = {
        **OPTIONS,
        "max_streams": 4,
        "stall_seconds": 60,
        "idle_seconds": 60,
        "grant_seconds": 60,
        "queue_seconds": 60,
        "drain_seconds": 1,
    }
    with contextlib.ExitStack() as stack:
        worker = WorkerProcess(tmp_path, options)
        stack.callback(worker.kill)
        worker.wait_until_ready()
        for num_bytes in (60_000, 0):
            stream_of(stack, worker, num_bytes)
        stream_of(stack, worker, len(long_shard())).answer().read(1000)
        worker.grant(bad_job(1000))
        for request in half_sent:
            stays(stack, worker).sendall(request)
        callers = [
            threading.Thread(target=ask, args=[worker, job])
            for job in (bad_job(1000), bad_job(1000), half)
        ]
        for caller in callers:
            caller.start()
            stack.callback(caller.join)
        until(lambda: waiting_in(worker) == 2, 60, worker.log)
        started = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - started < 1 + SLACK_SECONDS + 1
    assert answers == [(503, "draining")] * 3
    check_log(worker)


def test_slow_clients_of_two_accounts_leave_a_place_for_a_third(tmp_path):
    options = {
        **OPTIONS,
        "max_streams": 4,
        "max_streams_per_account": 2,
        "stall_seconds": 60,
        "queue_seconds": 20,
    }
    with contextlib.ExitStack() as stack:
        worker = WorkerProcess(tmp_path, options)
        stack.callback(worker.kill)
        worker.wait_until_ready()
        for account in (BAD, "AUTH_worse") * 2:
            stream = stream_of(stack, worker, len(long_shard()), account)
            stream.answer().read(1000)
        before = worker.counts()
        started = time.monotonic()
        job = small_job("AUTH_third")
        reader = worker.run(job, exact_package(), small_shard())
        rows = Rows.of(reader.batches)
        assert time.monotonic() - started < PATIENCE_SECONDS + SLACK_SECONDS
        assert len(rows.facts) == NUM_SAMPLES
        wait_for_count(worker, before, ended("failed", "too_slow"))
        check_log(worker)


def waiting_in(worker):
    health = worker.request("GET", "/healthz", admin=True)
    return int(health.fields["jobs_waiting"])


class Persistent(threading.Thread):
    """A client that continues whatever happens to its worker."""

    def __init__(self, worker, account, alone):
        super().__init__()
        self._worker = worker
        self._job = small_job(account)
        self._alone = alone
        self._ended = threading.Event()
        self.ends = Counter()

    def run(self):
        while not self._ended.is_set():
            parts = (self._job, exact_package(), small_shard())
            try:
                rows = Rows.of(self._worker.run(*parts).batches)
            except (*BROKEN, NotGrantedError):
                self.ends["broken"] += 1
                time.sleep(0.05)
                continue
            self.ends["whole" if rows.is_equal(self._alone) else "wrong"] += 1

    def end(self):
        self._ended.set()
        self.join(60)
        assert not self.is_alive()


def test_kill_under_load_gives_complete_or_broken_streams(tmp_path, alone):
    with contextlib.ExitStack() as stack:
        first = WorkerProcess(tmp_path, OPTIONS)
        stack.callback(first.kill)
        first.wait_until_ready()
        clients = [
            Persistent(first, f"AUTH_{number}", alone) for number in range(3)
        ]
        for client in clients:
            client.start()
            stack.callback(client.end)

        def wait_for_two_more(worker):
            before = [client.ends["whole"] for client in clients]
            until(
                lambda: all(
                    client.ends["whole"] > number + 1
                    for client, number in zip(clients, before, strict=True)
                ),
                120,
                worker.log,
            )

        wait_for_two_more(first)
        stop = threading.Event()
        body = in_two(small_shard(), stop, 30_000)
        job = small_job("AUTH_midst")
        with first.streaming(job, exact_package(), body) as stream:
            assert stream.answer().status == 200
            first.kill()
            assert end_of(stream) == "broken"
            stop.set()
        assert os.path.exists(first.socket)
        second = WorkerProcess(tmp_path, OPTIONS)
        stack.callback(second.kill)
        second.wait_until_ready()
        wait_for_two_more(second)
        for client in clients:
            client.end()
            assert client.ends["wrong"] == 0
            assert client.ends["broken"] > 0
        assert second.stop() == 0
    assert not os.path.exists(second.socket)
