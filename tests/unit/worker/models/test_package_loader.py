"""Validation of uploaded packages, in a worker with the real loader."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hapi_worker.models.package_loader import ValidatingLoader
from paused_validation import SECONDS, paused_validations, servers
from waiting import until
from worker_process import WorkerProcess
from worker_under_test import job_for, running_worker

OPTIONS = {"device": "cpu", "memory_limit": "1GiB", "decode_threads": 1}


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_server_of_validations_ends_with_its_worker(tmp_path, package, end):
    process = WorkerProcess(tmp_path, OPTIONS)
    try:
        process.wait_until_ready()
        until(lambda: servers(process.pid), SECONDS)
        [server] = servers(process.pid)
        assert process.put(package).status == 201
        assert servers(process.pid) == [server]
        assert not getattr(process, end)()  # the status, if it has one
    finally:
        process.kill()
    server.wait(SECONDS)


def test_killed_validations_are_not_remembered_as_a_refusal(tmp_path, package):
    with (
        paused_validations(tmp_path) as paused,
        running_worker(
            tmp_path, load=ValidatingLoader(paused.server)
        ) as worker,
        ThreadPoolExecutor() as pool,
    ):
        assert worker.ask(job_for(b"x", package)).code == "model_needed"
        upload = pool.submit(worker.put, package)
        for _ in range(2):
            child = paused.child()
            child.send(signal.SIGKILL)
            child.wait(SECONDS)
        answer = upload.result()
        assert (answer.status, answer.code) == (503, "worker_unavailable")
        assert "SIGKILL" in answer.fields["message"]
        # The next caller is asked for the package again.
        assert worker.ask(job_for(b"x", package)).code == "model_needed"
        paused.release()
        assert worker.put(package).status == 201


def test_loader_prepares_in_the_background_and_leaves_nothing():
    loader = ValidatingLoader()
    loader.begin()
    try:
        until(lambda: servers(os.getpid()), SECONDS)
        [server] = servers(os.getpid())
    finally:
        loader.end()
    assert not server.alive()
    until(loader.end, SECONDS)
    assert "warm-up" not in [each.name for each in threading.enumerate()]
