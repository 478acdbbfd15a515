"""The filter uses no resources before a request, and leaves none behind.

Proxies build their filters in the parent as well as in each worker, live for
months, and are reloaded while streams run.
"""

import gc
import heapq
import logging
import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import eventlet
import eventlet.hubs
import greenlet
import pytest
from swift.common.utils import close_if_possible

from fake_swift import FakeSwift
from filter_under_test import MODEL, SOURCE, annotation, filter_and_worker
from hapi_middleware import concurrency
from hapi_middleware.filter import filter_factory
from hapi_middleware.worker import feature_stream, worker_client
from hapi_protocol.errors import HapiError, make_error
from stub_worker import break_off, refuse_shard

NUM_FILTERS = 100
NUM_ROUNDS = int(os.environ.get("HAPI_FOOTPRINT_ROUNDS", "200"))
PLAIN_PER_ROUND = 90
WARM_ROUNDS = 10
SWITCH_SECONDS = 0.0002
RSS_MARGIN_BYTES = 4 << 20
OBJECTS_MARGIN = 50
"""Objects of caches that fill occasionally; one object left by each round
would be four times as many."""
SMALL = "/AUTH_test/data/small"


def objects():
    drop_cancelled_timers()
    gc.collect()
    return len(gc.get_objects())


def greenlets():
    gc.collect()
    # issubclass() of the type: isinstance() would call the objects.
    types = map(type, gc.get_objects())
    return sum(issubclass(each, greenlet.greenlet) for each in types)


def timers():
    drop_cancelled_timers()
    return int(eventlet.hubs.get_hub().get_timers_count())


def drop_cancelled_timers():
    """Drops cancelled timers, as the hub does once there are a thousand."""
    hub = eventlet.hubs.get_hub()
    hub.timers[:] = [each for each in hub.timers if not each[1].called]
    heapq.heapify(hub.timers)
    hub.timers_canceled = 0


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def resources():
    """Numbers of resources that must not grow."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "greenlets": greenlets(),
        "timers": timers(),
    }


def forbidden(*_, **__):
    raise AssertionError("a filter began something before any request")


@pytest.fixture(autouse=True)
def only_new_objects():
    """Excludes objects of other tests: there may be millions."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def nothing_may_begin(monkeypatch):
    for owner, name in (
        (worker_client, "connect_unix"),
        (feature_stream, "Task"),
        (concurrency, "spawn"),
        (concurrency.socket, "socket"),
        (threading.Thread, "start"),
    ):
        monkeypatch.setattr(owner, name, forbidden)


def test_filters_use_no_resources_before_a_request(nothing_may_begin):
    swift = FakeSwift()
    filters = [filter_factory({})(swift)]
    before = resources()
    filters += [filter_factory({})(swift) for _ in range(NUM_FILTERS)]

    after = resources()
    # Threads of earlier tests may have ended meanwhile.
    assert all(after[name] <= before[name] for name in before), after


@pytest.fixture
def world(tmp_path):
    with (
        filter_and_worker(tmp_path, worker_timeout="20") as world,
        undisturbed(),
    ):
        world.swift.may_be_unread = True
        world.swift.put(SMALL, b"plain")
        world.swift.read_acls["/AUTH_test/data"] = ".r:*"
        yield world


class Soak:
    """Sends requests without the auth middleware, as an admin."""

    def __init__(self, world):
        self._world = world
        self._app = world.filter
        self.requests = 0

    def ask(self, method="GET", path=SOURCE, **headers):
        self.requests += 1
        env = {
            "REMOTE_USER": "test,test:tester,AUTH_test",
            "swift.authorize": lambda request: None,
        }
        request = self._world.request(
            method, path, headers, user=None, env=env
        )
        status, _, chunks = request.call_application(self._app)
        return int(status.split()[0]), chunks

    def expect(self, status, *how, **headers):
        found, chunks = self.ask(*how, **headers)
        assert found == status
        for _ in chunks:
            pass
        close_if_possible(chunks)

    def give_up(self):
        status, chunks = self.ask(**annotation())
        assert (status, bool(next(iter(chunks)))) == (200, True)
        close_if_possible(chunks)

    def break_off(self):
        with self._world.answering(break_off):
            status, chunks = self.ask(**annotation())
            assert status == 200
            with pytest.raises(HapiError):
                for _ in chunks:
                    pass

    def find_no_worker(self):
        with self._world.without_worker():
            self.expect(503, **annotation())

    def be_refused_by_the_worker(self):
        self._world.worker.refuse_job = make_error("queue_full", "wait")
        self.expect(503, **annotation())
        self._world.worker.refuse_job = None
        with self._world.answering(refuse_shard):
            self.expect(422, **annotation())

    def round(self):
        for _ in range(PLAIN_PER_ROUND):
            self.expect(200, "GET", SMALL)
        self.expect(200, **annotation())
        self.expect(200, "HEAD", **annotation())
        self.expect(200, "GET", MODEL, **{"X-Hapi-Profile": "true"})
        self.expect(400, **annotation(cut="x"))
        self.expect(404, "GET", "/AUTH_test/data/none", **annotation())
        self.expect(404, **annotation(model="/AUTH_test/models/none"))
        self.give_up()
        self.break_off()
        self.find_no_worker()
        self.be_refused_by_the_worker()
        self.forget()

    def forget(self):
        """Clears the records of the doubles of Swift and worker."""
        world = self._world
        world.swift.assert_nothing_is_open()
        for notes in (
            world.swift.calls,
            world.swift.bodies,
            world.worker.jobs,
            world.worker.profiles,
            world.worker.calls,
            world.worker.trans_ids,
            world.worker.sources,
        ):
            notes.clear()


@contextmanager
def undisturbed():
    """A disabled log, and short switches between filter and stub.

    Records that pytest keeps hold errors and frames.
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        sys.setswitchinterval(usual)


def settled(level):
    """Resources in use once the stub's threads have ended."""
    for _ in range(200):
        found = resources()
        if all(found[name] <= level[name] for name in level):
            break
        eventlet.sleep(0.02)
    return found


def test_twenty_thousand_requests_leave_nothing_behind(world):
    soak = Soak(world)
    for _ in range(WARM_ROUNDS):
        soak.round()
    level = settled({})
    before, resident = objects(), resident_bytes()
    for _ in range(NUM_ROUNDS):
        soak.round()

    assert soak.requests >= 100 * NUM_ROUNDS
    found = settled(level)
    assert {n: c for n, c in found.items() if c > level[n]} == {}
    assert objects() - before < OBJECTS_MARGIN
    assert resident_bytes() - resident < RSS_MARGIN_BYTES
