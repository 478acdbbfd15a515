"""``benchmarks.filter``: its worker, its contenders, what it makes of them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks import filter as filter_benchmark
from benchmarks.filter import PARTS, arguments_of, judge, report
from benchmarks.filter_parts import (
    call_rounds,
    cpu_seconds,
    pinned,
    plain_env,
    reading_worker,
)
from benchmarks.reading_worker import BATCH_SAMPLES, ROW_BYTES, SAMPLE_BYTES

from filter_under_test import (
    MODEL,
    SOURCE,
    FilterUnderTest,
    annotation,
    stocked_swift,
)
from hapi_middleware.requests.annotation_request import is_annotated
from stub_worker import StubWorker

CPU = {
    "get_without": 2.0,
    "get_with": 2.02,
    "get_again": 2.04,
    "put_without": 3.0,
    "put_with": 3.03,
    "put_again": 3.0,
}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FilterUnderTest]:
    path = tmp_path / "reading.sock"
    with reading_worker(path):
        yield FilterUnderTest(stocked_swift(), StubWorker(str(path)))


@pytest.mark.parametrize("samples", [1, 7, 8, 80])
def test_worker_reads_all_and_answers_a_row_for_each_sample(
    world: FilterUnderTest, samples: int
) -> None:
    world.swift.put(SOURCE, bytes(samples * SAMPLE_BYTES))
    answer = world.send(headers=annotation())

    assert answer.status == 200
    batches = 1 + samples // BATCH_SAMPLES
    assert len(answer.body) == batches * BATCH_SAMPLES * ROW_BYTES
    world.swift.assert_nothing_is_open()


def test_worker_knows_every_model(world: FilterUnderTest) -> None:
    head = world.send("HEAD", headers=annotation())

    names = {name.lower() for name in head.headers}
    assert (head.status, "etag" in names) == (200, True)
    asked = [path for _, path, source in world.swift.requests() if source]
    assert asked == [f"/v1{SOURCE}", f"/v1{MODEL}"]


def test_source_that_is_cut_off_gets_no_whole_answer(
    world: FilterUnderTest,
) -> None:
    def stream() -> Iterator[bytes]:
        yield bytes(SAMPLE_BYTES)
        raise OSError("disk gone")

    found = world.swift.put(SOURCE, bytes(10 * SAMPLE_BYTES))
    found.stream = stream
    world.swift.may_be_unread = True
    with pytest.raises(Exception, match="could not be read"):
        world.send(headers=annotation())


def test_call_rounds_compare_a_filter_with_none() -> None:
    assert not is_annotated(plain_env())
    for each in call_rounds(2):
        assert 0 < each["without"] < each["with"] < 0.001


def test_cpu_seconds_are_those_of_all_threads() -> None:
    def work() -> None:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass
        worked.set()
        done.wait(10)

    worked, done = threading.Event(), threading.Event()
    before = cpu_seconds(os.getpid())
    thread = threading.Thread(target=work)
    thread.start()
    assert worked.wait(10)
    found = cpu_seconds(os.getpid()) - before
    done.set()
    thread.join()

    assert 0.1 <= found < 1


def test_a_process_is_pinned_for_a_block_only() -> None:
    usual = os.sched_getaffinity(0)
    core = min(usual)
    with pinned({core}):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == usual


def test_added_seconds_are_the_difference_of_each_round() -> None:
    rounds = [
        {"without": 1e-6, "with": 3e-6},
        {"without": 2e-6, "with": 5e-6},
        {"without": 1e-6, "with": 2e-6},
    ]
    verdict = judge("call", rounds)

    assert verdict["met"]
    assert verdict["found"]["added_seconds"]["median"] == pytest.approx(2e-6)
    assert "2.000 µs (1.000 to 3.000), goal at most 30" in report(
        "call", verdict
    )
    slow = judge("call", [{"without": 1e-6, "with": 32e-6}] * 2)
    assert not slow["met"]


def test_the_dearer_of_gets_and_puts_is_judged() -> None:
    verdict = judge("cpu", [CPU, CPU])
    assert verdict["met"]
    assert verdict["found"]["get_ratio"]["median"] == pytest.approx(1.01)
    assert verdict["found"]["get_noise"]["median"] == pytest.approx(1.02)
    dear = {**CPU, "put_with": 3.07}
    assert not judge("cpu", [dear, dear])["met"]


def test_a_ratio_is_that_of_one_round() -> None:
    rounds = [
        {"plain": 300e6, "features": 240e6, "again": 300e6},
        {"plain": 100e6, "features": 90e6, "again": 100e6},
    ]
    verdict = judge("bytes", rounds)

    assert verdict["found"]["ratio"]["median"] == pytest.approx(0.85)
    assert verdict["found"]["ratio"]["interval"] == pytest.approx((0.8, 0.9))
    assert verdict["met"]
    text = report("bytes", verdict)
    assert "0.850 (0.800 to 0.900), goal at least 0.7" in text
    assert "200.000 MB/s" in text
    assert not judge("samples", [{"swift": 8.0, "straight": 9.0}] * 2)["met"]


def test_every_figure_of_a_part_is_described() -> None:
    assert filter_benchmark.__doc__ is not None
    for name, part in PARTS.items():
        assert f"\n  {name}" in filter_benchmark.__doc__
        for figure in (*part.judged, *part.ratios):
            assert figure in filter_benchmark.__doc__


def test_results_are_written_after_each_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "filter.json"
    status = filter_benchmark.main(
        ["--parts", "call", "--quick", "--json", str(path)]
    )

    assert status == 0
    written: dict[str, Any] = json.loads(path.read_text())
    assert written["benchmark"] == "filter"
    assert list(written["parts"]) == ["call"]
    assert len(written["parts"]["call"]["rounds"]) == 2
    assert "added_seconds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "call", "--rounds", "1"], "--rounds is 1; two or more"),
        (["--parts", "speed"], "invalid choice: 'speed'"),
        (["--parts", "samples"], "give --data, or set HAPI_TEST_DATA"),
        (
            ["--parts", "call", "--options", "max_batch"],
            "'max_batch' is not KEY=VALUE",
        ),
    ],
)
def test_arguments_that_cannot_be_are_named(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HAPI_TEST_DATA", raising=False)
    with pytest.raises(SystemExit):
        arguments_of(arguments)
    assert said in capsys.readouterr().err
