"""Epochs under faults: every sample once, or an error with its cause."""

from __future__ import annotations

import io
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from PIL import Image

from gateway import Storm, gateway_to
from hapi_client import Connection, Credentials, ReadConfig
from hapi_client.data.indexing import update_index
from hapi_client.job import transfer_job
from hapi_client.loading import circuit_breaker, prefetcher, read_config
from hapi_client.planning import job_planner, job_problem, plan_chooser
from hapi_client.swift.http_client import ConnectionOptions
from hapi_client.swift.retry import Backoff
from hapi_client.swift.swift_url import parse_location
from hapi_cluster import Cluster
from hapi_protocol.errors import (
    HapiError,
    SourceChangedError,
    TruncatedStreamError,
)
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.planner.plan import static_at
from hapi_splitter.planner.problem import RAW_ROUTE, Route
from jobs import connected, small_job
from photos import shard, tar_of
from plain_traffic import PlainTraffic, Request
from waiting import until

NUM_SHARDS = 16
PER_SHARD = 15
NUM_SAMPLES = NUM_SHARDS * PER_SHARD
NUM_LARGE = 5
PER_LARGE = 32
CLIENT_SECONDS = "4"
"""Time for which the store waits for a client that does not read."""
PAUSE_SECONDS = 6.0
DATA = "swift://weather"
SOON = Backoff(attempts=8, first_seconds=0.05, max_seconds=0.5)
OPTIONS = ReadConfig(num_threads=2)
READING_CUTS = transfer_job.READING_CUTS


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch, no_early_reads):
    """Faults begin with the epoch, and end soon."""
    monkeypatch.setattr(prefetcher, "AHEAD_SPANS", 4)
    set_waits(monkeypatch, SOON, 0.2, 0.5)


def set_waits(monkeypatch, backoff, pause_seconds, max_pause_seconds):
    monkeypatch.setattr(read_config, "SPAN_BACKOFF", backoff)
    monkeypatch.setattr(circuit_breaker, "PAUSE_SECONDS", pause_seconds)
    monkeypatch.setattr(
        circuit_breaker, "MAX_PAUSE_SECONDS", max_pause_seconds
    )


def number_of(key):
    seed, number = key.removeprefix("s").split("-")
    return int(seed) * PER_SHARD + int(number)


def put(connection, name, tar):
    connection.put("weather", name, io.BytesIO(tar), len(tar))


def store(connection, num_shards, **photos):
    """Shards of photographs, and their index."""
    connection.put_container("weather")
    for number in range(num_shards):
        put(connection, f"s{number}.tar", shard(seed=number, **photos))
    update_index(connection, parse_location(DATA))


def large_shard(seed):
    """One span of 8 MB, which sockets do not hold."""
    random = np.random.default_rng(seed)
    members = []
    for number in range(PER_LARGE):
        noise = random.integers(0, 256, (512, 512, 3), dtype=np.uint8)
        sink = io.BytesIO()
        Image.fromarray(noise).save(sink, "JPEG", quality=90)
        key = f"s{seed}-{number:04d}"
        members += [(f"{key}.jpg", sink.getvalue()), (f"{key}.cls", b"0")]
    return tar_of(members)


@pytest.fixture(scope="module")
def data(fragile):
    with connected(fragile) as connection:
        store(connection, NUM_SHARDS, count=PER_SHARD, size=120)


@pytest.fixture(scope="module")
def impatient():
    """A connection to a store that drops clients which do not read."""
    swift_options = {
        "proxy-server.conf": {
            "app:proxy-server": {"client_timeout": CLIENT_SECONDS}
        }
    }
    with (
        Cluster.temporary(
            worker_options={"device": "cpu", "stall_seconds": CLIENT_SECONDS},
            swift_options=swift_options,
        ) as cluster,
        connected(cluster) as connection,
    ):
        connection.put_container("weather")
        for number in range(NUM_LARGE):
            put(connection, f"s{number}.tar", large_shard(number))
        update_index(connection, parse_location(DATA))
        yield connection


@pytest.fixture
def gateway(fragile):
    with gateway_to(fragile.proxy_url) as made:
        yield made


@pytest.fixture
def through(fragile, gateway):
    """A connection through the gateway."""
    auth_url = f"{gateway.url}/auth/v1.0"
    login = Credentials.v1(auth_url, fragile.user, fragile.key)
    with Connection(login, ConnectionOptions(backoff=SOON)) as connection:
        assert connection.storage_url.startswith(gateway.url)
        yield connection


def job_of(connection, **options):
    return small_job(
        DATA,
        connection=connection,
        **{
            "batch_size": 16,
            "labels": number_of,
            "cut": "freeze",
            "read": OPTIONS,
            **options,
        },
    )


def delivered(loader, step=lambda number: None):
    labels = []
    for number, (_, found) in enumerate(loader):
        labels += found.tolist()
        step(number)
    return labels


def mixed(job):
    """Half of the spans are pushed down, half are raw reads."""
    job.pipeline._factory.scheduler.change(
        {Route(job.num_cuts, "float32"): 0.5, RAW_ROUTE: 0.5}
    )


def test_faults_while_the_model_is_split_cost_no_sample(
    data, gateway, through, monkeypatch
):
    gateway.storm = Storm(refused=0.2, torn=0.2)
    monkeypatch.setattr(transfer_job, "READING_CUTS", READING_CUTS)
    for _ in range(5):
        with job_of(through, cut="stream") as job:
            labels = delivered(job.pipeline.loader(0))
        assert sorted(labels) == list(range(NUM_SAMPLES))
    gateway.storm = None
    assert all(gateway.happened[name] for name in ("refused", "torn"))


@pytest.mark.parametrize("ways", ["stream", "freeze", "mixed"])
@pytest.mark.parametrize(
    "storm",
    [
        Storm(refused=0.4),
        Storm(torn=0.3),
        Storm(refused=0.15, expired=0.1, torn=0.15),
    ],
    ids=["refused", "torn", "all"],
)
def test_faults_cost_retries_and_no_sample(
    data, gateway, through, ways, storm
):
    cut = "stream" if ways == "stream" else "freeze"
    with job_of(through, cut=cut) as job:
        if ways == "mixed":
            mixed(job)
        gateway.storm = storm
        labels = delivered(job.pipeline.loader(0))
        gateway.storm = None
        assert sorted(labels) == list(range(NUM_SAMPLES))
        assert job.stats.retries + job.stats.fallbacks > 0
    for name, share in vars(storm).items():
        assert bool(gateway.happened[name]) == bool(share)


@pytest.mark.parametrize("cut", ["stream", "freeze"])
def test_swift_that_is_away_for_long_is_waited_for(
    data, gateway, through, caplog, monkeypatch, cut
):
    """Refusals are more than the attempts of all requests and spans."""
    twice = Backoff(attempts=2, first_seconds=0.05, max_seconds=0.1)
    set_waits(monkeypatch, twice, 0.2, 0.5)
    with job_of(through, cut=cut) as job:
        gateway.storm = Storm(refused=1.0)
        refused = gateway.happened["refused"]
        attempts = 2 * SOON.attempts * (OPTIONS.num_threads + 1)

        def come_back():
            until(
                lambda: gateway.happened["refused"] > refused + 2 * attempts,
                seconds=90,
            )
            gateway.storm = None

        with ThreadPoolExecutor(1) as other:
            back = other.submit(come_back)
            labels = delivered(job.pipeline.loader(0))
            back.result()
    assert sorted(labels) == list(range(NUM_SAMPLES))
    assert "raw reads fail for" in caplog.text


def test_swift_that_stays_away_ends_the_job(data, gateway, through):
    options = replace(OPTIONS, retry_seconds=0.5)
    with job_of(through, cut="stream", read=options) as job:
        gateway.storm = Storm(refused=1.0)
        with pytest.raises(
            HapiError, match=r"retry_seconds, .* --resume.*extract"
        ):
            delivered(job.pipeline.loader(0))
    gateway.storm = None


@pytest.mark.parametrize("cut", ["stream", "freeze"])
def test_shard_replaced_during_an_epoch_is_an_error_with_its_name(
    data, through, monkeypatch, cut
):
    """Earlier samples are delivered, none of the new content is."""
    monkeypatch.setattr(prefetcher, "AHEAD_SPANS", 1)
    options = ReadConfig(num_threads=1, buffer_spans=1)
    with job_of(through, cut=cut, read=options) as job:
        last = delivered(job.pipeline.loader(0))[-1] // PER_SHARD
        name = f"s{last}.tar"
        labels: list[int] = []

        def train():
            for _, found in job.pipeline.loader(0):
                if not labels:
                    put(through, name, shard(PER_SHARD, size=121, seed=9))
                labels.extend(found.tolist())

        try:
            with pytest.raises(SourceChangedError, match=name):
                train()
        finally:
            put(through, name, shard(PER_SHARD, size=120, seed=last))
            update_index(through, parse_location(DATA))
    assert len(labels) >= NUM_SAMPLES - 16 - PER_SHARD
    assert len(set(labels)) == len(labels)
    assert not set(labels) & set(
        range(last * PER_SHARD, (last + 1) * PER_SHARD)
    )


@pytest.mark.parametrize("cut", ["stream", "freeze"])
def test_paused_loop_needs_no_retry(impatient, cut):
    """The pause is longer than the store waits for a client."""
    transform = ImageTransform(resize_size=256, crop_size=224)
    with job_of(impatient, cut=cut, transform=transform, batch_size=8) as job:
        labels = delivered(
            job.pipeline.loader(0),
            lambda number: time.sleep(PAUSE_SECONDS * (number == 2)),
        )
        assert job.stats.retries == job.stats.fallbacks == 0
    assert len(labels) == NUM_LARGE * PER_LARGE


def test_client_that_does_not_read_is_dropped_by_that_store(impatient):
    """The precondition of the test above."""
    with impatient.open("weather", "s0.tar") as body:
        body.read(1000)
        time.sleep(PAUSE_SECONDS)
        with pytest.raises(TruncatedStreamError):
            body.read()


def token(connection):
    return {"X-Auth-Token": connection._http.auth.token()}


def features_by_label(loader, step=lambda number: None):
    found: dict[int, torch.Tensor] = {}
    for number, (features, labels) in enumerate(loader):
        step(number)
        for feature, label in zip(features, labels.tolist(), strict=True):
            assert label not in found, "a sample came twice"
            found[label] = feature.clone()
    return found


def test_epoch_of_a_killed_worker_is_finished_and_push_down_resumes(
    data, worker, connection, monkeypatch
):
    with job_of(connection, cut="stream") as streaming:
        expected = features_by_label(streaming.pipeline.loader(0))
    assert sorted(expected) == list(range(NUM_SAMPLES))
    options = ReadConfig(num_threads=3, buffer_spans=1)
    twice = Backoff(attempts=2, first_seconds=0.05, max_seconds=0.1)
    set_waits(monkeypatch, twice, 0.1, 0.2)

    def kill(number):
        if number == 1:
            worker.kill()

    url = urlsplit(connection.storage_url)
    plain = PlainTraffic(
        (url.hostname, url.port),
        token(connection),
        [Request("GET", f"{url.path}/weather/s0.tar")],
    )
    with plain, job_of(connection, read=options) as pushing:
        found = features_by_label(pushing.pipeline.loader(0), kill)
        during = pushing.stats.fallbacks + pushing.stats.retries
        metrics = pushing.pipeline._factory.recorder.take()
        worker.start()
        worker.wait_until_ready()

        def num_pushed(epoch):
            pushing.pipeline._factory.recorder.take()
            again = features_by_label(pushing.pipeline.loader(epoch))
            assert sorted(again) == sorted(expected)
            samples = pushing.pipeline._factory.recorder.take().samples
            return sum(n for route, n in samples.items() if route != RAW_ROUTE)

        # On a busy machine some spans may still be read raw.
        assert any(num_pushed(epoch) for epoch in range(1, 9))
    assert sorted(found) == sorted(expected)
    for label, feature in found.items():
        torch.testing.assert_close(
            feature, expected[label], rtol=1e-4, atol=1e-5
        )
    assert during > 0
    assert sum(metrics.samples.values()) == NUM_SAMPLES
    assert plain.failures == []
    assert plain.count > 0


def test_log_of_plans_reports_the_worker_and_no_sample_is_lost(
    data, worker, connection, monkeypatch
):
    def freeze(problem):
        return static_at(problem, problem.last_cut)

    set_waits(monkeypatch, Backoff(attempts=1), 0.5, 1.0)
    # On one machine a plan might well stream.
    for module in (job_problem, plan_chooser):
        monkeypatch.setattr(module, "solve", freeze)
    for module in (job_planner, plan_chooser):
        monkeypatch.setattr(
            module, "speedup_over", lambda other, plan: math.inf
        )
    deadline = time.monotonic() + 110
    told: list[str] = []

    def train_until(said):
        while not said():
            assert time.monotonic() < deadline, told
            seen = delivered(auto.pipeline.loader(len(told)))
            assert sorted(seen) == list(range(NUM_SAMPLES))
            told.append(auto.plan.label if auto.plan else "")

    def last_reason(words):
        return any(words in each.why for each in auto.plan_changes)

    with job_of(
        connection,
        cut="auto",
        epochs=1e6,
        read=ReadConfig(),
    ) as auto:
        train_until(lambda: auto.plan is not None and auto.plan.pushes)
        worker.stop()
        train_until(lambda: last_reason("does not answer"))
        assert not auto.plan.pushes
        worker.start()
        train_until(lambda: last_reason("answers again"))
        assert auto.plan.pushes
        assert auto.stats.fallbacks > 0
