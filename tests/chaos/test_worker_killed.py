"""A worker killed during a stream and an epoch; the log of plans."""

from __future__ import annotations

import io
import math
import os
import signal
import time
from urllib.parse import urlsplit

import pytest
import requests
import torch

from hapi_client import ReadConfig
from hapi_client.data.index import update_index
from hapi_client.model.package_store import upload_package
from hapi_client.planning import planner as planning
from hapi_client.planning import replanner as replan
from hapi_client.swift.retry import Backoff
from hapi_client.swift.swift_url import parse_location
from hapi_splitter.freezing.split_model import split
from hapi_splitter.package.writer import write_package
from hapi_splitter.planner.plan import static_at
from jobs import transfer_job
from networks import small_network, small_transform
from photos import shard
from plain_traffic import PlainTraffic, Request

NUM_SHARDS = 16
PER_SHARD = 30


def number_of(key):
    """A label that is unique in the data set: ``s<shard>-<number>``."""
    seed, number = key.removeprefix("s").split("-")
    return int(seed) * PER_SHARD + int(number)


def store(connection, container, shards):
    """Uploads shards and writes their index next to the data."""

    connection.put_container(container)
    for name, data in shards.items():
        connection.put(container, name, io.BytesIO(data), len(data))
    update_index(connection, parse_location(f"swift://{container}"))


@pytest.fixture(scope="module")
def shards():
    return {
        f"s{number}.tar": shard(PER_SHARD, size=290, seed=number)
        for number in range(NUM_SHARDS)
    }


def job(connection, container, **options):
    return transfer_job(
        small_network(),
        freeze="body",
        data=f"swift://{container}",
        transform=small_transform(),
        batch_size=16,
        labels=number_of,
        connection=connection,
        **{"cut": "freeze", **options},
    )


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


def test_stream_of_a_killed_worker_never_ends_cleanly(
    fragile, connection, tmp_path
):

    parts = split(small_network(), "body", transform=small_transform())
    info = write_package(parts.frozen, tmp_path / "model.hapi")
    model, _ = upload_package(
        connection, "models", tmp_path / "model.hapi", info.digest
    )
    long = shard(600, size=290)
    connection.put_container("broken")
    connection.put("broken", "long.tar", io.BytesIO(long), len(long))
    answer = requests.get(
        f"{connection.storage_url}/broken/long.tar",
        headers={
            **token(connection),
            "X-Hapi-Model": model.quoted(),
            "X-Hapi-Cut": "1",
        },
        stream=True,
        timeout=30,
    )
    assert answer.status_code == 200
    victim = fragile.worker_pid
    pieces = answer.iter_content(65536)
    next(pieces)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(requests.RequestException):
        for _ in pieces:
            pass
    fragile.wait_for_worker(victim)


def test_epoch_is_finished_when_the_worker_is_killed_and_the_next_is_pushed(
    fragile, connection, shards
):
    store(connection, "killed", shards)
    with job(connection, "killed", cut=0) as streaming:
        expected = features_by_label(streaming.loader(0))
    assert sorted(expected) == list(range(NUM_SHARDS * PER_SHARD))
    options = ReadConfig(
        num_threads=3,
        buffer_spans=1,
        pause_seconds=0.1,
        max_pause_seconds=0.2,
        backoff=Backoff(attempts=2, first_seconds=0.05, max_seconds=0.1),
    )
    victim = fragile.worker_pid

    def kill(number):
        if number == 1:
            os.kill(victim, signal.SIGKILL)

    url = urlsplit(connection.storage_url)
    plain = PlainTraffic(
        (url.hostname, url.port),
        token(connection),
        [Request("GET", f"{url.path}/killed/s0.tar", b"", shards["s0.tar"])],
    )
    with plain, job(connection, "killed", read=options) as pushing:
        found = features_by_label(pushing.loader(0), kill)
        during = pushing.stats.fallbacks + pushing.stats.retries
        metrics = pushing._factory.metrics.take()
        assert fragile.wait_for_worker(victim) != victim
        time.sleep(0.5)
        fallbacks = pushing.stats.fallbacks
        again = features_by_label(pushing.loader(1))
        assert pushing.stats.fallbacks == fallbacks, "it was not pushed down"
    assert sorted(found) == sorted(again) == sorted(expected)
    for label, feature in found.items():
        torch.testing.assert_close(
            feature, expected[label], rtol=1e-4, atol=1e-5
        )
    assert during > 0
    assert sum(metrics.samples.values()) == NUM_SHARDS * PER_SHARD
    assert plain.failures == []
    assert plain.count > 0


def test_log_of_plans_reports_the_worker_and_no_sample_is_lost(
    fragile, connection, shards, monkeypatch
):
    def freeze(problem):
        return static_at(problem, problem.last_cut)

    # On one machine a plan might well stream.
    for module in (planning, replan):
        monkeypatch.setattr(module, "solve", freeze)
        monkeypatch.setattr(
            module, "speedup_over", lambda other, plan: math.inf
        )
    store(connection, "told", shards)
    deadline = time.monotonic() + 110
    told: list[str] = []

    def train_until(said):
        while not said():
            assert time.monotonic() < deadline, told
            seen = features_by_label(auto.loader(len(told)))
            assert sorted(seen) == list(range(NUM_SHARDS * PER_SHARD))
            told.append(auto.plan.label if auto.plan else "")

    def last_reason(words):
        return any(words in each.why for each in auto.plan_changes)

    with job(
        connection,
        "told",
        cut="auto",
        epochs=1e6,
        replan_seconds=0.5,
        replan_min_spans=1,
        read=ReadConfig(
            backoff=Backoff(attempts=1),
            pause_seconds=0.5,
            max_pause_seconds=1.0,
        ),
    ) as auto:
        train_until(lambda: auto.plan is not None and auto.plan.pushes)
        fragile.stop_worker()
        train_until(lambda: last_reason("does not answer"))
        assert not auto.plan.pushes
        fragile.restart_worker()
        train_until(lambda: last_reason("answers again"))
        assert auto.plan.pushes
        assert auto.stats.fallbacks > 0
