"""Swift servers that hang or reload during feature and plain GETs.

Servers are stopped with SIGSTOP: their sockets accept, and nothing answers.
What must hold is said by each test; what never may happen is a wrong row, a
clean end of an incomplete stream, or a request that outlives its deadlines.
"""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest
import requests
from benchmarks.testbed.proxies import SideProxy

from hapi_client import Connection
from hapi_cluster import Cluster
from hapi_protocol.feature_reader import read_features
from jobs import connected, store_package
from networks import small_parts
from photos import jpegs, shard, tar_of
from plain_traffic import PlainTraffic, Request
from waiting import until

WORKER_SECONDS = 2.0
NODE_SECONDS = 1.0
SLACK_SECONDS = 15.0
"""Added to deadlines for a busy machine."""
TIMEOUT_SECONDS = 120.0
"""Longest wait for an answer that must come, on an overloaded machine."""
SHORT_SECONDS = 0.5
PIECE_BYTES = 65536
NUM_SAMPLES = 500
BALLAST_BYTES = 40_000
"""Added to each photograph so that neither shard nor features fit buffers."""
SMALL_OBJECT = b"plain " * 1000
NUM_WORKERS = 2
WORKERS = {"DEFAULT": {"workers": str(NUM_WORKERS)}}
SHORT_DEADLINES = {
    "app:proxy-server": {
        "node_timeout": str(NODE_SECONDS),
        "recoverable_node_timeout": str(NODE_SECONDS),
    },
    "filter:hapi": {"worker_timeout": str(WORKER_SECONDS)},
}


@dataclass
class World:
    """A cluster of processes, and our proxy in front of it."""

    cluster: Cluster
    proxy: SideProxy
    connection: Connection
    model: str
    expected: list

    @property
    def token(self):
        return {"X-Auth-Token": self.connection._http.auth.token()}

    def ask(self, name="long.tar"):
        """An annotated GET of a shard, its headers read."""
        return requests.get(
            f"{self.proxy.url}{self.path}/data/{name}",
            headers={
                **self.token,
                "X-Hapi-Model": self.model,
                "X-Hapi-Cut": "1",
            },
            stream=True,
            timeout=TIMEOUT_SECONDS,
        )

    def plain(self, *requests, **options):
        address = self.proxy.address
        return PlainTraffic(address, self.token, requests, **options)

    @property
    def path(self):
        return urlsplit(self.connection.storage_url).path

    def everything(self, **options):
        """GETs, PUTs, listings."""
        return self.plain(
            Request("GET", f"{self.path}/data/plain", expected=SMALL_OBJECT),
            Request("PUT", f"{self.path}/plain/new-{{}}", SMALL_OBJECT),
            self.listing(),
            **options,
        )

    def listing(self):
        return Request("GET", f"{self.path}/data?format=json")


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """A proxy of two workers, with the usual deadlines."""
    folder = tmp_path_factory.mktemp("chaos")
    options = {"device": "cpu", "buffer_bytes": "1MiB"}
    with (
        Cluster.temporary(processes=True, worker_options=options) as cluster,
        connected(cluster) as connection,
        SideProxy(cluster.directory, folder / "proxy", WORKERS) as proxy,
    ):
        model = stored(connection, folder)
        world = World(cluster, proxy, connection, model, [])
        world.expected = Running(world).rest()
        assert len(world.expected) == NUM_SAMPLES
        yield world


@pytest.fixture(scope="module")
def world(patient, tmp_path_factory):
    """A proxy with short deadlines."""
    folder = tmp_path_factory.mktemp("impatient")
    with SideProxy(
        patient.cluster.directory, folder / "proxy", SHORT_DEADLINES
    ) as proxy:
        yield dataclasses.replace(patient, proxy=proxy)


def stored(connection, folder):
    """Objects, and a model; how an annotation names it."""
    model = store_package(connection, folder, small_parts().frozen)
    for container in ("data", "plain"):
        connection.put_container(container)
    for name, data in {
        "long.tar": long_shard(),
        "short.tar": shard(4),
        "plain": SMALL_OBJECT,
    }.items():
        connection.put("data", name, io.BytesIO(data), len(data))
    return model.quoted()


def long_shard():
    members = []
    for number, (photo, _) in enumerate(jpegs(NUM_SAMPLES, size=80)):
        members.append((f"{number:04d}.jpg", photo))
        members.append((f"{number:04d}.bin", os.urandom(BALLAST_BYTES)))
    return tar_of(members)


class Running:
    """A stream that has started and waits for its client."""

    def __init__(self, world):
        response = world.ask()
        assert response.status_code == 200, response.text
        self._pieces = response.iter_content(PIECE_BYTES)
        self._body = bytearray(next(self._pieces))

    def rest(self):
        """All rows.

        Raises:
            requests.RequestException: the connection broke.
        """
        for piece in self._pieces:
            self._body += piece
        return [
            (row.index, row.key, features.tobytes())
            for batch in read_features(io.BytesIO(self._body))
            for row, features in zip(batch.rows, batch.features, strict=True)
        ]


@contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def within(seconds):
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds + SLACK_SECONDS


def pid_of(world, server):
    return int(world.cluster.status()["children"][server]["pid"])


def test_reload_under_load_fails_no_request_and_ends_no_stream(patient):
    """Connections that no process has accepted yet are another matter.

    Those that wait at a socket when Swift closes it are reset by the kernel,
    with the filter or without it, unless ``net.ipv4.tcp_migrate_req`` is set:
    clients send their requests again.
    """
    world, proxy = patient, patient.proxy

    def max_bytes():
        info = requests.get(
            f"{proxy.url}/info", timeout=TIMEOUT_SECONDS
        ).json()
        return int(info["hapi"]["max_object_bytes"])

    assert max_bytes() != 123456789
    with world.everything(repeats_resets=True) as plain:
        running = [Running(world) for _ in range(3)]
        old = proxy.workers()
        proxy.configure(
            {**WORKERS, "filter:hapi": {"max_object_bytes": "123456789"}}
        )
        proxy.reload()
        # The process that closes the old sockets ends.
        until(lambda: len(proxy.workers() - old) == NUM_WORKERS)
        assert {max_bytes() for _ in range(20)} == {123456789}
        # What serves the streams is a worker of before.
        assert old & proxy.workers()
        for stream in running:
            assert stream.rest() == world.expected
        assert Running(world).rest() == world.expected
        until(lambda: not old & proxy.workers())
    assert plain.failures == []
    # Its two threads have one request each on its way.
    assert plain.resets <= 2
    assert plain.count > 50


def test_reload_with_a_mistake_is_refused_and_changes_nothing(patient):
    proxy = patient.proxy
    before = proxy.workers()
    proxy.configure({"filter:hapi": {"worker_timeout": "2m"}})
    with pytest.raises(ValueError, match=r"worker_timeout = 2m") as refused:
        proxy.reload()

    assert "a positive number of seconds" in str(refused.value)
    assert proxy.workers() == before
    assert patient.ask("short.tar").status_code == 200


def test_worker_that_hangs_costs_only_features_and_in_time(world):
    worker = pid_of(world, "worker")
    running = Running(world)
    with world.everything() as plain, stopped(worker):
        with within(WORKER_SECONDS):
            answer = world.ask("short.tar")
        assert answer.status_code == 504
        assert answer.json()["code"] == "too_slow"
        with within(WORKER_SECONDS), pytest.raises(requests.RequestException):
            running.rest()
    assert plain.failures == []
    assert plain.count > 50
    assert plain.longest_seconds < WORKER_SECONDS
    assert Running(world).rest() == world.expected


def test_object_server_that_hangs_breaks_streams_in_time(world):
    """Plain GETs of objects get 503, as without the filter."""
    running = Running(world)
    with (
        world.plain(world.listing()) as plain,
        stopped(pid_of(world, "object")),
    ):
        with within(2 * NODE_SECONDS):
            assert world.ask("short.tar").status_code == 503
        with within(NODE_SECONDS):
            url = f"{world.proxy.url}{world.path}/data/plain"
            answer = requests.get(
                url, headers=world.token, timeout=TIMEOUT_SECONDS
            )
            assert answer.status_code == 503
        with (
            within(NODE_SECONDS + WORKER_SECONDS),
            pytest.raises(requests.RequestException),
        ):
            running.rest()
    assert plain.failures == []
    assert plain.count > 50
    until(lambda: world.ask("short.tar").status_code == 200)
    assert Running(world).rest() == world.expected


@pytest.mark.parametrize("server", ["worker", "object"])
def test_server_that_hangs_for_a_moment_costs_nothing(world, server):
    running = Running(world)
    with world.everything() as plain:
        with stopped(pid_of(world, server)):
            time.sleep(SHORT_SECONDS)
        assert running.rest() == world.expected
    assert plain.failures == []
