"""The usage record of a job, however the job ended."""

from __future__ import annotations

import http.client
import socket
import threading
import time

import pytest

from clock import Clock
from hapi_protocol.errors import NotFoundError, TooSlowError, UnavailableError
from hapi_protocol.job_messages import Usage
from hapi_worker.monitoring.accounting import (
    MAX_WAITING_QUERIES,
    JobAccounting,
    JobTotals,
)
from photos import shard, with_corrupt_member
from waiting import until
from worker_under_test import in_two, job_for, pieces, running_worker

NUM_SAMPLES = 40
SHORT = 0.05


@pytest.fixture(scope="module")
def tar():
    return shard(NUM_SAMPLES, size=80)


@pytest.fixture
def worker(tmp_path):
    with running_worker(tmp_path, buffer_bytes=1 << 20) as worker:
        yield worker


def usage_of(worker, job_id):
    answer = worker.request("GET", f"/jobs/{job_id}")
    assert answer.status == 200, answer.body
    return Usage.from_body(answer.body)


def run(worker, source, package, **job):
    """Status, body and usage of a job that is read to its end."""
    grant = worker.grant(job_for(source, package, **job), package)
    with worker.streaming_of(grant.job_id, pieces(source)) as stream:
        answer = stream.answer()
        body = answer.read()
        return answer.status, body, usage_of(worker, grant.job_id)


def test_usage_of_a_complete_stream(worker, package, tar):
    source = with_corrupt_member(tar, "s0-0003")
    started = time.monotonic()
    status, body, usage = run(worker, source, package, cut=2)
    elapsed = time.monotonic() - started

    assert status == 200
    assert (usage.outcome, usage.reason) == ("done", "")
    assert (usage.samples, usage.errors) == (NUM_SAMPLES, 1)
    assert usage.sent_bytes == len(body)
    assert usage.source_bytes == len(source)
    assert (usage.kind, usage.cut) == ("features", 2)
    assert usage.charged_account == "AUTH_a"
    assert usage.encoding == "float32"
    assert usage.model_digest is not None
    assert 0 < usage.device_seconds < elapsed
    assert 0 < usage.decode_seconds < 2 * elapsed
    # Other processes may take cores meanwhile: no lower bound holds.
    assert usage.cpu_seconds > 0


def test_usage_of_an_index_job(worker, tar):
    _, body, usage = run(worker, tar, None)

    assert (usage.kind, usage.cut) == ("index", 0)
    assert usage.model_digest is None
    assert usage.samples == NUM_SAMPLES
    assert usage.sent_bytes == len(body)
    assert usage.device_seconds == usage.decode_seconds == 0
    assert usage.cpu_seconds > 0


def test_job_refused_before_its_first_byte_is_accounted(worker, package):
    source = b"no tar at all" * 100
    status, _, usage = run(worker, source, package)

    assert status == 422
    assert (usage.outcome, usage.reason) == ("failed", "unsupported_object")
    assert (usage.samples, usage.sent_bytes) == (0, 0)
    assert usage.source_bytes > 0


def test_stream_that_breaks_in_the_middle_is_accounted_so_far(
    worker, package, tar
):
    middle = len(tar) // 2 // 512 * 512
    damaged = tar[:middle] + b"\xff" * (len(tar) - middle)
    grant = worker.grant(job_for(damaged, package), package)
    begun = threading.Event()
    body = in_two(damaged, begun, middle)
    with worker.streaming_of(grant.job_id, body) as stream:
        answer = stream.answer()
        begun.set()
        assert answer.status == 200
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
    usage = usage_of(worker, grant.job_id)

    assert (usage.outcome, usage.reason) == ("failed", "damaged_shard")
    assert usage.samples < NUM_SAMPLES
    # Samples before the damage were decoded, whether they were sent or not.
    assert usage.decode_seconds > 0


def test_disconnected_client_is_charged_for_the_running_batch(
    worker, package, tar, monkeypatch
):
    """The query waits until the device has finished with the job."""
    worker.put(package)
    entered, leave = threading.Event(), threading.Event()
    hold_second_batch(monkeypatch, entered, leave)
    done = threading.Event()
    grant = worker.grant(job_for(tar, package), package)
    body = in_two(tar, done, len(tar) - 1024)
    with worker.streaming_of(grant.job_id, body) as stream:
        assert stream.answer().status == 200
        assert entered.wait(300)
        stream.socket.shutdown(socket.SHUT_RDWR)
        done.set()
    assert worker.idle(), "the job goes on"
    threading.Timer(0.3, leave.set).start()
    before = time.monotonic()
    usage = usage_of(worker, grant.job_id)

    assert usage.outcome == "gone"
    assert time.monotonic() - before > 0.2, "it did not wait for the device"
    assert usage.device_seconds > 0.3


def hold_second_batch(monkeypatch, entered, leave):
    """The second micro-batch stays on the device until ``leave``."""
    from hapi_worker.execution import device_executor as worker_module

    real = worker_module.run_prefix
    calls: list[int] = []

    def slow(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            entered.set()
            assert leave.wait(300)
        return real(*args, **kwargs)

    monkeypatch.setattr(worker_module, "run_prefix", slow)


@pytest.mark.parametrize("job_id", ["", "nobody", "%00", "x" * 500])
def test_unknown_job_is_not_found_at_once(worker, job_id):
    before = time.monotonic()
    answer = worker.request("GET", f"/jobs/{job_id}")

    assert (answer.status, answer.code) == (404, "not_found")
    assert time.monotonic() - before < 10


def test_job_that_never_started_is_not_found(worker, tar):
    grant = worker.grant(job_for(tar))
    answer = worker.request("GET", f"/jobs/{grant.job_id}")
    assert (answer.status, answer.code) == (404, "not_found")


def ended(accounting, job_id):
    meter = accounting.begin(job_id, job_for(b"x"), None)
    accounting.end(job_id, "done", "", JobTotals(samples=3))
    return meter


def test_old_records_are_dropped_by_age_and_by_number():
    clock = Clock()
    accounting = JobAccounting(max_ended=2, keep_seconds=60, clock=clock)
    for name in ("a", "b", "c"):
        ended(accounting, name)
        clock.now += 20
    with pytest.raises(NotFoundError):
        accounting.find("a")
    assert accounting.find("b").samples == 3
    clock.now += 20
    with pytest.raises(NotFoundError):
        accounting.find("b")
    assert accounting.find("c").samples == 3


def test_job_that_does_not_end_in_time_is_too_slow():
    accounting = JobAccounting()
    accounting.begin("a", job_for(b"x"), None)
    with pytest.raises(TooSlowError) as caught:
        accounting.find("a", SHORT)
    assert caught.value.code == "too_slow"


def test_number_of_waiting_queries_is_bounded():
    accounting = JobAccounting()
    accounting.begin("a", job_for(b"x"), None)
    ended(accounting, "b")
    waiting = [
        threading.Thread(target=accounting.find, args=("a", 10))
        for _ in range(MAX_WAITING_QUERIES)
    ]
    for each in waiting:
        each.start()
    until(lambda: accounting._queries.num_waiting() == MAX_WAITING_QUERIES)
    with pytest.raises(UnavailableError) as caught:
        accounting.find("a", SHORT)
    assert caught.value.code == "queue_full"
    assert accounting.find("b").samples == 3
    accounting.end("a", "gone", "", JobTotals())
    for each in waiting:
        each.join(5)
        assert not each.is_alive()


def test_failed_work_is_charged():
    accounting = JobAccounting()
    meter = accounting.begin("a", job_for(b"x"), "d")

    def failing():
        with meter.decoding():
            time.sleep(SHORT)
            raise ValueError("no image")

    with pytest.raises(ValueError, match="no image"):
        failing()
    accounting.end("a", "failed", "internal", JobTotals())
    assert accounting.find("a").decode_seconds >= SHORT


def test_usage_is_complete_once_the_last_pass_has_ended():
    accounting = JobAccounting()
    meter = accounting.begin("a", job_for(b"x"), "d")
    meter.pass_started()
    accounting.end("a", "gone", "", JobTotals())
    with pytest.raises(TooSlowError):
        accounting.find("a", SHORT)
    meter.pass_ended(0.25, 0.5)
    usage = accounting.find("a")
    assert (usage.device_seconds, usage.cpu_seconds) == (0.25, 0.5)
