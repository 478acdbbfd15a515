"""``POST /profiles``: measured once, cached, charged, one at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hapi_protocol.errors import DoesNotFitError, PackageError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.job_messages import ProfileRequest
from hapi_protocol.profiles import ModelProfile
from hapi_splitter.numerics import numerics_tag
from hapi_splitter.profiling.profiler import profile_model
from hapi_worker.jobs import profile_runner
from hapi_worker.jobs.profile_job import MAX_PROFILES, MAX_WAITING
from photos import shard
from waiting import until
from worker_under_test import (
    identity_of,
    in_two,
    job_for,
    running_worker,
    small_package,
    small_split,
)

NUM_CUTS = small_split().frozen.num_cuts
PACKAGE = small_package()
OTHER = small_package(1)
OTHER_NAME = identity_of(OTHER, "other.hapi")


@pytest.fixture
def worker(tmp_path):
    with running_worker(tmp_path, profile_seconds=0.5) as worker:
        yield worker


def ask(worker, package=PACKAGE, *, account="AUTH_a", identity=None):
    if identity is None:
        identity = OTHER_NAME if package == OTHER else identity_of(package)
    wanted = ProfileRequest(account, identity, "tx")
    return worker.request("POST", "/profiles", wanted.to_body())


def count(worker, outcome, reason=""):
    return worker.worker.metrics.value(
        "hapi_worker_profiles_total", outcome=outcome, reason=reason
    )


class Gate:
    """Blocks each run on the device's thread until it is opened."""

    def __init__(self, monkeypatch):
        self.begun = threading.Event()
        self.opened = threading.Event()
        self.asked: list[dict[str, Any]] = []
        self.error: Exception | None = None
        monkeypatch.setattr(profile_runner, "profile_model", self._measure)

    def _measure(self, *args, **kwargs):
        self.asked.append(kwargs)
        self.begun.set()
        assert self.opened.wait(300)
        if self.error is not None:
            raise self.error
        return profile_model(*args, **{**kwargs, "budget_seconds": 0.0})


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def test_profile_is_of_the_model_and_of_this_host(tmp_path):
    # Enough time for both batch sizes on a busy machine.
    with running_worker(tmp_path, profile_seconds=10.0) as worker:
        assert ask(worker).code == "model_needed"
        worker.put(PACKAGE)
        answer = ask(worker)
    assert answer.status == 200, answer.body
    found = ModelProfile.from_body(answer.body)
    assert found.digest == hashlib.sha256(PACKAGE).hexdigest()
    assert found.numerics_tag == numerics_tag("cpu")
    assert found.num_cuts == NUM_CUTS
    assert found.forward_threads == worker.config.torch_threads
    assert found.memory_limit_bytes == worker.config.memory_limit
    assert found.load_seconds > 0
    assert found.reference_seconds > 0
    assert [each.batch for each in found.batches] == [1, 16]


def test_second_caller_gets_the_cached_profile(worker):
    worker.put(PACKAGE)
    first = ask(worker)
    # Other names of the same bytes are the same model.
    renamed = identity_of(PACKAGE, "renamed.hapi")
    worker.put(PACKAGE, renamed)
    answers = [ask(worker), ask(worker, account="AUTH_b", identity=renamed)]
    assert [each.body for each in answers] == [first.body] * 2
    assert count(worker, "done") == 1
    assert count(worker, "kept") == 2


def test_profile_outlives_the_model_in_memory(worker):
    worker.put(PACKAGE)
    first = ask(worker)
    assert first.status == 200, first.body
    device_models = worker.worker.models.devices[0]
    device_models._evict(next(iter(device_models._loaded.values())))
    assert device_models.loaded_totals() == (0, 0)
    assert ask(worker).body == first.body
    assert ask(worker, OTHER).code == "model_needed"


def test_concurrent_callers_get_the_result_of_one_run(worker, gate):
    worker.put(PACKAGE)
    with ThreadPoolExecutor(MAX_WAITING + 1) as pool:
        answers = [pool.submit(ask, worker) for _ in range(MAX_WAITING)]
        until(lambda: count(worker, "joined") == MAX_WAITING - 1)
        until(
            lambda: (
                worker.worker.profiling._run is not None
                and worker.worker.profiling._run.num_waiting == MAX_WAITING
            )
        )
        too_many = ask(worker)
        gate.opened.set()
        bodies = {each.result(300).body for each in answers}
    assert (too_many.status, too_many.code) == (503, "queue_full")
    assert int(too_many.headers["Retry-After"]) >= 1
    assert len(bodies) == 1
    assert ModelProfile.from_body(bodies.pop()).num_cuts == NUM_CUTS
    assert len(gate.asked) == count(worker, "done") == 1


def test_other_model_is_refused_while_one_is_measured(worker, gate):
    worker.put(PACKAGE)
    worker.put(OTHER, OTHER_NAME)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, worker)
        assert gate.begun.wait(300)
        refused = ask(worker, OTHER)
        gate.opened.set()
        assert first.result(300).status == 200
    assert (refused.status, refused.code) == (503, "queue_full")
    assert int(refused.headers["Retry-After"]) >= 1
    assert count(worker, "refused", "queue_full") == 1
    assert ask(worker, OTHER).status == 200


def test_worker_with_jobs_pauses_profiles_after_each_one(worker):
    tar = shard(4, size=90)
    worker.put(PACKAGE)
    worker.put(OTHER, OTHER_NAME)
    release = threading.Event()
    body = in_two(tar, release, 2000)
    with worker.streaming(job_for(tar, PACKAGE), PACKAGE, body) as stream:
        until(lambda: worker.worker.admission.num_running() == 1)
        assert ask(worker).status == 200
        refused = ask(worker, OTHER)
        kept = ask(worker)
        assert worker.worker.admission.num_running() == 1
        release.set()
        reader = read_features(stream.answer())
        assert sum(len(batch.rows) for batch in reader) == 4
    assert (refused.status, refused.code) == (503, "queue_full")
    assert kept.status == 200
    assert worker.idle()
    assert ask(worker, OTHER).status == 200


def test_profile_reserves_memory_and_pauses_the_pools(worker, gate):
    worker.put(PACKAGE)
    [device_models] = worker.worker.models.devices
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, worker)
        assert gate.begun.wait(300)
        assert device_models.working_memory.reserved_bytes() > 0
        decoded = threading.Event()
        worker.worker.executors[0].pool.submit("AUTH_b", decoded.set)
        assert not decoded.wait(0.3)
        gate.opened.set()
        assert asked.result().status == 200
    assert device_models.working_memory.reserved_bytes() == 0
    assert decoded.wait(300)


def test_profile_is_refused_when_decoding_takes_too_long(worker, monkeypatch):
    monkeypatch.setattr(profile_runner, "QUIET_SECONDS", 0.1)
    worker.put(PACKAGE)
    begun, release = threading.Event(), threading.Event()

    def slow():
        begun.set()
        release.wait(300)

    worker.worker.executors[0].pool.submit("AUTH_b", slow)
    assert begun.wait(300)
    refused = ask(worker)
    release.set()
    assert (refused.status, refused.code) == (503, "queue_full")
    assert count(worker, "failed", "queue_full") == 1
    assert ask(worker).status == 200


def test_job_that_starts_during_a_profile_waits_for_its_end(worker, gate):
    tar = shard(4, size=90)
    worker.put(PACKAGE)
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(ask, worker)
        assert gate.begun.wait(300)
        job = job_for(tar, PACKAGE, charged_account="AUTH_b")
        done = pool.submit(worker.run, job, PACKAGE, tar)
        until(lambda: len(worker.worker.executors[0].pool) >= 1)
        assert not done.done()
        gate.opened.set()
        assert asked.result(300).status == 200
        summary = done.result(300).summary
    assert summary.rows == 4
    assert summary.load.share == 0.5


def test_requesting_account_is_charged(worker):
    charged: dict[str, float] = {}
    ledger = worker.worker.ledger
    ended = ledger.ended

    def spy(account, kind, before, seconds):
        charged[account] = charged.get(account, 0.0) + seconds
        ended(account, kind, before, seconds)

    ledger.ended = spy
    worker.put(PACKAGE)
    ask(worker, account="AUTH_first")
    until(lambda: charged)
    assert list(charged) == ["AUTH_first"]
    ask(worker, account="AUTH_late")
    assert list(charged) == ["AUTH_first"]


def test_budget_and_batches_are_the_operators(tmp_path, gate):
    gate.opened.set()
    options = {"profile_seconds": 2.5, "max_batch": 4}
    with running_worker(tmp_path, **options) as worker:
        worker.put(PACKAGE)
        answer = ask(worker)
        found = ModelProfile.from_body(answer.body)
        [asked] = gate.asked
        assert asked["budget_seconds"] == 2.5
        assert asked["batches"] == [1, 4]
        # Without a budget there is one pass, of the smallest batch.
        assert [each.batch for each in found.batches] == [1]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (DoesNotFitError("does_not_fit", "no"), 422, "does_not_fit"),
        (torch.OutOfMemoryError("no"), 422, "does_not_fit"),
        (ZeroDivisionError("ours"), 500, "internal"),
    ],
)
def test_run_that_fails_leaves_nothing_behind(
    worker, gate, error, status, code
):
    gate.error = error
    gate.opened.set()
    worker.put(PACKAGE)
    answer = ask(worker)
    assert (answer.status, answer.code) == (status, code)
    assert count(worker, "failed", code) == 1
    loaded_models = worker.worker.models.devices[0]._loaded.values()
    assert [each.leases for each in loaded_models] == [{}]
    gate.error = None
    assert ask(worker).status == 200


def test_expired_request_cancels_a_run_that_has_not_started(
    worker, monkeypatch
):
    worker.put(PACKAGE)
    monkeypatch.setattr(worker.worker.profiling, "wait_seconds", 0.1)
    release = threading.Event()
    pool = worker.worker.executors[0].pool
    for _ in range(pool.num_threads):
        pool.submit("AUTH_b", lambda: release.wait(300))
    until(lambda: len(pool) == 0)
    answer = ask(worker)
    assert (answer.status, answer.code) == (503, "queue_full")
    loaded_models = worker.worker.models.devices[0]._loaded.values()
    assert [each.leases for each in loaded_models] == [{}]
    assert worker.worker.profiling._run is None
    release.set()
    monkeypatch.setattr(worker.worker.profiling, "wait_seconds", 20)
    assert ask(worker).status == 200
    assert count(worker, "done") == 1
    assert count(worker, "failed") == 0


def test_late_result_is_cached(worker, gate, monkeypatch):
    worker.put(PACKAGE)
    monkeypatch.setattr(worker.worker.profiling, "wait_seconds", 0.2)
    assert ask(worker).code == "queue_full"
    gate.opened.set()
    until(lambda: worker.worker.profiling._run is None)
    assert ask(worker).status == 200
    assert len(gate.asked) == 1


def test_shutdown_ends_waiting_requests(tmp_path, gate):
    with ThreadPoolExecutor(1) as pool, running_worker(tmp_path) as worker:
        worker.put(PACKAGE)
        waiting = pool.submit(ask, worker)
        assert gate.begun.wait(300)
        worker.worker.profiling.close()
        answer = waiting.result(300)
        assert (answer.status, answer.code) == (503, "draining")
        assert ask(worker, OTHER).code == "draining"
        gate.opened.set()


def test_draining_worker_measures_nothing(worker):
    worker.put(PACKAGE)
    worker.worker.admission.drain(0)
    assert ask(worker).code == "draining"


def test_invalid_package_is_refused(tmp_path):
    def refuse(package, /, *, limits):
        raise PackageError("bad_package", "no package")

    with running_worker(tmp_path, load=refuse) as worker:
        garbage = b"g" * 1000
        assert ask(worker, garbage).code == "model_needed"
        assert worker.put(garbage).code == "bad_package"
        answer = ask(worker, garbage)
        assert (answer.status, answer.code) == (422, "bad_package")


def test_model_that_does_not_fit_is_refused(tmp_path):
    limit = small_split().frozen.parameter_bytes + 1000
    with running_worker(tmp_path, memory_limit=limit) as worker:
        # The package itself is longer than its parameters.
        identity = dataclasses.replace(identity_of(PACKAGE), length_bytes=1)
        worker.worker.models.put(identity, bytearray(PACKAGE))
        answer = ask(worker, identity=identity)
        assert (answer.status, answer.code) == (422, "does_not_fit")
        assert answer.fields["available_bytes"] == limit


def test_number_of_cached_profiles_is_bounded(worker):
    worker.put(PACKAGE)
    found = ModelProfile.from_body(ask(worker).body)
    cache = worker.worker.profiling._cache
    for number in range(MAX_PROFILES):
        cache[(str(number), "cpu", "tag")] = found
    worker.put(OTHER, OTHER_NAME)
    assert ask(worker, OTHER).status == 200
    assert len(cache) == MAX_PROFILES
