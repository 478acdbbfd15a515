"""``benchmarks.worker``: its loop, its clients, and what it makes of both."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import tight_loop
from benchmarks.remote import Remote, RemoteError
from benchmarks.stream_client import StreamClient
from benchmarks.worker import (
    arguments_of,
    cell,
    report,
    thread_splits,
)
from benchmarks.worker_process import (
    ROOT,
    at_once,
    client_process,
    running_worker,
)

import worker_under_test
from photos import shard
from worker_under_test import WorkerUnderTest, small_package

NUM_SAMPLES = 12
SECONDS = 1.0


@pytest.fixture(scope="module")
def tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tars") / "shard.tar"
    path.write_bytes(shard(NUM_SAMPLES, size=80))
    return path


# -- the loop ---------------------------------------------------------------


def test_loop_imports_nothing_of_ours() -> None:
    tree = ast.parse(inspect.getsource(tight_loop))
    modules = {
        name
        for node in ast.walk(tree)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    assert "torch" in modules
    assert not [name for name in modules if name.startswith("hapi")]
    # Which imports nothing of HAPI either.
    ours = {name for name in modules if name.startswith("benchmarks")}
    assert ours == {"benchmarks.preset"}


def run_loop(
    tar: Path, decode_threads: int
) -> subprocess.CompletedProcess[str]:
    settings = {
        "tar": str(tar),
        "model": "mobilenet_v3_small",
        "head": "classifier",
        "device": "cpu",
        "batch": 2,
        "channels_last": True,
        "decode_threads": decode_threads,
        "forward_threads": 1,
        "torch_threads": 1,
        "seconds": SECONDS,
    }
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.tight_loop"],
        input=json.dumps(settings),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )


@pytest.mark.parametrize("decode_threads", [0, 2])
def test_loop_runs_the_model_on_decoded_photographs(
    tar: Path, decode_threads: int
) -> None:
    done = run_loop(tar, decode_threads)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples_per_second"] > 0


def test_threads_share_the_cores_in_every_way_once() -> None:
    splits = thread_splits(2)
    as_tuples = [tuple(each.values()) for each in splits]
    assert len(set(as_tuples)) == len(splits)
    assert (0, 2, 1) in as_tuples  # each thread decodes and computes
    assert (1, 1, 1) in as_tuples
    assert (2, 1, 2) in as_tuples
    assert all(each["forward_threads"] >= 1 for each in splits)


# -- the clients ------------------------------------------------------------


def opened(
    worker: WorkerUnderTest, tar: Path, owner: str | None = None
) -> StreamClient:
    package = tar.with_name("model.hapi")
    package.write_bytes(small_package())
    client = StreamClient()
    client.open(
        worker.config.socket,
        "AUTH_bench",
        str(package),
        str(tar),
        cut=1,
        encoding="float16",
        owner=owner,
    )
    return client


def test_clients_read_shard_after_shard(tar: Path, tmp_path: Path) -> None:
    with worker_under_test.running_worker(tmp_path) as worker:
        client = opened(worker, tar)
        begin = time.monotonic()
        found = client.run(begin, begin + SECONDS, streams=2)
        assert worker.idle()
    assert found["shards"] >= 2
    assert found["refused"] == 0
    times, counts = zip(*found["progress"], strict=True)
    assert counts[-1] == NUM_SAMPLES * found["shards"]
    assert list(counts) == sorted(counts)
    assert begin <= times[0] < times[-1]
    assert found["cpu_seconds"] > 0


def test_clients_wait_for_places(tar: Path, tmp_path: Path) -> None:
    options = {
        "max_streams": 2,
        "max_streams_per_account": 1,
        "queue_seconds": 0.01,
    }
    with worker_under_test.running_worker(tmp_path, **options) as worker:
        client = opened(worker, tar)
        begin = time.monotonic()
        found = client.run(begin, begin + SECONDS, streams=3)
    assert found["refused"] > 0
    assert found["progress"][-1][1] == NUM_SAMPLES * found["shards"] > 0


def test_clients_wait_as_long_as_the_worker_says(
    tar: Path, tmp_path: Path
) -> None:
    options = {"max_streams": 1, "queue_seconds": 0.01}
    with worker_under_test.running_worker(tmp_path, **options) as worker:
        client = opened(worker, tar)
        job = worker.ask(replace(client._job, charged_account="AUTH_other"))
        assert job.status == 201
        begun = time.monotonic()
        found = client.run(begun, begun + SECONDS, streams=1)
        # Once: it is not asked again before the two seconds are over.
        assert (found["refused"], found["shards"]) == (1, 0)
        assert found["unfinished"] == 1
        assert SECONDS <= time.monotonic() - begun < 2 * SECONDS


def test_clients_end_what_they_began_in_a_time_of_grace(
    tar: Path, tmp_path: Path
) -> None:
    options = {
        "max_streams": 1,
        "grant_seconds": 1.0,
        "queue_seconds": 0.01,
    }
    with worker_under_test.running_worker(tmp_path, **options) as worker:
        client = opened(worker, tar)
        assert worker.ask(client._job).status == 201  # lapses unused
        now = time.monotonic()
        found = client.run(now, now + SECONDS, streams=1, grace=30.0)
    assert (found["refused"], found["unfinished"]) == (1, 0)
    assert found["shards"] == 1


def test_clients_do_a_piece_of_work_and_say_what_it_cost(
    tar: Path, tmp_path: Path
) -> None:
    with worker_under_test.running_worker(tmp_path) as worker:
        client = opened(worker, tar)
        begin = time.monotonic()
        found = client.work(begin, streams=2, shards=3, limit=60.0)
        elapsed = time.monotonic() - begin
        assert found["shards"] == 3
        assert found["progress"][-1][1] == 3 * NUM_SAMPLES
        costs = [seconds for _, seconds in found["costs"]]
        assert costs == sorted(costs)
        # One thread for the forward and two that decode.
        assert 0 < costs[-1] < 3 * elapsed
        assert 0 < found["longest_seconds"] <= elapsed
        assert found["uploads"] == 0
        with pytest.raises(ValueError, match="0 of 2 shards came in 0 s"):
            client.work(time.monotonic(), streams=1, shards=2, limit=0.0)


def test_clients_upload_a_model_that_is_gone(
    tar: Path, tmp_path: Path
) -> None:
    with worker_under_test.running_worker(tmp_path) as worker:
        client = opened(worker, tar)
    with worker_under_test.running_worker(tmp_path):
        found = client.work(time.monotonic(), streams=2, shards=4, limit=60.0)
        assert (found["shards"], found["uploads"]) == (4, 1)


def test_clients_pay_with_another_account_than_the_owner(
    tar: Path, tmp_path: Path
) -> None:
    with worker_under_test.running_worker(tmp_path) as worker:
        client = opened(worker, tar, owner="AUTH_owner")
        client.work(time.monotonic(), streams=1, shards=1, limit=60.0)
    assert client._job.charged_account == "AUTH_bench"
    assert client._job.model is not None
    assert client._job.model.account == "AUTH_owner"


def test_damaged_photographs_end_the_benchmark(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(shard(2, size=80).replace(b"\xff\xd8", b"\0\0"))
    with worker_under_test.running_worker(tmp_path) as worker:
        client = opened(worker, damaged)
        now = time.monotonic()
        with pytest.raises(ValueError, match="neither a JPEG nor a PNG"):
            client.run(now, now + SECONDS, streams=1)


def test_nothing_hangs_when_a_client_gives_up(tmp_path: Path) -> None:
    # More features than fit a socket that nobody reads, so that the worker
    # stops to read as well, with most of the shard still to be sent.
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(shard(300, size=240).replace(b"\xff\xd8", b"\0\0", 1))
    options = {"buffer_bytes": 1 << 20, "stall_seconds": 60.0}
    with worker_under_test.running_worker(tmp_path, **options) as worker:
        client = opened(worker, damaged)
        now = time.monotonic()
        with pytest.raises(ValueError, match="neither a JPEG nor a PNG"):
            client.run(now, now + SECONDS, streams=1)
        assert time.monotonic() - now < 30
        assert worker.idle()


def test_loop_that_fails_ends(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(shard(2, size=80).replace(b"\xff\xd8", b"\0\0"))
    done = run_loop(damaged, decode_threads=1)
    assert done.returncode == 1
    assert "decode_jpeg" in done.stderr


# -- the verdict ------------------------------------------------------------


def test_efficiency_is_the_median_of_paired_ratios() -> None:
    rounds = [
        {"engine": 80.0, "loop": 100.0, "client_seconds": 1e-4},
        {"engine": 45.0, "loop": 50.0, "client_seconds": 1e-4},
        {"engine": 95.0, "loop": 100.0, "client_seconds": 1e-4},
    ]
    sweep = [{"batch": 8, "samples_per_second": 100.0}]
    found = cell("resnet18", 4, rounds, sweep)
    assert found["efficiency"] == pytest.approx(0.9)
    assert found["interval"] == pytest.approx((0.8, 0.95))
    assert found["engine_samples_per_second"] == 80.0
    assert found["loop_samples_per_second"] == 100.0
    assert (found["rounds"], found["sweep"]) == (rounds, sweep)
    assert (
        "resnet18, 4 clients: 80.0 samples/s through the socket, 100.0 in the"
        " loop: 0.900 (0.800 to 0.950); goal 0.9" in report([found], 0.9)
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "1"], "--rounds is 1; two or more"),
        (["--seconds", "0.5"], "must be 1 or more"),
        (["--options", "max_batch"], "'max_batch' is not KEY=VALUE"),
    ],
)
def test_arguments_that_cannot_be_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments_of(arguments)
    assert said in capsys.readouterr().err


def test_models_are_those_of_the_device() -> None:
    data = ["--data", "somewhere"]
    assert arguments_of(data).models == ["resnet18", "mobilenet_v3_small"]
    assert arguments_of([*data, "--device", "cuda"]).models == ["resnet50"]


def test_worker_that_does_not_start_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(ValueError, match=r"did not start \(status 2\)"),
        running_worker(tmp_path, "cpu", ["no_such_option = 1"]),
    ):
        pytest.fail("it runs")
    assert "no_such_option" in capfd.readouterr().err


def test_worker_of_the_benchmark_ends_with_it(tmp_path: Path) -> None:
    seen: Any = SimpleNamespace(path=None)
    with running_worker(tmp_path, "cpu", ["max_batch = 4"]) as path:
        seen.path = path
        assert path.is_socket()
    assert not seen.path.exists()


def test_clients_end_together_when_one_fails(tmp_path: Path) -> None:
    clients = [client_process(f"client {number}") for number in range(2)]

    def ask(client: Remote) -> None:
        if client is clients[0]:
            raise ValueError("the first")
        client.ask("nonsense", seconds=60.0)

    with pytest.raises(ValueError, match="the first"):
        at_once(clients, ask)
    for client in clients:
        with pytest.raises(ProcessLookupError):
            os.kill(client.pid, 0)


def test_client_that_is_left_ends_after_its_shard(
    tar: Path, tmp_path: Path
) -> None:
    """Not when its time is over."""
    with worker_under_test.running_worker(tmp_path) as worker:
        package = tar.with_name("model.hapi")
        package.write_bytes(small_package())
        client = client_process("the client")
        client.ask(
            "open",
            seconds=60.0,
            path=worker.config.socket,
            account="AUTH_bench",
            package=str(package),
            shard=str(tar),
            cut=1,
            encoding="float32",
        )
        now = time.monotonic()
        with pytest.raises(RemoteError, match="no answer within 1 s"):
            client.ask("run", seconds=1.0, begin=now, end=now + 300, streams=2)
        left = time.monotonic()
        client.close()
        assert time.monotonic() - left < 20
