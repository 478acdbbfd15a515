"""The worker's test of whether it can take packages."""

import threading
from functools import partial

import pytest

from hapi_protocol.errors import PACKAGE_REFUSED, UnavailableError
from hapi_splitter.fork_server import ForkServer
from hapi_worker.models.package_loader import ValidatingLoader, load_fast
from hapi_worker.models.self_test import AGAIN_SECONDS, SelfTest
from waiting import until


def test_good_worker_passes(tmp_path):
    loader = ValidatingLoader()
    try:
        test = SelfTest(partial(load_fast, loader, 1 << 20, 1 << 20))
        assert test.run() == ""
        test.check()
    finally:
        loader.end()


def test_host_that_starts_no_process_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", str(tmp_path / "none"))
    with ForkServer() as server:
        loader = ValidatingLoader(server)
        test = SelfTest(partial(load_fast, loader, 1 << 20, 1 << 20))
        assert "No such file" in test.run()
        with pytest.raises(UnavailableError, match="takes no packages") as got:
            test.check()
    assert got.value.code == "worker_unavailable"
    assert got.value.details == {PACKAGE_REFUSED: True}
    assert got.value.retry_after


def test_failed_test_is_repeated_when_a_package_is_refused():
    now = [0.0]
    runs = []

    def load(package):
        runs.append(package)
        if len(runs) < 2:
            raise UnavailableError("worker_unavailable", "no space")

    test = SelfTest(load, lambda: now[0])
    now[0] = 1.0
    assert test.run() == "no space"
    with pytest.raises(UnavailableError):
        test.check()
    assert len(runs) == 1
    now[0] += AGAIN_SECONDS + 1
    with pytest.raises(UnavailableError):
        test.check()
    until(lambda: not test.problem)
    test.check()
    assert len(runs) == 2


def test_callers_wait_for_one_test_that_began_after_they_asked():
    release = threading.Event()
    runs = []

    def load(package):
        runs.append(package)
        release.wait(60)

    test = SelfTest(load)
    threads = [threading.Thread(target=test.run) for _ in range(5)]
    for each in threads:
        each.start()
    until(lambda: runs)
    release.set()
    for each in threads:
        each.join()
    assert len(runs) <= 2
