"""Jobs that plan for themselves, over a real Swift and a real worker."""

import io
import itertools
import json
import threading
import time

import pytest
from typer.testing import CliRunner

from hapi_client.cli.main import app
from hapi_client.data.index import load_index
from hapi_client.loading import early_reads
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.planning import client_facts
from hapi_client.planning.sample_probe import MAX_SAMPLES, read_samples
from hapi_client.swift.swift_url import Location
from hapi_protocol import versions
from hapi_protocol.errors import ClientError
from hapi_splitter.planner.problem import RAW_ROUTE, Route
from hapi_training.loop import train_tail
from hapi_training.recipe import Recipe
from jobs import connected, small_job, upload_shards
from photos import shards_of
from slow_link import slow_link

NUM_SHARDS = 6
PER_SHARD = 8
NUM_SAMPLES = NUM_SHARDS * PER_SHARD


@pytest.fixture(scope="module")
def photos(connection):
    shards = shards_of([PER_SHARD] * NUM_SHARDS)
    return upload_shards(connection, Location("planning", "photos"), shards)


def job_of(connection, place, **options):
    return small_job(place, connection=connection, batch_size=8, **options)


@pytest.mark.parametrize(
    ("max_bytes", "images"), [(1.0, 1), (float("inf"), MAX_SAMPLES)]
)
def test_fewer_samples_are_measured_on_a_slow_link(
    connection, photos, max_bytes, images
):
    index = load_index(connection, photos)
    spans = index.spans(container=photos.container)
    probe = read_samples(connection, spans, max_bytes=max_bytes)
    assert len(probe.members) == images
    assert probe.span_samples == PER_SHARD
    assert len(set(probe.members)) == images
    # The mean of all samples, not only of those that were read.
    sizes = [row.length for span in spans for row in span.rows]
    assert probe.bytes_each == pytest.approx(sum(sizes) / NUM_SAMPLES)


def test_mixed_routes_are_measured(connection, photos):
    with job_of(connection, photos, cut="freeze") as job:
        last, middle = job.num_cuts, max(1, job.num_cuts // 2)
        job.pipeline._factory.scheduler.change(
            {
                RAW_ROUTE: 0.4,
                Route(last, "float32"): 0.3,
                Route(middle, "float32;zstd"): 0.3,
            }
        )
        train_tail(job, epochs=2, recipe=Recipe(0.01))
        seen = job.pipeline._factory.recorder.take()

    assert sum(seen.samples.values()) == 2 * NUM_SAMPLES
    assert len(seen.samples) == 3
    assert seen.pushed.samples > 0
    assert seen.pushed.server_cpu_seconds > 0
    assert seen.load is not None


def train_until(job, is_so):
    """Reads whole epochs until a condition is met."""
    deadline = time.monotonic() + 90
    for epoch in itertools.count():
        if is_so():
            return
        assert (
            sum(len(y) for _, y in job.pipeline.loader(epoch)) == NUM_SAMPLES
        )
        assert time.monotonic() < deadline


def test_short_job_plans_without_a_measurement(
    cluster, connection, photos, monkeypatch
):
    monkeypatch.setattr(client_facts, "MIN_MEASURED_SECONDS", 1e9)
    with (
        slow_link(cluster.auth_url, 200_000) as url,
        connected(cluster, auth_url=url) as slow,
        job_of(slow, photos, epochs=1e6) as job,
    ):
        train_until(job, lambda: job.plan is not None and job.plan.pushes)
        assert job.pipeline.plan.planner._client.probe.facts is None
        assert sum(len(y) for _, y in job.pipeline.loader(0)) == NUM_SAMPLES
        assert job.stats.samples_by_cut[job.num_cuts] > 0


def test_package_is_stored_first_if_it_pays_by_its_bytes(
    cluster, connection, photos, monkeypatch, new_split
):
    monkeypatch.setattr(early_reads, "MIN_RATE_SECONDS", 0.0)
    monkeypatch.setattr(
        client_facts.ClientFacts, "request", lambda client: True
    )
    with (
        slow_link(cluster.auth_url, 200_000) as url,
        connected(cluster, auth_url=url) as slow,
        job_of(slow, photos, epochs=1e6) as job,
    ):
        train_until(
            job, lambda: job.pipeline.plan.planner._worker.model is not None
        )
        assert job.plan is None
        assert job.stats.samples_by_cut.keys() == {0}


@pytest.mark.usefixtures("frequent_plans")
def test_job_plans_while_it_trains(connection, photos):
    with job_of(connection, photos, epochs=1e6) as job:
        assert job.plan is None
        assert job.cut == "auto"
        train_until(job, lambda: job.plan is not None)
        for epoch in range(20):
            assert (
                sum(len(y) for _, y in job.pipeline.loader(epoch))
                == NUM_SAMPLES
            )
        plan, problem, changes = job.plan, job.problem, job.plan_changes
        reports = job.reports

    assert sum(weight for _, weight in plan.mix) == pytest.approx(1.0)
    assert len(problem.options) > 1
    assert changes[0].why
    assert changes[0].samples_per_second > 0
    assert (reports[-1].plan, reports[-1].limited_by) == (
        plan.label,
        plan.binding,
    )
    assert reports[0].predicted_samples_per_second is None
    assert reports[-1].predicted_samples_per_second > 0
    assert reports[-1].measured_per_predicted > 0
    assert sum(each.plan_changes for each in reports) == len(changes)
    assert sum(each.loop_seconds["planning"] for each in reports) > 0
    for change in changes:
        assert sum(change.mix.values()) == pytest.approx(1.0)


def test_resumed_job_has_fewer_remaining_epochs(connection, photos):
    with job_of(connection, photos, epochs=10) as job:
        for _ in job.pipeline.loader(0):
            pass
        assert (
            job.pipeline.plan.planner._problem.remaining_epochs()
            == pytest.approx(9.0)
        )
        state = job.state_dict()
    with job_of(connection, photos, epochs=10) as job:
        assert (
            job.pipeline.plan.planner._problem.remaining_epochs()
            == pytest.approx(10.0)
        )
        job.load_state_dict(state)
        assert (
            job.pipeline.plan.planner._problem.remaining_epochs()
            == pytest.approx(9.0)
        )
        for epoch in (1, 2):
            for _ in job.pipeline.loader(epoch):
                pass
        assert (
            job.pipeline.plan.planner._problem.remaining_epochs()
            == pytest.approx(7.0)
        )
        job.load_state_dict(state)
        assert (
            job.pipeline.plan.planner._problem.remaining_epochs()
            == pytest.approx(9.0)
        )


def test_remaining_epochs_count_samples_of_all_ranks(
    connection, photos, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with job_of(connection, photos, epochs=10) as job:
        assert (
            sum(len(y) for _, y in job.pipeline.loader(0)) == NUM_SAMPLES // 2
        )
        assert (
            job.pipeline.plan.planner._problem.remaining_epochs()
            == pytest.approx(9.0)
        )


def test_job_reads_raw_if_no_plan_can_be_made(
    connection, photos, monkeypatch, caplog
):
    monkeypatch.setattr(versions, "VERSIONS", (2,))
    with pytest.raises(ClientError) as caught:
        job_of(connection, photos, cut="freeze")
    assert caught.value.code == "unsupported_version"
    with job_of(connection, photos, epochs=1e6) as job:
        train_until(job, lambda: job.pipeline.plan.planner.wait(0))

        assert job.plan is None
    assert "no plan, raw reads" in caplog.text
    assert "supports version 1 of the protocol" in caplog.text


def test_closing_a_job_ends_its_planning_at_once(
    connection, photos, monkeypatch
):
    waiting = threading.Event()

    def upload(region, connection, container):
        # Like a package of many gigabytes: it ends with its socket.
        waiting.set()
        connection.put(container, "endless", _EndlessFile(), 2**40)

    monkeypatch.setattr(FrozenRegion, "store", upload)
    with job_of(connection, photos, epochs=1e6) as job:
        train_until(job, waiting.is_set)
        started = time.monotonic()
    assert time.monotonic() - started < 30
    assert not job.pipeline.plan.planner._thread.is_alive()


class _EndlessFile(io.BytesIO):
    """A file without an end."""

    def read(self, size=-1):
        time.sleep(0.05)
        return b"x" * min(size, 4096)


def test_plan_command_measures_the_data_set_and_the_worker(
    cluster, photos, tmp_path, monkeypatch
):
    module = tmp_path / "own_networks.py"
    module.write_text(
        "from networks import small_network\n"
        "def build():\n"
        "    return small_network()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    result = CliRunner().invoke(
        app,
        [
            "--auth", cluster.auth_url,
            "--user", cluster.user,
            "--key", cluster.key,
            "plan", "own_networks:build",
            "--freeze", "body",
            "--size", "32",
            "--data", str(photos),
            "--measure",
            "--epochs", "10",
            "--plot", str(tmp_path / "plan.html"),
            "--json", str(tmp_path / "plan.json"),
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Plan:" in result.output
    assert "static" in result.output
    assumed = [
        line
        for line in result.output.splitlines()
        # Tests may run concurrently.
        if line.startswith("assumed: ") and "other processes" not in line
    ]
    assert assumed == []
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["samples"] == NUM_SAMPLES
    assert found["link_bytes_per_second"] > 0
    assert set(found["plans"]) == {"auto", "stream", "freeze", "static"}
    assert (tmp_path / "plan.html").stat().st_size > 10_000
