"""The command: start, signals, drain, sockets, what it leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hapi_protocol.features import read_features
from hapi_worker.main import notify_systemd
from hapi_worker.server import SocketInUseError, remove_stale_socket
from photos import shard
from worker_under_test import (
    TIMEOUT_SECONDS,
    UnixConnection,
    job_for,
    pieces,
    running_worker,
    small_package,
)

START_SECONDS = 60.0


class Process:
    """``hapi-worker`` as systemd starts it."""

    def __init__(self, folder: Path, options: str = "") -> None:
        self.socket = str(folder / "worker.sock")
        config = folder / "worker.conf"
        config.write_text(
            f"[hapi-worker]\nsocket = {self.socket}\ndevice = cpu\n"
            f"memory_limit = 1GiB\ndecode_threads = 1\n{options}"
        )
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.bind(str(folder / "notify"))
        self._notified.settimeout(START_SECONDS)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hapi_worker.main", "--config", config],
            env={
                **os.environ,
                "NOTIFY_SOCKET": str(folder / "notify"),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            stderr=subprocess.PIPE,
            text=True,
        )

    def notification(self) -> str:
        return self._notified.recv(100).decode()

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)

    def close(self) -> None:
        self._notified.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    yield process
    process.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_worker_cleanly(
    process: Process, number: signal.Signals
) -> None:
    assert process.notification() == "READY=1"
    for path in (process.socket, process.socket + ".admin"):
        connection = UnixConnection(path, TIMEOUT_SECONDS)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        connection.close()
    assert process.stop(number) == 0
    assert process.notification() == "STOPPING=1"
    assert not os.path.exists(process.socket)
    assert not os.path.exists(process.socket + ".admin")


def test_second_worker_on_a_live_socket_says_so_and_leaves_it(
    tmp_path: Path,
) -> None:
    with running_worker(tmp_path) as worker:
        before = threading.active_count()
        with (
            pytest.raises(SocketInUseError, match="another worker listens"),
            running_worker(tmp_path),
        ):
            pass
        assert threading.active_count() == before
        assert worker.request("GET", "/healthz").status == 200
        assert worker.request("GET", "/healthz", admin=True).status == 200


def test_killed_worker_leaves_a_socket_that_the_next_one_replaces(
    tmp_path: Path, process: Process
) -> None:
    assert process.notification() == "READY=1"
    process.process.kill()
    process.process.wait(10)
    assert os.path.exists(process.socket)
    with running_worker(tmp_path) as worker:
        assert worker.request("GET", "/healthz").status == 200


def test_path_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(SocketInUseError, match="not a socket"):
        remove_stale_socket(str(path))
    assert path.read_text() == "precious"
    remove_stale_socket(str(tmp_path / "nothing"))


def test_drain_lets_running_jobs_end_and_refuses_new_ones(
    tmp_path: Path,
) -> None:
    package, tar = small_package(), shard(40, size=80)
    go_on = threading.Event()

    def slowly() -> Iterator[bytes]:
        yield from pieces(tar[:50000])
        assert go_on.wait(20)
        yield from pieces(tar[50000:])

    with running_worker(tmp_path, drain_seconds=20.0) as worker:
        job = job_for(tar, package)
        with worker.streaming(job, package, slowly()) as stream:
            answer = stream.answer()
            drained: list[bool] = []
            drainer = threading.Thread(
                target=lambda: drained.append(worker.service.drain())
            )
            drainer.start()
            time.sleep(0.2)
            refused = worker.ask(job)
            assert (refused.status, refused.code) == (503, "draining")
            assert int(refused.headers["Retry-After"]) >= 1
            health = worker.request("GET", "/healthz")
            assert health.fields["status"] == "draining"
            assert drainer.is_alive()
            go_on.set()
            rows = sum(len(batch.rows) for batch in read_features(answer))
            drainer.join(10)
        assert rows == 40
        assert drained == [True]


def test_jobs_that_outlast_the_drain_are_broken_off(tmp_path: Path) -> None:
    package, tar = small_package(), shard(40, size=80)
    go_on = threading.Event()

    def stuck() -> Iterator[bytes]:
        yield from pieces(tar[:50000])
        go_on.wait(20)

    with running_worker(tmp_path, drain_seconds=0.2) as worker:
        job = job_for(tar, package)
        with worker.streaming(job, package, stuck()) as stream:
            assert stream.answer().status == 200
            assert not worker.service.drain()
            started = time.monotonic()
            worker.service.end()
            assert time.monotonic() - started < 15
            go_on.set()
        assert worker.idle()


def test_systemd_that_is_not_there_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify_systemd("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify_systemd("READY=1")


def test_help_explains_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from hapi_worker.main import main

    for option in ("--help", "--version"):
        with pytest.raises(SystemExit) as ended:
            main([option])
        assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "drain_seconds" in text
    assert "hapi-worker " in text
