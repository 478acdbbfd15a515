"""``benchmarks.requests``: its client, and what it makes of the times."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from benchmarks.request_client import RequestClient
from benchmarks.requests import (
    arguments_of,
    judge,
    report,
    round_of,
    trivial_package,
    trivial_shard,
)
from benchmarks.worker_process import process_seconds, worker_pid

import worker_under_test
from worker_under_test import WorkerUnderTest

NUM_REQUESTS = 5
DONE = {
    "grant": [0.001, 0.002, 0.003],
    "stream": [0.010, 0.012, 0.050],
    "own": [0.008, 0.009, 0.010],
    "own_cpu": [0.002, 0.002, 0.002],
    "cpu_seconds": 0.006,
}


def opened(
    worker: WorkerUnderTest, folder: Path, shard: Path
) -> RequestClient:
    client = RequestClient()
    client.open(
        worker.config.socket,
        "AUTH_bench",
        str(trivial_package(folder)),
        str(shard),
        cut=1,
        encoding="float32",
    )
    return client


def test_client_measures_each_of_its_jobs(tmp_path: Path) -> None:
    with worker_under_test.running_worker(tmp_path) as worker:
        client = opened(worker, tmp_path, trivial_shard(tmp_path))
        begun = time.monotonic()
        found = client.measure(NUM_REQUESTS)
        elapsed = time.monotonic() - begun
        assert worker.worker.metrics.value(
            "hapi_worker_samples_total"
        ) == pytest.approx(NUM_REQUESTS)
        assert worker.idle()
    assert sum(found["grant"]) + sum(found["stream"]) <= elapsed
    for name in ("grant", "stream", "own", "own_cpu"):
        assert len(found[name]) == NUM_REQUESTS
        assert min(found[name]) > 0
    for stream, own in zip(found["stream"], found["own"], strict=True):
        assert own < stream


def test_large_shard_is_refused(tmp_path: Path) -> None:
    large = tmp_path / "large.tar"
    large.write_bytes(bytes(1 << 20))
    with worker_under_test.running_worker(tmp_path) as worker:
        client = opened(worker, tmp_path, large)
        with pytest.raises(ValueError, match="1048576 bytes; at most 65536"):
            client.measure(1)


def test_work_on_the_samples_is_taken_off() -> None:
    found = round_of(DONE, worker_seconds=0.012)
    assert found["grant"]["median"] == pytest.approx(0.002)
    assert found["stream"]["median"] == pytest.approx(0.003)
    assert found["request"]["median"] == pytest.approx(0.005)
    assert found["request"]["percentile_95"] == pytest.approx(0.0392)
    assert found["worker_cpu"]["median"] == pytest.approx(0.004)
    assert found["worker_cpu_besides"]["median"] == pytest.approx(0.002)
    assert found["client_cpu"]["median"] == pytest.approx(0.002)


def test_goal_is_about_the_median_of_both_requests() -> None:
    fast = round_of({**DONE, "grant": [0.001] * 3}, worker_seconds=0.012)
    slow = round_of({**DONE, "grant": [0.009] * 3}, worker_seconds=0.012)
    met = judge([fast, fast, slow])
    assert met["met"]
    assert met["found"]["request"]["median"] == pytest.approx(0.004)
    assert met["found"]["request"]["interval"] == pytest.approx((0.004, 0.012))
    assert "request: 4.00 to 12.00 ms, goal at most 5 ms; met" in report(met)
    assert not judge([fast, slow, slow])["met"]


def test_worker_says_which_process_it_is(tmp_path: Path) -> None:
    with worker_under_test.running_worker(tmp_path) as worker:
        assert worker_pid(Path(worker.config.socket)) == os.getpid()


def test_seconds_of_a_process_are_those_of_all_its_threads() -> None:
    found = process_seconds(os.getpid())
    assert found == pytest.approx(time.process_time(), abs=0.5)
    assert found > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "1"], "--rounds is 1; two or more"),
        (["--requests", "0"], "--requests is 0; 1 or more"),
        (["--options", "max_batch"], "'max_batch' is not KEY=VALUE"),
    ],
)
def test_arguments_that_cannot_be_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments_of(arguments)
    assert said in capsys.readouterr().err
