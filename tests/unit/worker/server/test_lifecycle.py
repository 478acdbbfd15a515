"""The command: start, signals, drain, sockets, what it leaves behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from hapi_protocol.feature_reader import read_features
from hapi_worker.server.systemd import notify_systemd
from hapi_worker.server.unix_server import (
    SocketInUseError,
    remove_stale_socket,
)
from photos import shard
from worker_under_test import (
    TIMEOUT_SECONDS,
    Exchange,
    UnixConnection,
    job_for,
    pieces,
    running_worker,
    small_package,
    until,
)

START_SECONDS = 60.0


class Process:
    """``hapi-worker`` as systemd starts it."""

    def __init__(
        self,
        folder,
        options="",
        listeners=(),
        program=("-m", "hapi_worker.main"),
    ):
        self.socket = str(folder / "worker.sock")
        self.config = folder / "worker.conf"
        self.config.write_text(
            f"[hapi-worker]\nsocket = {self.socket}\ndevice = cpu\n"
            f"memory_limit = 1GiB\ndecode_threads = 1\n{options}"
        )
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.bind(str(folder / "notify"))
        self._notified.settimeout(START_SECONDS)
        command = [sys.executable, *program]
        command += ["--config", str(self.config)]
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(folder / "notify"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        if listeners:
            # As systemd does: descriptors from 3 on, and our own pid.
            numbers = " ".join(
                f"{3 + n}<&{each.fileno()}" for n, each in enumerate(listeners)
            )
            script = f'export LISTEN_PID=$$; exec "$@" {numbers}'
            command = ["bash", "-c", script, "bash", *command]
            environment["LISTEN_FDS"] = str(len(listeners))
        self.process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=[each.fileno() for each in listeners],
            stderr=subprocess.PIPE,
            text=True,
        )

    def notification(self):
        return self._notified.recv(100).decode()

    def stop(self, number):
        self.process.send_signal(number)
        return self.process.wait(20)

    def close(self):
        self._notified.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def process(tmp_path):
    process = Process(tmp_path)
    yield process
    process.close()


def ends_cleanly(process, number):
    """Ends a worker that is healthy, and nothing of it is left; its log."""
    for path in (process.socket, process.socket + ".admin"):
        connection = UnixConnection(path, TIMEOUT_SECONDS)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        connection.close()
    assert process.stop(number) == 0
    assert process.notification() == "STOPPING=1"
    assert not os.path.exists(process.socket)
    log = process.process.stderr.read()
    assert "draining" in log.splitlines()[-1]
    return log


def test_interrupted_worker_that_had_jobs_ends_cleanly(process):
    assert process.notification() == "READY=1"
    package, source = small_package(), shard(2)
    job = job_for(source, package)
    Exchange(process.socket).run(job, package, source)
    ends_cleanly(process, signal.SIGINT)


def test_hangup_reloads_limits_and_a_bad_file_changes_nothing(process):
    assert process.notification() == "READY=1"
    before = process.config.read_text()
    texts = [
        before + "max_streams_per_account = 1\n",
        before + "max_streams_per_account = 2\nsocket_mode = 0600\n",
        "[hapi-worker]\nnonsense = 1\n",
    ]
    for text in texts:
        process.config.write_text(text)
        process.process.send_signal(signal.SIGHUP)
        assert process.notification().startswith("RELOADING=1")
        assert process.notification() == "READY=1"
    streams = [index_job(process.socket) for _ in range(2)]
    assert [answer for answer, _ in streams] == [201, 201]
    log = ends_cleanly(process, signal.SIGTERM)
    assert log.count("the configuration is reloaded") == 2
    assert "these options need a new start: socket_mode" in log
    assert "cannot reload, and go on as before: unknown option" in log


def index_job(path):
    """Status and code of ``POST /jobs`` for an index."""
    connection = UnixConnection(path, TIMEOUT_SECONDS)
    connection.request("POST", "/jobs", job_for(b"x").to_body())
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    return answer.status, body.get("code", "")


def test_sockets_that_systemd_holds_are_used_and_left(tmp_path):
    paths = [str(tmp_path / f"worker.sock{end}") for end in ("", ".admin")]
    listeners = []
    for path in paths:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen()
        listeners.append(listener)
    process = Process(tmp_path, listeners=listeners)
    try:
        # What comes before the worker is there waits.
        connection = UnixConnection(paths[0], TIMEOUT_SECONDS)
        connection.request("GET", "/healthz")
        assert process.notification() == "READY=1"
        assert connection.getresponse().status == 200
        connection.close()
        assert process.stop(signal.SIGTERM) == 0
        assert all(map(os.path.exists, paths))
    finally:
        process.close()
        for listener in listeners:
            listener.close()


def test_socket_of_another_path_is_refused_by_name(tmp_path):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "other.sock"))
    listener.listen()
    process = Process(tmp_path, listeners=[listener])
    try:
        assert process.process.wait(30) == 1
        assert "other.sock" in process.process.stderr.read()
    finally:
        process.close()
        listener.close()
    assert not os.path.exists(process.socket + ".admin")


def test_second_worker_on_a_live_socket_says_so_and_leaves_it(tmp_path):
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
    tmp_path, process
):
    assert process.notification() == "READY=1"
    process.process.kill()
    process.process.wait(10)
    assert os.path.exists(process.socket)
    with running_worker(tmp_path) as worker:
        assert worker.request("GET", "/healthz").status == 200


def test_path_that_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(SocketInUseError, match="not a socket"):
        remove_stale_socket(str(path))
    assert path.read_text() == "precious"
    remove_stale_socket(str(tmp_path / "nothing"))


def test_drain_lets_running_jobs_end_and_refuses_new_ones(tmp_path):
    package, tar = small_package(), shard(40, size=80)
    go_on = threading.Event()

    def slowly():
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


def test_jobs_that_outlast_the_drain_are_broken_off(tmp_path):
    package, tar = small_package(), shard(40, size=80)
    go_on = threading.Event()

    def stuck():
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


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_job_without_its_first_sample_is_refused_after_the_drain(
    tmp_path, num_bytes
):
    tar = shard(4, size=80)
    go_on = threading.Event()

    def stuck():
        yield from pieces(tar[:num_bytes])
        go_on.wait(20)

    with running_worker(tmp_path, drain_seconds=0.2) as worker:
        with worker.streaming(job_for(tar), None, stuck()) as stream:
            until(lambda: worker.worker.admission.num_running() == 1)
            assert not worker.service.drain()
            started = time.monotonic()
            worker.service.end()
            assert time.monotonic() - started < 3
            answer = stream.answer()
            assert answer.status == 503
            assert b'"draining"' in answer.read()
            go_on.set()
        assert not worker.worker.admission.jobs()


HANGS = """
import sys, threading
from hapi_worker import main
from hapi_worker.execution import device_executor as executor

executor.HANGING_KINDS = ("cpu",)
executor.run_prefix = lambda *args, **where: threading.Event().wait()
sys.exit(main.main())
"""


def test_worker_ends_when_its_last_device_hangs(tmp_path):
    package, tar = small_package(), shard(40, size=80)
    process = Process(
        tmp_path,
        "forwards = 2\npass_seconds = 0.2\nprofile_seconds = 0.2",
        program=["-c", HANGS],
    )
    try:
        assert process.notification() == "READY=1"
        exchange = Exchange(process.socket)
        job = job_for(tar, package)
        with (
            exchange.streaming(job, package, pieces(tar)) as stream,
            pytest.raises((http.client.IncompleteRead, ConnectionError)),
        ):
            stream.answer().read()
        assert process.process.wait(20) == 3
        assert not os.path.exists(process.socket)
        log = process.process.stderr.read()
    finally:
        process.close()
    assert "device cpu has failed and leaves service: a pass has not" in log
    assert "a defect" not in log
    assert "Traceback" not in log


COMPUTES = """
import sys, time, torch
from hapi_worker import main
from hapi_worker.execution import device_executor as executor

def run_prefix(*args, **where):
    matrix = torch.randn(1000, 1000)
    ended = time.monotonic() + 30
    while time.monotonic() < ended:
        matrix = torch.tanh(matrix @ matrix)

executor.run_prefix = run_prefix
sys.exit(main.main())
"""


def test_worker_exits_while_a_pass_runs(tmp_path):
    package, tar = small_package(), shard(40, size=80)
    process = Process(
        tmp_path, "drain_seconds = 0.5", program=["-c", COMPUTES]
    )
    try:
        assert process.notification() == "READY=1"
        exchange = Exchange(process.socket)
        job = job_for(tar, package)
        with exchange.streaming(job, package, pieces(tar)) as stream:
            assert stream.answer().status == 200
            started = time.monotonic()
            assert process.stop(signal.SIGTERM) == 0
            assert time.monotonic() - started < 10
        log = process.process.stderr.read()
    finally:
        process.close()
    assert "exits while threads are still busy" in log
    assert "terminate called" not in log


def test_systemd_that_is_not_there_is_not_asked(monkeypatch, tmp_path):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify_systemd("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify_systemd("READY=1")


def test_help_explains_the_command(capsys):
    from hapi_worker.main import main

    for option in ("--help", "--version"):
        with pytest.raises(SystemExit) as ended:
            main([option])
        assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "drain_seconds" in text
    assert "hapi-worker " in text
