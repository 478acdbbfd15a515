"""A worker killed during a stream, corrupt samples, changed shards."""

from __future__ import annotations

import io
import math
import os
import signal
import threading
import time

import pytest
import requests
import torch

from hapi_client import ReadConfig
from hapi_client.planning import planner as planning
from hapi_client.planning import replanner as replan
from hapi_client.swift.retry import Backoff
from hapi_protocol.errors import HapiError
from hapi_splitter.planner.plan import static_at
from jobs import transfer_job
from networks import small_network, small_transform
from photos import shard, with_corrupt_member

NUM_SHARDS = 16
PER_SHARD = 30


def number_of(key):
    """A label that is unique in the data set: ``s<shard>-<number>``."""
    seed, number = key.removeprefix("s").split("-")
    return int(seed) * PER_SHARD + int(number)


def store(connection, container, shards):
    """Uploads shards and writes their index next to the data."""
    from hapi_client.data.index import update_index
    from hapi_client.swift.swift_url import parse_location

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


class PlainGets:
    """Plain GETs of one object, one after another, until stopped."""

    def __init__(self, connection, container, name):
        token = connection._http.auth.token()
        self._url = f"{connection.storage_url}/{container}/{name}"
        self._headers = {"X-Auth-Token": token}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.statuses: list[int] = []
        self.longest_seconds = 0.0

    def _run(self):
        while not self._stop.is_set():
            started = time.monotonic()
            answer = requests.get(self._url, headers=self._headers, timeout=30)
            self.statuses.append(answer.status_code)
            self.longest_seconds = max(
                self.longest_seconds, time.monotonic() - started
            )
            time.sleep(0.02)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(60)


def features_by_label(loader):
    found: dict[int, torch.Tensor] = {}
    for features, labels in loader:
        for feature, label in zip(features, labels.tolist(), strict=True):
            assert label not in found, "a sample came twice"
            found[label] = feature.clone()
    return found


def test_stream_of_a_killed_worker_never_ends_cleanly(
    fragile, connection, tmp_path
):
    from hapi_client.model.package_store import upload_package
    from hapi_splitter.freezing.split_model import split
    from hapi_splitter.package.writer import write_package

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
            "X-Auth-Token": connection._http.auth.token(),
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


def test_epoch_is_finished_when_the_worker_is_killed(
    fragile, connection, shards
):
    store(connection, "killed", shards)
    with job(connection, "killed", cut=0) as streaming:
        expected = features_by_label(streaming.loader(0))
    assert sorted(expected) == list(range(NUM_SHARDS * PER_SHARD))
    options = ReadConfig(
        num_threads=3,
        buffer_spans=1,
        pause_seconds=0.2,
        backoff=Backoff(attempts=3, first_seconds=0.1, max_seconds=0.5),
    )
    found: dict[int, torch.Tensor] = {}
    with (
        PlainGets(connection, "killed", "s0.tar") as plain,
        job(connection, "killed", read=options) as pushing,
    ):
        for number, (features, labels) in enumerate(pushing.loader(0)):
            if number == 1:
                victim = fragile.worker_pid
                os.kill(victim, signal.SIGKILL)
            for feature, label in zip(features, labels.tolist(), strict=True):
                assert label not in found, "a sample came twice"
                found[label] = feature.clone()
        stats = pushing.stats
    assert sorted(found) == sorted(expected)
    for label, feature in found.items():
        torch.testing.assert_close(
            feature, expected[label], rtol=1e-4, atol=1e-5
        )
    assert stats.fallbacks + stats.retries > 0
    assert set(plain.statuses) == {200}
    assert fragile.wait_for_worker(victim) != victim


def test_push_down_resumes_after_the_worker_restarts(
    fragile, connection, shards
):
    fragile.wait_for_worker()
    store(connection, "comes-back", shards)
    options = ReadConfig(
        num_threads=1,
        pause_seconds=0.1,
        max_pause_seconds=0.2,
        backoff=Backoff(attempts=2, first_seconds=0.05, max_seconds=0.1),
    )
    with job(connection, "comes-back", read=options) as pushing:
        os.kill(fragile.worker_pid, signal.SIGKILL)
        first = features_by_label(pushing.loader(0))
        during = pushing.stats.fallbacks
        fragile.wait_for_worker()
        time.sleep(0.5)
        second = features_by_label(pushing.loader(1))
        after = pushing.stats.fallbacks
    assert len(first) == len(second) == NUM_SHARDS * PER_SHARD
    assert during > 0
    assert after == during, "the second epoch was not pushed down"


@pytest.mark.parametrize("cut", ["freeze", 0])
def test_corrupt_jpeg_is_raised_by_name_or_skipped_and_counted(
    fragile, connection, cut
):
    good = shard(12, size=224, seed=0)
    key = "s0-0005"
    store(connection, "corrupt", {"s0.tar": with_corrupt_member(good, key)})
    fragile.wait_for_worker()
    with (
        job(connection, "corrupt", cut=cut) as strict,
        pytest.raises(HapiError, match=key) as caught,
    ):
        features_by_label(strict.loader(0))
    assert caught.value.code == "bad_sample"
    with job(connection, "corrupt", cut=cut, on_error="skip") as lenient:
        found = features_by_label(lenient.loader(0))
        assert lenient.stats.skipped == 1
    assert sorted(found) == [n for n in range(12) if n != 5]


@pytest.mark.parametrize("cut", ["freeze", 0])
def test_shard_that_differs_from_its_index_is_refused_by_name(
    fragile, connection, cut
):
    store(connection, "changed", {"s0.tar": shard(4, seed=0)})
    fragile.wait_for_worker()
    with job(connection, "changed", cut=cut) as stale:
        other = shard(4, seed=0, size=230)
        connection.put("changed", "s0.tar", io.BytesIO(other), len(other))
        with pytest.raises(HapiError, match=r"s0\.tar") as caught:
            features_by_label(stale.loader(0))
    assert caught.value.code == "source_changed"


def test_shard_without_labels_needs_them_given(fragile, connection):
    bare = shard(3, seed=0, labels=False)
    store(connection, "bare", {"s0.tar": bare})
    with pytest.raises(HapiError, match="s0-0000") as caught:
        transfer_job(
            small_network(),
            freeze="body",
            data="swift://bare",
            transform=small_transform(),
            connection=connection,
        )
    assert caught.value.code == "missing_label"
    assert "s0.tar" in str(caught.value)
    fragile.wait_for_worker()
    with job(connection, "bare") as named:
        assert sorted(features_by_label(named.loader(0))) == [0, 1, 2]


def test_mixed_plan_loses_nothing_when_the_worker_restarts(
    fragile, connection, shards
):
    from hapi_splitter.planner.problem import RAW_ROUTE

    fragile.wait_for_worker()
    store(connection, "mixed", shards)
    with job(connection, "mixed", cut=0) as streaming:
        expected = features_by_label(streaming.loader(0))
    options = ReadConfig(
        num_threads=2,
        buffer_spans=1,
        pause_seconds=0.2,
        max_pause_seconds=0.4,
        backoff=Backoff(attempts=2, first_seconds=0.05, max_seconds=0.1),
    )
    with job(connection, "mixed", read=options) as pushing:
        pushing._factory.scheduler.change(
            {RAW_ROUTE: 0.5, (pushing.num_cuts, "uint8;zstd"): 0.5}
        )
        found: dict[int, torch.Tensor] = {}
        for number, (features, labels) in enumerate(pushing.loader(0)):
            if number == 1:
                os.kill(fragile.worker_pid, signal.SIGKILL)
            for feature, label in zip(features, labels.tolist(), strict=True):
                assert label not in found, "a sample came twice"
                found[label] = feature.clone()
        gone = pushing._factory.metrics.take()
        fragile.wait_for_worker()
        time.sleep(0.5)
        again = features_by_label(pushing.loader(1))
        back = pushing._factory.metrics.take()

    assert sorted(found) == sorted(again) == sorted(expected)
    assert sum(gone.samples.values()) == NUM_SHARDS * PER_SHARD
    assert back.pushed_samples > 0
    assert back.pushed_samples + back.samples.get(RAW_ROUTE, 0) == sum(
        back.samples.values()
    )


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
