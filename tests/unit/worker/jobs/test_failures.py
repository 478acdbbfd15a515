"""Failures break one job only, are reported, and leave nothing behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time

import pytest
import torch
from webob import Request

from hapi_protocol.errors import PackageError, TruncatedStreamError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.job_messages import HEADER_IDENTITY, JobGrant
from hapi_worker.models.package_loader import load_validated
from hapi_worker.server import unix_server as server
from hapi_worker.server.app import WorkerApp
from photos import shard
from worker_under_test import (
    TIMEOUT_SECONDS,
    Streaming,
    UnixConnection,
    identity_of,
    job_for,
    job_threads,
    pieces,
    running_worker,
    small_package,
    until,
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


def cut_off(data, event):
    """Pieces of ``data``, then silence until ``event``."""
    yield from pieces(data)
    # Longer than a stream's end waits for its sender: a test that does not
    # set the event fails each time, not by chance.
    event.wait(2 * TIMEOUT_SECONDS)


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


def jobs_ended(worker, outcome, reason):
    return worker.worker.metrics.value(
        "hapi_worker_jobs_total",
        kind="features",
        outcome=outcome,
        reason=reason,
    )


def test_body_cut_off_in_the_middle_breaks_the_answer(worker, package, tar):
    never = threading.Event()
    job = job_for(tar, package)
    body = cut_off(tar[: len(tar) // 2], never)
    with worker.streaming(job, package, body) as stream:
        answer = stream.answer()
        assert answer.status == 200
        stream.socket.shutdown(socket.SHUT_WR)
        never.set()
        read_broken(answer)
    assert worker.idle()
    assert jobs_ended(worker, "gone", "") == 1


def test_body_shorter_than_announced_breaks_the_answer(worker, package, tar):
    # Cut at a member's boundary: the tar alone looks whole.
    half = tar[: len(tar) // 2 // 512 * 512]
    job = job_for(tar, package)
    with worker.streaming(job, package, pieces(half)) as stream:
        answer = stream.answer()
        assert answer.status == 200
        read_broken(answer)
    assert worker.idle()
    assert jobs_ended(worker, "done", "") == 0


def test_damage_behind_the_first_samples_breaks_the_answer(
    worker, package, tar
):
    middle = len(tar) // 2 // 512 * 512
    damaged = tar[:middle] + b"\xff" * (len(tar) - middle)
    with worker.streaming(
        job_for(damaged, package), package, pieces(damaged)
    ) as stream:
        answer = stream.answer()
        assert answer.status == 200
        read_broken(answer)
    assert worker.idle()
    assert jobs_ended(worker, "failed", "damaged_shard") == 1


def test_silent_sender_gets_an_error_or_a_broken_stream(worker, package, tar):
    done = threading.Event()
    with worker.streaming(
        job_for(tar, package), package, cut_off(tar[:600], done)
    ) as stream:
        answer = stream.answer()
        assert answer.status == 504
        assert b'"too_slow"' in answer.read()
        done.set()
    done.clear()
    with worker.streaming(
        job_for(tar, package), package, cut_off(tar[:60000], done)
    ) as stream:
        answer = stream.answer()
        assert answer.status == 200
        read_broken(answer)
        done.set()
    assert worker.idle()


def test_job_of_a_client_that_takes_nothing_is_ended(worker, package):
    tar = shard(600, size=64)
    grant = worker.grant(job_for(tar, package), package)
    stream = Streaming(worker.config.socket, grant.job_id, pieces(tar))
    deadline = time.monotonic() + 15
    while not jobs_ended(worker, "failed", "too_slow"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert worker.idle()
    stream.close()


def test_client_that_disconnects_cancels_its_job(
    worker, package, tar, monkeypatch
):
    worker.put(package)
    num_batches = slow_down(monkeypatch, 0.1)
    done = threading.Event()
    with worker.streaming(
        job_for(tar, package), package, cut_off(tar[:-1024], done)
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
    import hapi_worker.execution.device_executor as module

    run = module.run_prefix
    sizes: list[int] = []

    def slowly(prefix, images, **where):
        sizes.append(len(images))
        time.sleep(seconds)
        return run(prefix, images, **where)

    monkeypatch.setattr(module, "run_prefix", slowly)
    return sizes


def test_broken_jobs_leave_no_thread_and_no_descriptor(worker, package, tar):
    worker.run(job_for(tar, package), package, tar)
    assert worker.idle()
    threads = threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(12):
        grant = worker.grant(job_for(tar, package))
        stream = Streaming(
            worker.config.socket, grant.job_id, pieces(tar[:-5000])
        )
        if number % 2:
            stream.answer()
        stream.close()
        assert worker.idle()
    assert worker.idle()
    assert not job_threads()
    time.sleep(0.1)
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert len(worker.worker.executors[0].pool) == 0
    worker.run(job_for(tar, package), package, tar)


def test_failure_of_the_device_breaks_that_job_only(
    worker, package, tar, monkeypatch
):
    import hapi_worker.execution.device_executor as module

    worker.put(package)
    with monkeypatch.context() as patch:

        def fail(*args, **where):
            raise RuntimeError("device-side assert")

        patch.setattr(module, "run_prefix", fail)
        with worker.streaming(
            job_for(tar, package), package, pieces(tar)
        ) as stream:
            answer = stream.answer()
            assert answer.status == 200
            read_broken(answer)
    assert worker.idle()
    assert jobs_ended(worker, "failed", "internal") == 1
    worker.run(job_for(tar, package), package, tar)


def test_stream_that_cannot_be_written_is_a_failure_that_is_logged(
    worker, package, tar, monkeypatch, caplog
):
    def fail(*args, **fields):
        raise ValueError("an array of another shape")

    worker.put(package)
    with monkeypatch.context() as patch:
        patch.setattr(
            "hapi_worker.jobs.arrow_response.FeatureStreamWriter.write", fail
        )
        with worker.streaming(
            job_for(tar, package), package, pieces(tar)
        ) as stream:
            read_broken(stream.answer())
    assert worker.idle()
    assert jobs_ended(worker, "failed", "internal") == 1
    assert "a defect: a stream failed" in caplog.text
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
    monkeypatch.setattr(server, "MESSAGE_SECONDS", 1.0)
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
                worker.streaming(job, None, cut_off(tar[:50000], done))
            ).answer()
        full = worker.ask(job_for(tar, package, charged_account="AUTH_c"))
        assert (full.status, full.code) == (503, "queue_full")
        assert int(full.headers["Retry-After"]) >= 1
        health = worker.request("GET", "/healthz", admin=True)
        assert health.fields["jobs_running"] == 4
        done.set()
    assert worker.idle()
    assert worker.ask(job_for(tar, package)).status == 201


def test_account_over_its_share_is_refused(worker, package, tar):
    worker.put(package)
    answers = [worker.ask(job_for(tar, package)) for _ in range(4)]
    assert [answer.status for answer in answers] == [201, 201, 201, 429]
    assert answers[3].code == "share_exceeded"
    assert "Retry-After" in answers[3].headers


def test_request_waits_until_a_stream_ends(tmp_path, package, tar):
    with running_worker(tmp_path, max_streams=1, queue_seconds=15) as worker:
        done = threading.Event()
        job = job_for(tar, package)
        with worker.streaming(job, package, cut_off(tar, done)) as stream:
            assert stream.answer().status == 200
            answers: list[int] = []
            caller = threading.Thread(
                target=lambda: answers.append(worker.ask(job).status)
            )
            caller.start()
            until(lambda: worker.worker.admission.num_waiting() == 1)
            health = worker.request("GET", "/healthz", admin=True)
            assert health.fields["jobs_waiting"] == 1
            assert answers == []
            done.set()
        caller.join(10)
        assert answers == [201]


def test_disconnected_caller_frees_its_job_at_once(tmp_path, package, tar):
    """It may also disconnect while its model is being uploaded."""
    with running_worker(tmp_path, max_streams=1, grant_seconds=60) as worker:
        job = job_for(tar, package)
        assert worker.ask(job).code == "model_needed"
        caller = UnixConnection(worker.socket, TIMEOUT_SECONDS)
        caller.request("POST", "/jobs", job.to_body())
        models = worker.worker.models
        until(lambda: models.uploads.num_waiting() == 1)
        caller.close()
        until(lambda: models.uploads.num_waiting() == 0)
        worker.put(package)
        assert not worker.worker.admission.jobs()

        done = threading.Event()
        with worker.streaming(job, package, cut_off(tar, done)) as stream:
            assert stream.answer().status == 200
            caller = UnixConnection(worker.socket, TIMEOUT_SECONDS)
            caller.request("POST", "/jobs", job.to_body())
            until(lambda: worker.worker.admission.num_waiting() == 1)
            caller.close()
            done.set()
        assert worker.idle()
        assert worker.ask(job).status == 201


def test_device_that_fails_leaves_service_and_the_last_one_ends_it(
    tmp_path, package, tar, monkeypatch
):
    import hapi_worker.execution.device_executor as module

    broken: list[str] = []
    run = module.run_prefix

    def fail(*args, **where):
        if threading.current_thread().name.startswith("device cpu#0"):
            broken.append("cpu#0")
            raise torch.AcceleratorError("CUDA error: test")
        return run(*args, **where)

    monkeypatch.setattr(module, "run_prefix", fail)
    ended = threading.Event()
    with running_worker(
        tmp_path, device="cpu,cpu", out_of_service=ended.set
    ) as worker:
        job = job_for(tar, package)
        with worker.streaming(job, package, pieces(tar)) as stream:
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


def test_two_devices_share_the_jobs_of_one_model(tmp_path, package, tar):
    with running_worker(
        tmp_path, device="cpu,cpu", max_streams_per_account=16
    ) as worker:
        worker.put(package)
        for number in range(8):
            account = f"AUTH_{number}"
            worker.grant(job_for(tar, package, charged_account=account))
        devices = worker.worker.models.devices
        assert [each.num_jobs() for each in devices] == [4, 4]


def test_devices_on_the_cpu_decode_for_their_own_jobs(
    tmp_path, package, tar, monkeypatch
):
    import hapi_worker.execution.device_executor as module

    image_decoder = module.image_decoder
    threads: set[str] = set()

    def recording(*args):
        decode = image_decoder(*args)

        def decoder(sample):
            threads.add(threading.current_thread().name)
            return decode(sample)

        return decoder

    monkeypatch.setattr(module, "image_decoder", recording)
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


def test_expired_grant_cannot_be_used(tmp_path, package, tar):
    with running_worker(tmp_path, grant_seconds=0.2) as worker:
        grant = worker.grant(job_for(tar), None)
        time.sleep(0.3)
        stream = Streaming(worker.config.socket, grant.job_id, pieces(tar))
        answer = stream.answer()
        assert answer.status == 404
        assert b'"not_found"' in answer.read()
        stream.close()


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

    monkeypatch.setattr(models, "_load", load)
    for _ in range(3):
        assert worker.put(b"PK junk").code == "bad_package"
        assert worker.ask(job_for(b"x", b"PK junk")).code == "bad_package"
    assert tried == [7]
    other = identity_of(b"PK junk", etag="changed")
    assert worker.ask(job_for(b"x", b"", model=other)).code == "model_needed"


def test_packages_are_validated_in_a_subprocess(tmp_path, package, tar):
    with running_worker(tmp_path, load=load_validated) as worker:
        assert worker.put(b"PK junk").code == "bad_package"
        assert worker.put(package).status == 201
        worker.run(job_for(tar, package), None, tar)


def test_package_with_one_bit_flipped_is_refused(worker, package):
    flipped = bytearray(package)
    flipped[60] ^= 1
    assert worker.put(bytes(flipped)).status == 422


def test_package_over_a_limit_is_refused_unread(tmp_path, package):
    with running_worker(tmp_path, max_package_bytes=1000) as worker:
        answer = worker.put(package)
        assert (answer.status, answer.code) == (413, "package_too_large")
    with running_worker(tmp_path, memory_limit=20_000) as worker:
        answer = worker.put(package)
        assert (answer.status, answer.code) == (422, "does_not_fit")
        assert answer.fields["needed_bytes"] > 20_000
        assert answer.fields["available_bytes"] == 20_000


def test_length_must_be_that_of_the_identity(worker, package):
    answer = worker.put(package, identity_of(package + b"x"))
    assert (answer.status, answer.code) == (400, "bad_request")


def test_name_with_another_digest_is_refused(worker, package):
    answer = worker.put(package, identity_of(package, "0" * 64 + ".hapi"))
    assert (answer.status, answer.code) == (409, "digest_mismatch")
    assert worker.worker.models.loaded_totals() == (0, 0)


def test_next_caller_uploads_after_a_broken_upload(worker, package, tar):
    job = job_for(tar, package)
    assert worker.ask(job).code == "model_needed"
    connection = UnixConnection(worker.config.socket, TIMEOUT_SECONDS)
    connection.putrequest("PUT", "/models")
    connection.putheader(HEADER_IDENTITY, identity_of(package).to_json())
    connection.putheader("Content-Length", str(len(package)))
    connection.endheaders()
    connection.send(package[: len(package) // 2])
    waiting = Caller(worker, job)
    time.sleep(0.2)
    assert waiting.is_alive()
    connection.close()
    waiting.join(5)
    assert waiting.code == "model_needed"


class Caller(threading.Thread):
    """One ``POST /jobs`` in a thread, with the upload if it is needed."""

    def __init__(self, worker, job, package=None):
        super().__init__()
        self._worker = worker
        self._job = job
        self._package = package
        self.code = ""
        self.digest: str | None = None
        self.start()

    def run(self):
        answer = self._worker.ask(self._job)
        if answer.status == 201:
            self.digest = JobGrant.from_body(answer.body).model_digest
            return
        self.code = answer.code
        if self.code == "model_needed" and self._package is not None:
            time.sleep(0.2)
            self._worker.put(self._package, self._job.model)


def test_one_of_several_callers_uploads_for_all(worker, package, tar):
    callers = [
        Caller(
            worker,
            job_for(tar, package, charged_account=f"AUTH_{number}"),
            package,
        )
        for number in range(4)
    ]
    for caller in callers:
        caller.join(10)
    assert sorted(caller.code for caller in callers) == [
        "",
        "",
        "",
        "model_needed",
    ]
    assert len({caller.digest for caller in callers if not caller.code}) == 1


def test_callers_that_waited_for_a_bad_package_get_its_error(worker, tar):
    junk = b"PK not at all"
    callers = [Caller(worker, job_for(tar, junk), junk) for _ in range(3)]
    for caller in callers:
        caller.join(10)
    codes = sorted(caller.code for caller in callers)
    assert codes == ["bad_package", "bad_package", "model_needed"]


def test_other_jobs_run_while_a_model_loads(worker, package, tar, monkeypatch):
    worker.put(package)
    loading = threading.Event()
    go_on = threading.Event()
    load = worker.worker.models._load

    def slowly(data):
        loading.set()
        assert go_on.wait(20)
        return load(data)

    monkeypatch.setattr(worker.worker.models, "_load", slowly)
    other = small_package(1)
    uploader = threading.Thread(
        target=worker.put, args=(other, identity_of(other, "other.hapi"))
    )
    uploader.start()
    assert loading.wait(5)
    worker.run(job_for(tar, package), package, tar)
    go_on.set()
    uploader.join(10)
    assert worker.worker.models.loaded_totals()[0] == 2


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
