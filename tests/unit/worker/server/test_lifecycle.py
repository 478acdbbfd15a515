"""The command: start, signals, drain, sockets, what it leaves behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from hapi_protocol.feature_reader import read_features
from hapi_worker.server.systemd import notify_systemd
from hapi_worker.server.unix_server import (
    SocketInUseError,
    remove_stale_socket,
)
from photos import shard
from waiting import until
from worker_under_test import (
    TIMEOUT_SECONDS,
    Exchange,
    UnixConnection,
    identity_of,
    in_two,
    job_for,
    pieces,
    running_worker,
    small_package,
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
        return self.process.wait(300)

    def close(self):
        self._notified.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(tmp_path):
    """Starts workers; none of them is left after the test."""
    with contextlib.ExitStack() as stack:

        def started(options="", **how):
            process = Process(tmp_path, options, **how)
            stack.callback(process.close)
            return process

        yield started


@pytest.fixture
def listen(tmp_path):
    """Makes listening sockets, as systemd does."""
    with contextlib.ExitStack() as stack:

        def listening(name):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stack.callback(listener.close)
            listener.bind(str(tmp_path / name))
            listener.listen()
            return listener

        yield listening


def test_hangup_reloads_limits_and_an_interrupt_ends_it_cleanly(start):
    process = start()
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
    exchange = Exchange(process.socket)
    for _ in range(2):
        assert exchange.ask(job_for(b"x")).status == 201
    package, source = small_package(), shard(2)
    model = identity_of(package, "m\nERROR root: forged\x1b[2J.hapi")
    job = job_for(source, package, charged_account="AUTH_b", model=model)
    exchange.run(job, package, source)
    for admin in (False, True):
        assert exchange.request("GET", "/healthz", admin=admin).status == 200
    assert process.stop(signal.SIGINT) == 0
    assert process.notification() == "STOPPING=1"
    assert not os.path.exists(process.socket)
    log = process.process.stderr.read()
    assert "draining" in log.splitlines()[-1]
    assert log.count("the configuration is reloaded") == 2
    assert "these options need a new start: socket_mode" in log
    assert "go on as before: [hapi-worker] has the unknown option" in log
    assert r"m\nERROR root: forged\x1b[2J.hapi" in log
    assert "\x1b" not in log


def test_sockets_that_systemd_holds_are_used_and_left(start, listen):
    listeners = [listen(f"worker.sock{end}") for end in ("", ".admin")]
    process = start(listeners=listeners)
    # A connection that precedes the worker waits.
    connection = UnixConnection(process.socket, TIMEOUT_SECONDS)
    connection.request("GET", "/healthz")
    assert process.notification() == "READY=1"
    assert connection.getresponse().status == 200
    connection.close()
    assert process.stop(signal.SIGTERM) == 0
    assert all(os.path.exists(each.getsockname()) for each in listeners)


def test_socket_of_another_path_is_refused_by_name(start, listen):
    process = start(listeners=[listen("other.sock")])
    assert process.process.wait(300) == 1
    assert "other.sock" in process.process.stderr.read()
    assert not os.path.exists(process.socket + ".admin")


def test_torchvision_of_another_torch_stops_the_start(
    start, tmp_path, monkeypatch
):
    facts = tmp_path / "torchvision-0.1.dist-info" / "METADATA"
    facts.parent.mkdir()
    facts.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1")
    package = tmp_path / "torchvision"
    package.mkdir()
    for name in ("__init__.py", "image.so"):  # no library
        (package / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    process = start()
    assert process.process.wait(300) == 1
    log = process.process.stderr.read()
    assert (
        "cannot start: torchvision 0.1 cannot decode JPEGs with torch "
        f"{torch.__version__}: "
    ) in log
    assert "install the torchvision of this torch's release" in log


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
    with running_worker(tmp_path, drain_seconds=20.0) as worker:
        job = job_for(tar, package)
        with worker.streaming(
            job, package, in_two(tar, go_on, 50_000)
        ) as stream:
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


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_job_without_its_first_sample_is_refused_after_the_drain(
    tmp_path, num_bytes
):
    tar = shard(4, size=80)
    go_on = threading.Event()
    body = in_two(tar, go_on, num_bytes)
    with running_worker(tmp_path, drain_seconds=0.2) as worker:
        with worker.streaming(job_for(tar), None, body) as stream:
            until(lambda: worker.worker.admission.num_running() == 1)
            assert not worker.service.drain()
            started = time.monotonic()
            worker.service.end()
            assert time.monotonic() - started < 20
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


def test_worker_ends_when_its_last_device_hangs(start):
    package, tar = small_package(), shard(40, size=80)
    process = start(
        "forwards = 2\npass_seconds = 0.2\nprofile_seconds = 0.2",
        program=["-c", HANGS],
    )
    assert process.notification() == "READY=1"
    exchange = Exchange(process.socket)
    job = job_for(tar, package)
    with (
        exchange.streaming(job, package, pieces(tar)) as stream,
        pytest.raises((http.client.IncompleteRead, ConnectionError)),
    ):
        stream.answer().read()
    assert process.process.wait(300) == 3
    assert not os.path.exists(process.socket)
    log = process.process.stderr.read()
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


def test_worker_exits_while_a_pass_runs(start):
    package, tar = small_package(), shard(40, size=80)
    process = start("drain_seconds = 0.5", program=["-c", COMPUTES])
    assert process.notification() == "READY=1"
    exchange = Exchange(process.socket)
    job = job_for(tar, package)
    with exchange.streaming(job, package, pieces(tar)) as stream:
        assert stream.answer().status == 200
        started = time.monotonic()
        assert process.stop(signal.SIGTERM) == 0
        assert time.monotonic() - started < 25
    log = process.process.stderr.read()
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
