"""Reports of epochs over a real Swift and a real worker."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Mapping

import pytest

from hapi_client import ReadConfig
from hapi_client.loading import read_config
from hapi_client.reports.run_report import read_reports
from hapi_client.swift.retry import Backoff
from hapi_client.swift.swift_url import Location
from hapi_splitter.planner.problem import RAW_ROUTE, Route
from hapi_training import VirtualNodes
from jobs import small_job, upload_shards
from photos import shards_of

NUM_SHARDS, PER_SHARD = 6, 8
NUM_SAMPLES = NUM_SHARDS * PER_SHARD
STEP_SECONDS = 0.02
QUICK = ReadConfig(num_threads=2)
pytestmark = pytest.mark.usefixtures("no_early_reads")


@pytest.fixture(autouse=True)
def _two_attempts(monkeypatch):
    backoff = Backoff(attempts=2, first_seconds=0.05)
    monkeypatch.setattr(read_config, "SPAN_BACKOFF", backoff)


@pytest.fixture(scope="module")
def photos(connection):
    shards = shards_of([PER_SHARD] * NUM_SHARDS)
    return upload_shards(connection, Location("reports", "photos"), shards)


def job_of(connection, place, **options):
    return small_job(
        place,
        batch_size=8,
        connection=connection,
        **{"read": QUICK, **options},
    )


def train(job, epoch):
    """Runs an epoch; returns its report and the growth of the job's stats."""
    before = job.stats
    for features, _ in job.pipeline.loader(epoch):
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


def test_reports_of_streamed_epochs_add_up(connection, photos, tmp_path):
    with job_of(connection, photos, cut="stream") as job:
        assert job.reports == []
        first, _ = train(job, 0)
        second, _ = train(job, None)
        reports = job.reports
        job.write_report(tmp_path / "run.json", "mine")
        job.write_report(tmp_path / "run.html", "mine")
    assert list(read_reports(tmp_path / "run.json").reports) == reports
    assert "<h1>mine</h1>" in (tmp_path / "run.html").read_text()
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
    [("", 0, False), ("1", 0, True), ("1", 1, False)],
)
def test_bar_is_shown_by_the_first_rank_on_a_terminal(
    connection, photos, monkeypatch, progress, rank, is_shown
):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("HAPI_PROGRESS", progress)
    with job_of(connection, photos, cut="stream") as job:
        for number, _ in enumerate(job.pipeline.loader(3)):
            if number == 4:
                break
        (report,) = job.reports
    assert ("epoch 3" in sys.stderr.getvalue()) == is_shown
    assert (report.samples, report.expected_samples) == (20, 24)
    assert not report.is_finished


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
        job.pipeline._factory.scheduler.change(
            {RAW_ROUTE: 0.5, Route(last, "float32"): 0.5}
        )
        report, _ = train(job, 0)
    assert set(report.samples_by_cut) == {0, last}
    assert report.plan == f"50 % stream + 50 % cut {last} · float32"
    check_storage(report)


def test_objects_describe_themselves(connection, photos):
    with job_of(connection, photos, cut="freeze") as job:
        dataset = job.dataset()
        assert str(photos) in repr(dataset)
        assert f"{NUM_SAMPLES} in batches of 8" in repr(job)
        loader = repr(job.train_loader)
        assert loader == f"Loader of 'train', epoch 0\n{job!r}"
        nodes = VirtualNodes(job.tail, 8)
        assert repr(nodes) == "VirtualNodes(8) on 1 worker, step 0"
        assert "<th" in dataset._repr_html_()
        assert "frozen up to: body" in repr(job.frozen)
        assert repr(job.reports) == "no epoch has begun"
    with job_of(connection, photos) as job:
        assert "cut: auto: " in repr(job)
        train(job, 0)
        plan = job.plan or job.pipeline.plan.planner.plan
        assert plan is None or "predicted: " in repr(plan)
