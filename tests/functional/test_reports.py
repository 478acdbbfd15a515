"""Reports of epochs over a real Swift and a real worker."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from hapi_client import ReadConfig
from hapi_client.data.upload import upload
from hapi_client.progress import SilentReporter
from hapi_client.reports.run_report import read_reports
from hapi_client.swift.retry import Backoff
from hapi_client.swift.swift_url import Location
from hapi_splitter.planner.problem import RAW_ROUTE
from jobs import transfer_job
from networks import small_network, small_transform
from photos import shard
from screen import shown

NUM_SHARDS, PER_SHARD = 6, 8
NUM_SAMPLES = NUM_SHARDS * PER_SHARD
STEP_SECONDS = 0.02
QUICK = ReadConfig(
    num_threads=2,
    decode_threads=1,
    backoff=Backoff(attempts=2, first_seconds=0.05),
)


@pytest.fixture(scope="module")
def photos(connection, tmp_path_factory):
    place = Location("reports", "photos")
    folder: Path = tmp_path_factory.mktemp("shards")
    for number in range(NUM_SHARDS):
        (folder / f"{number}.tar").write_bytes(shard(PER_SHARD, seed=number))
    upload(connection, place, [folder], SilentReporter())
    return place


def job_of(connection, place, **options):
    return transfer_job(
        small_network(),
        freeze="body",
        data=str(place),
        batch_size=8,
        transform=small_transform(),
        connection=connection,
        **{"read": QUICK, **options},
    )


def train(job, epoch):
    """Runs an epoch; returns its report and the growth of the job's stats."""
    before = job.stats
    for features, _ in job.loader(epoch):
        job.tail(features)
        time.sleep(STEP_SECONDS)
    report, grown = job.reports[-1], job.stats - before
    check_sums(report, grown)
    return report, grown


def check_sums(report, grown):
    assert report.is_finished
    assert report.samples == report.expected_samples == NUM_SAMPLES
    assert report.samples == grown.samples
    assert sum(report.samples_by_cut.values()) == NUM_SAMPLES
    by_cut = {k: n for k, n in grown.samples_by_cut.items() if n}
    assert report.samples_by_cut == by_cut
    assert report.received_bytes + report.sent_bytes == grown.bytes
    assert report.retries == grown.retries
    assert report.fallbacks == grown.fallbacks
    assert report.cached_samples == grown.cached
    assert report.seconds == pytest.approx(grown.seconds, rel=0.2, abs=0.1)
    loop = report.loop_seconds
    assert loop["training"] >= NUM_SAMPLES / 8 * STEP_SECONDS
    assert sum(loop.values()) <= report.seconds
    assert report.samples_per_second == NUM_SAMPLES / report.seconds


def check_storage(report):
    """Checks the worker's times against those of the requests."""
    seconds: Mapping[str, float] = report.storage_seconds
    assert min(seconds[name] for name in ("decode", "forward", "encode")) > 0
    assert report.storage_cpu_seconds > 0
    # At most all cores of the worker during the requests.
    worker_seconds = seconds["forward"] + seconds["encode"]
    assert worker_seconds <= report.fetch_seconds["fetch"]
    assert report.fetch_seconds["decode"] > 0


def test_reports_of_streamed_epochs_add_up(connection, photos):
    with job_of(connection, photos, cut="stream") as job:
        assert job.reports == []
        first, _ = train(job, 0)
        second, _ = train(job, None)
        reports = job.reports
    assert reports == [first, second]
    assert [each.name for each in reports] == ["epoch 0", "train, in order"]
    for report in reports:
        assert report.samples_by_cut == {0: NUM_SAMPLES}
        assert report.plan == "stream"
        assert report.requests == NUM_SHARDS
        assert sum(report.storage_seconds.values()) == 0
        assert min(report.fetch_seconds.values()) > 0
        assert report.predicted_samples_per_second is None


@pytest.mark.parametrize(
    ("progress", "rank", "is_shown"),
    [(None, 0, False), (True, 0, True), (True, 1, False)],
)
def test_bar_is_shown_by_the_first_rank_on_a_terminal(
    connection, photos, monkeypatch, progress, rank, is_shown
):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = {"cut": "stream", "progress": progress}
    with job_of(connection, photos, **options) as job:
        for number, _ in enumerate(job.loader(3)):
            if number == 4:
                break
        (report,) = job.reports
    assert ("epoch 3" in sys.stderr.getvalue()) == is_shown
    assert (report.samples, report.expected_samples) == (20, 24)
    assert not report.is_finished


def test_report_is_written_by_the_job(connection, photos, tmp_path):
    with job_of(connection, photos, cut="stream") as job:
        report, _ = train(job, 0)
        job.write_report(tmp_path / "run.json", "mine")
        job.write_report(tmp_path / "run.html", "mine")
    assert read_reports(tmp_path / "run.json").reports == (report,)
    assert "<h1>mine</h1>" in (tmp_path / "run.html").read_text()


def test_report_of_push_down_covers_client_and_storage(connection, photos):
    with job_of(connection, photos, cut=1, encoding="float16") as job:
        report, _ = train(job, 0)
    assert report.samples_by_cut == {1: NUM_SAMPLES}
    assert report.plan == "cut 1 · float16"
    assert report.limited_by == ()
    assert report.requests >= NUM_SHARDS
    check_storage(report)


def test_report_of_a_mix_has_all_routes(connection, photos):
    with job_of(connection, photos, cut="freeze") as job:
        last = job.num_cuts
        job._factory.scheduler.change({RAW_ROUTE: 0.5, (last, "float32"): 0.5})
        report, _ = train(job, 0)
    assert set(report.samples_by_cut) == {0, last}
    assert report.plan == f"50 % stream + 50 % cut {last} · float32"
    check_storage(report)


def test_cached_features_take_no_time_of_the_worker(connection, photos):
    with job_of(connection, photos, cut="freeze", cache="readwrite") as job:
        first, _ = train(job, 0)
        second, _ = train(job, 1)
    assert first.cached_samples == 0
    check_storage(first)
    assert second.cached_samples == NUM_SAMPLES
    assert sum(second.storage_seconds.values()) == 0
    assert second.storage_cpu_seconds == 0


def test_epoch_without_a_worker_has_fallbacks(cluster, connection, photos):
    with job_of(connection, photos, cut=1) as job:
        cluster.stop_worker()
        try:
            report, _ = train(job, 0)
        finally:
            cluster.restart_worker()
    assert report.samples_by_cut == {0: NUM_SAMPLES}
    assert report.fallbacks == NUM_SHARDS
    assert report.retries > 0
    assert "6 fallbacks" in str(report)


def test_nested_evaluation_has_its_own_bytes(connection, photos):
    with job_of(connection, photos, cut="stream") as job:
        before = job.stats.bytes
        for number, _ in enumerate(job.loader(0)):
            if number == 2:
                for _ in job.loader():
                    pass
        outer, inner = job.reports
        total = job.stats.bytes - before
    assert outer.epoch == 0
    assert inner.epoch is None
    both = (outer.received_bytes, inner.received_bytes)
    assert both[0] == both[1]
    assert sum(both) == total
    assert outer.loop_seconds["training"] >= inner.seconds


def hapi_train(cluster, photos, folder, *more):
    return [
        *(sys.executable, "-m", "hapi_client.cli.main"),
        *("--auth", cluster.auth_url, "--user", cluster.user),
        *("--key", cluster.key, "train", "--data", str(photos)),
        *("--classes", "4", "--cut", "stream", "--batch-size", "8"),
        *("--report", str(folder / "run.html")),
        *("--json", str(folder / "run.json"), *more),
    ]


def test_train_command_writes_a_report_and_shows_one_bar(
    cluster, photos, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", ":".join(p for p in sys.path if p))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
    child = subprocess.Popen(
        hapi_train(cluster, photos, tmp_path),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    text = b""
    while child.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            text += os.read(ours, 65536)
    os.close(theirs)
    os.close(ours)
    assert child.returncode == 0, text
    lines = shown(text.decode())
    assert any("| 0/48," in part for part in text.decode().split("\r"))
    assert not any("/48," in line for line in lines)
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["reports"][0]["samples"] == NUM_SAMPLES
    found = read_reports(tmp_path / "run.json").reports
    assert [each.name for each in found] == ["epoch 0"]
    assert any("samples/s ┃" in line for line in lines)
    page = (tmp_path / "run.html").read_text()
    assert f"resnet18 on {photos}" in page
    assert "<svg" in page
