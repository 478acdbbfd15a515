"""Failures break one job only, are reported, and leave nothing behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from webob import Request

from hapi_protocol.errors import PackageError, TruncatedStreamError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.job_messages import HEADER_IDENTITY
from hapi_worker.execution import device_executor
from hapi_worker.jobs import job_start
from hapi_worker.server import unix_server as server
from hapi_worker.server.app import WorkerApp
from photos import shard
from waiting import until
from worker_under_test import (
    TIMEOUT_SECONDS,
    UnixConnection,
    identity_of,
    in_two,
    job_for,
    jobs_ended,
    pieces,
    running_worker,
    small_package,
)

BROKEN = (http.client.IncompleteRead, ConnectionResetError)


@pytest.fixture(scope="module")
def tar():
    return shard(200, size=80)


@pytest.fixture
def worker(tmp_path):
    with running_worker(
        tmp_path,
        idle_seconds=1.0,
        stall_seconds=1.0,
        model_wait_seconds=3.0,
        buffer_bytes=1 << 20,
        max_streams=4,
        max_streams_per_account=3,
        queue_seconds=0.2,
    ) as worker:
        yield worker


def read_broken(answer):
    """All bytes of an answer that must not end cleanly."""
    received = bytearray()
    with pytest.raises(BROKEN):
        read_to_the_end(answer, received)
    with pytest.raises(TruncatedStreamError):
        list(read_features(bytes(received)))
    return bytes(received)


def read_to_the_end(answer, received):
    while piece := answer.read1(65536):
        received += piece


def test_client_that_disconnects_cancels_its_job(
    worker, package, tar, monkeypatch
):
    worker.put(package)
    num_batches = slow_down(monkeypatch, 0.1)
    done = threading.Event()
    with worker.streaming(
        job_for(tar, package), package, in_two(tar, done, len(tar) - 1024)
    ) as stream:
        assert stream.answer().status == 200
        before = len(num_batches)
        stream.socket.shutdown(socket.SHUT_RDWR)
        stream.socket.close()
        done.set()
        assert worker.idle()
    # Those on the device, and what began until it was noticed.
    assert len(num_batches) <= before + 3


def slow_down(monkeypatch, seconds):
    """Makes each forward pass take longer; the sizes of those begun."""
    run = device_executor.run_prefix
    sizes: list[int] = []

    def slowly(prefix, images, **where):
        sizes.append(len(images))
        time.sleep(seconds)
        return run(prefix, images, **where)

    monkeypatch.setattr(device_executor, "run_prefix", slowly)
    return sizes


@pytest.mark.parametrize(
    ("broken", "logged"),
    [
        ("execution.device_executor.run_prefix", "a defect: a job failed"),
        (
            "jobs.arrow_response.FeatureStreamWriter.write",
            "a defect: a stream failed",
        ),
    ],
)
def test_defect_breaks_one_job_only_and_is_logged(
    worker, package, tar, monkeypatch, caplog, broken, logged
):
    def fail(*args, **fields):
        raise ValueError("an array of another shape")

    worker.put(package)
    with monkeypatch.context() as patch:
        patch.setattr(f"hapi_worker.{broken}", fail)
        with worker.streaming(
            job_for(tar, package), package, pieces(tar)
        ) as stream:
            answer = stream.answer()
            assert answer.status == 200
            read_broken(answer)
    assert worker.idle()
    assert jobs_ended(worker, "failed", "internal") == 1
    assert logged in caplog.text
    worker.run(job_for(tar, package), package, tar)


def test_silent_connections_block_no_other(tmp_path, package, tar):
    with (
        running_worker(tmp_path, stall_seconds=60.0, max_streams=4) as worker,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(2 * worker.worker.num_server_threads):
            silent = UnixConnection(worker.socket, TIMEOUT_SECONDS)
            silent.connect()
            stack.callback(silent.close)
        worker.run(job_for(tar, package), package, tar)


@pytest.mark.parametrize(
    "half",
    [
        b"POST /jobs HT",
        b"POST /jobs HTTP/1.1\r\nHost: w\r\nContent-Length: 9\r\n\r\n{",
    ],
)
def test_incomplete_requests_block_no_other_for_long(
    tmp_path, package, tar, monkeypatch, half
):
    monkeypatch.setattr(server, "MESSAGE_SECONDS", 0.3)
    with (
        running_worker(tmp_path, stall_seconds=60.0, max_streams=4) as worker,
        contextlib.ExitStack() as stack,
    ):
        worker.put(package)
        for _ in range(2 * worker.worker.num_server_threads):
            connection = UnixConnection(worker.socket, TIMEOUT_SECONDS)
            connection.connect()
            stack.callback(connection.close)
            connection.sock.sendall(half)
        assert worker.request("GET", "/healthz").status == 200
        worker.run(job_for(tar, package), package, tar)


def test_slow_upload_is_accepted(worker, package, monkeypatch):
    monkeypatch.setattr(server, "MESSAGE_SECONDS", 0.1)
    connection = UnixConnection(worker.socket, TIMEOUT_SECONDS)
    connection.putrequest("PUT", "/models")
    connection.putheader(HEADER_IDENTITY, identity_of(package).to_json())
    connection.putheader("Content-Length", str(len(package)))
    connection.endheaders(package[:1000])
    time.sleep(0.4)
    connection.send(package[1000:])
    assert connection.getresponse().status == 201
    connection.close()


def test_incomplete_request_is_refused_in_time_and_counted(
    worker, caplog, monkeypatch
):
    monkeypatch.setattr(server, "MESSAGE_SECONDS", 0.2)
    connection = UnixConnection(worker.socket, TIMEOUT_SECONDS)
    connection.putrequest("POST", "/jobs")
    connection.putheader("Content-Length", "1000")
    connection.endheaders(b"{")
    answer = connection.getresponse()
    assert answer.status == 400
    assert b"could not be read" in answer.read()
    connection.close()
    refusals = worker.worker.metrics.value(
        "hapi_worker_refusals_total", reason="bad_request"
    )
    assert refusals == 1
    assert "Traceback" not in caplog.text


def test_streams_are_bounded_and_health_still_answers(worker, package, tar):
    done = threading.Event()
    worker.put(package)
    with contextlib.ExitStack() as stack:
        for account in ("AUTH_a", "AUTH_a", "AUTH_a", "AUTH_b"):
            job = job_for(tar, package, charged_account=account)
            stack.enter_context(
                worker.streaming(job, None, in_two(tar, done, 50_000))
            ).answer()
        full = worker.ask(job_for(tar, package, charged_account="AUTH_c"))
        assert (full.status, full.code) == (503, "queue_full")
        assert int(full.headers["Retry-After"]) >= 1
        health = worker.request("GET", "/healthz", admin=True)
        assert health.fields["jobs_running"] == 4
        done.set()
    assert worker.idle()
    assert worker.ask(job_for(tar, package)).status == 201


def test_disconnected_caller_frees_its_job_at_once(tmp_path, package, tar):
    """It may also disconnect while its model is being uploaded."""
    with running_worker(tmp_path, max_streams=1, grant_seconds=60) as worker:
        job = job_for(tar, package)
        assert worker.ask(job).code == "model_needed"
        caller = UnixConnection(worker.socket, TIMEOUT_SECONDS)
        caller.request("POST", "/jobs", job.to_body())
        models = worker.worker.models
        until(lambda: models.waiting.num_waiting() == 1)
        caller.close()
        until(lambda: models.waiting.num_waiting() == 0)
        worker.put(package)
        assert not worker.worker.admission.jobs()

        done = threading.Event()
        with worker.streaming(job, package, in_two(tar, done)) as stream:
            assert stream.answer().status == 200
            caller = UnixConnection(worker.socket, TIMEOUT_SECONDS)
            caller.request("POST", "/jobs", job.to_body())
            until(lambda: worker.worker.admission.queue.num_waiting() == 1)
            caller.close()
            done.set()
        assert worker.idle()
        assert worker.ask(job).status == 201


@pytest.mark.parametrize("is_early", [False, True])
def test_device_that_fails_leaves_service_and_the_last_one_ends_it(
    tmp_path, package, tar, monkeypatch, is_early
):
    broken: list[str] = []
    run = device_executor.run_prefix

    def fail(*args, **where):
        if threading.current_thread().name.startswith("device cpu#0"):
            broken.append("cpu#0")
            raise torch.AcceleratorError("CUDA error: test")
        return run(*args, **where)

    monkeypatch.setattr(device_executor, "run_prefix", fail)
    stream_of = job_start.JobStream

    fails_early = [is_early, False]

    def late(request, pipeline, *args):
        if fails_early.pop(0):
            until(pipeline.queue.connection.is_disconnected)
        return stream_of(request, pipeline, *args)

    monkeypatch.setattr(job_start, "JobStream", late)
    ended = threading.Event()
    with running_worker(
        tmp_path, device="cpu,cpu", out_of_service=ended.set
    ) as worker:
        job = job_for(tar, package)
        with (
            worker.streaming(job, package, pieces(tar)) as stream,
            # The device may fail before the answer begins.
            contextlib.suppress(http.client.RemoteDisconnected),
        ):
            read_broken(stream.answer())
        assert broken
        assert worker.idle()
        devices = worker.request("GET", "/healthz").fields["devices"]
        assert devices == {"cpu#0": False, "cpu#1": True}
        assert jobs_ended(worker, "failed", "worker_unavailable") == 1
        # The model was lost with the device; the next caller uploads it.
        reader = worker.run(job, package, tar)
        assert reader.summary.rows == 200
        assert not ended.is_set()
        for executor in worker.worker.executors:
            executor.fail(RuntimeError("test"))
        assert ended.is_set()
        assert worker.ask(job).code in ("queue_full", "model_needed")
        assert worker.put(package).code == "queue_full"


def test_devices_on_the_cpu_decode_for_their_own_jobs(
    tmp_path, package, tar, monkeypatch
):
    decoder_of = job_start.decoder_of
    threads: set[str] = set()

    def recording(*args, **options):
        decode = decoder_of(*args, **options)

        def decoder(sample):
            threads.add(threading.current_thread().name)
            return decode(sample)

        return decoder

    monkeypatch.setattr(job_start, "decoder_of", recording)
    with running_worker(tmp_path, device="cpu,cpu", forwards=1) as worker:
        worker.put(package)
        grants = [
            worker.grant(job_for(tar, package, charged_account=f"AUTH_{n}"))
            for n in range(4)
        ]
        for grant in grants:
            with worker.streaming_of(grant.job_id, pieces(tar)) as stream:
                stream.answer().read()
    assert threads == {"device cpu#0-0", "device cpu#1-0"}


def test_model_with_slow_passes_is_refused(
    tmp_path, package, tar, monkeypatch
):
    slow_down(monkeypatch, 0.02)
    with running_worker(tmp_path, pass_seconds=0.01) as worker:
        job = job_for(tar, package)
        worker.run(job, package, tar)
        refused = worker.ask(job)
        assert (refused.status, refused.code) == (504, "too_slow")
        assert "cut it earlier" in refused.fields["message"]
        assert int(refused.headers["Retry-After"]) > 1


def counters(worker):
    text = worker.request("GET", "/metrics").body.decode()
    return "\n".join(
        line
        for line in text.splitlines()
        if "_created" not in line and "_allocated_bytes" not in line
    )


@pytest.mark.parametrize(
    "hostile", [b"", b"PK\x03\x04junk", b"\x80\x04\x95pickle", b"\0" * 4096]
)
def test_hostile_package_leaves_no_trace(worker, hostile):
    before = counters(worker)
    answer = worker.put(hostile)
    assert (answer.status, answer.code) == (422, "bad_package")
    refused = (
        'hapi_worker_uploads_total{outcome="refused",reason="bad_package"} 1.0'
    )
    after = counters(worker)
    assert refused in after
    assert after.replace(refused + "\n", "") == before
    assert worker.worker.models.loaded_totals() == (0, 0)
    assert worker.ask(job_for(b"x", hostile)).code == "bad_package"


def test_refused_package_is_neither_received_nor_tried_again(
    worker, monkeypatch
):
    models = worker.worker.models
    tried: list[int] = []

    def load(package):
        tried.append(len(package))
        raise PackageError("bad_package", "no")

    monkeypatch.setattr(models, "load", load)
    for _ in range(3):
        assert worker.put(b"PK junk").code == "bad_package"
        assert worker.ask(job_for(b"x", b"PK junk")).code == "bad_package"
    assert tried == [7]
    other = identity_of(b"PK junk", etag="changed")
    assert worker.ask(job_for(b"x", b"", model=other)).code == "model_needed"


def test_package_over_a_limit_is_refused_unread(tmp_path, package):
    with running_worker(tmp_path, max_package_bytes=1000) as worker:
        answer = worker.put(package)
        assert (answer.status, answer.code) == (413, "package_too_large")
    with running_worker(tmp_path, memory_limit=5_000) as worker:
        answer = worker.put(package)
        assert (answer.status, answer.code) == (422, "does_not_fit")
        assert answer.fields["needed_bytes"] > 5_000
        assert answer.fields["available_bytes"] == 5_000


def test_length_must_be_that_of_the_identity(worker, package):
    answer = worker.put(package, identity_of(package + b"x"))
    assert (answer.status, answer.code) == (400, "bad_request")


def test_next_caller_uploads_after_a_broken_upload(worker, package, tar):
    job = job_for(tar, package)
    assert worker.ask(job).code == "model_needed"
    connection = UnixConnection(worker.config.socket, TIMEOUT_SECONDS)
    connection.putrequest("PUT", "/models")
    connection.putheader(HEADER_IDENTITY, identity_of(package).to_json())
    connection.putheader("Content-Length", str(len(package)))
    connection.endheaders()
    connection.send(package[: len(package) // 2])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.ask, job)
        time.sleep(0.2)
        assert not waiting.done()
        connection.close()
        assert waiting.result(300).code == "model_needed"


def test_other_jobs_run_while_a_model_loads(worker, package, tar, monkeypatch):
    worker.put(package)
    loading = threading.Event()
    go_on = threading.Event()
    load = worker.worker.models.load

    def slowly(data):
        loading.set()
        assert go_on.wait(300)
        return load(data)

    monkeypatch.setattr(worker.worker.models, "load", slowly)
    other = small_package(1)
    uploader = threading.Thread(
        target=worker.put, args=(other, identity_of(other, "other.hapi"))
    )
    uploader.start()
    assert loading.wait(300)
    worker.run(job_for(tar, package), package, tar)
    go_on.set()
    uploader.join(10)
    assert worker.worker.models.loaded_totals()[0] == 2


def test_slow_packages_of_one_account_delay_no_other(
    worker, package, tar, monkeypatch
):
    go_on = threading.Event()
    load = worker.worker.models.load

    def load_slowly(data):
        assert len(data) == len(package) or go_on.wait(300)
        return load(data)

    monkeypatch.setattr(worker.worker.models, "load", load_slowly)
    slow = [
        job_for(tar, package, model=identity_of(b"PK" * 9, f"{number}.hapi"))
        for number in range(4)
    ]
    with ThreadPoolExecutor(len(slow)) as pool:
        for job in slow:
            # The packages are in an account that others read as well.
            asked = worker.ask(replace(job, charged_account="AUTH_b"))
            assert asked.code == "model_needed"
        sent = [pool.submit(worker.put, b"PK" * 9, job.model) for job in slow]
        models = worker.worker.models
        until(
            lambda: (
                [each.begun for each in models.uploads._uploads.values()]
                == [True] * 4
            )
        )
        worker.run(job_for(tar, package), package, tar)
        assert not any(each.done() for each in sent)
        go_on.set()
        assert {each.result(300).code for each in sent} == {"bad_package"}


@pytest.mark.parametrize(
    ("uid", "status"),
    [(None, 403), ("54321", 403), ("12345", 200), ("0", 200)],
)
def test_only_allowed_users_are_answered(tmp_path, uid, status):
    with running_worker(tmp_path, allowed_users=frozenset({12345})) as worker:
        request = Request.blank("/healthz")
        if uid is not None:
            request.environ["X_REMOTE_UID"] = uid
        response = request.get_response(WorkerApp(worker.worker))
        assert response.status_int == status


def test_sockets_have_the_permissions_of_the_option(tmp_path):
    with running_worker(tmp_path, socket_mode=0o640) as worker:
        for suffix in ("", ".admin"):
            mode = os.stat(worker.config.socket + suffix).st_mode
            assert mode & 0o777 == 0o640
    assert not list(tmp_path.iterdir())
