"""Metrics, log lines and transaction ids of the filter."""

import json
import re
import socket
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import eventlet
import pytest
from swift.common.middleware import catch_errors, proxy_logging
from swift.common.swob import Response

from filter_under_test import (
    ACCOUNT,
    MODEL,
    SHARD,
    SOURCE,
    annotation,
    filter_and_worker,
)
from hapi_middleware import metrics
from hapi_middleware.cache.buffer import Buffer
from hapi_protocol.errors import CODES, HapiError, make_error
from stub_worker import break_off

MIDDLEWARE = Path(metrics.__file__).parent
SECONDS = 5.0
PROFILE = {"X-Hapi-Profile": "true"}
ENDS = (
    "swift_answers",
    "headers_only",
    "profiles",
    "streams.done",
    "streams.broken",
    "streams.gone",
)
"""All ends of a request, together with ``errors.<code>``."""


class Statsd:
    """A statsd server that records the lines it receives."""

    def __init__(self, sock):
        self._sock = sock

    def lines(self):
        """Lines since the last call; the loopback delivers at once."""
        found = []
        while True:
            try:
                found.append(self._sock.recv(65536).decode())
            except BlockingIOError:
                return found

    def counts(self):
        """Sum of each counter and number of each timing, without prefix."""
        sums: Counter[str] = Counter()
        for line in self.lines():
            name, value, kind = re.split("[:|]", line)
            prefix, _, name = name.partition(".hapi.")
            assert prefix == "proxy-server", line
            assert name.endswith(".timing") == (kind == "ms"), line
            sums[name] += 1 if kind == "ms" else int(value)
        return sums


@pytest.fixture
def statsd():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
        yield Statsd(sock)


@pytest.fixture
def world(tmp_path, statsd):
    port = statsd._sock.getsockname()[1]
    options = {
        "log_name": "proxy-server",
        "log_statsd_host": "127.0.0.1",
        "log_statsd_port": str(port),
        "worker_timeout": "2.0",
    }
    with filter_and_worker(tmp_path, **options) as world:
        world.swift.may_be_unread = True
        yield world
        world.swift.assert_nothing_is_open()


def documented():
    """Names of the metrics in the module's table."""
    assert metrics.__doc__ is not None
    names = re.findall(r"^``hapi\.(\S+)``", metrics.__doc__, re.MULTILINE)
    return set(names)


def read(world):
    assert world.send(headers=annotation()).body == SHARD.upper()


def close_early(world):
    request = world.request(headers=annotation())
    chunks = iter(request.get_response(world.pipeline).app_iter)
    assert next(chunks)
    chunks.close()


def break_stream(world):
    with world.answering(break_off), pytest.raises(HapiError):
        world.send(headers=annotation())


def find_no_worker(world):
    with world.without_worker():
        assert world.send(headers=annotation()).status == 503


def ask(status, headers=None, **how):
    def send(world):
        answer = world.send(headers=headers or annotation(), **how)
        assert answer.status == status

    return send


SCENES = {
    "streams.done": read,
    "streams.gone": close_early,
    "streams.broken": break_stream,
    "headers_only": ask(200, method="HEAD"),
    "profiles": ask(200, PROFILE, path=MODEL),
    "swift_answers": ask(404, path="/AUTH_test/data/none"),
    "errors.bad_cut": ask(400, annotation(cut="x")),
    "errors.not_found": ask(404, annotation(model="/AUTH_test/models/none")),
    "errors.compute_not_allowed": ask(403, user=None),
    "errors.worker_unavailable": find_no_worker,
}


def test_exactly_the_documented_metrics_are_counted(world, statsd):
    world.swift.read_acls["/AUTH_test/data"] = ".r:*"
    world.swift.read_acls["/AUTH_test/models"] = ".r:*"
    seen = set()
    for end, scene in SCENES.items():
        scene(world)
        found = statsd.counts()
        seen |= set(found)
        assert found["requests"] == 1
        ends = {n for n in found if n in ENDS or n.startswith("errors.")}
        assert (ends, found[end]) == ({end}, 1)

    many = {"method": "POST", "path": "/AUTH_test/data", "query": "?hapi"}
    world.send(headers=annotation(), body=b"shard%200.tar", **many)
    found = statsd.counts()
    seen |= set(found)
    for name in ("requests", "multi_requests", "streams.done"):
        assert found[name] == 1

    codes = {name for name in seen if name.startswith("errors.")}
    assert {name.removeprefix("errors.") for name in codes} <= set(CODES)
    of_cache = {name for name in documented() if is_of_cache(name)}
    # Counted in tests/functional/test_object_servers.py.
    of_nodes = {
        name
        for name in documented()
        if name.startswith(("node.", "places.object"))
    }
    assert (seen - codes) | {
        "errors.<code>"
    } == documented() - of_cache - of_nodes


def is_of_cache(name):
    return name.startswith("cache") or name == "cached_answers"


def test_outcomes_of_the_cache_are_counted(world, statsd):
    usual = replace(world.filter.context.config, cache=True)
    cache = world.filter.context.cache
    seen: set[str] = set()

    def expect(*names, mode="readwrite", **options):
        cache.config = replace(usual, **options)
        world.send(headers=annotation(cache=mode))
        found: Counter[str] = Counter()
        deadline = time.monotonic() + SECONDS
        while not set(names) <= set(found) and time.monotonic() < deadline:
            eventlet.sleep(0.01)
            found += statsd.counts()
        counted = {n: c for n, c in found.items() if is_of_cache(n)}
        assert counted == dict.fromkeys(names, 1)
        assert found["requests"] == 1
        seen.update(counted)

    def fail(request):
        return Response(status=507) if request.method == "PUT" else None

    expect("cache.misses", "cache.too_large", cache_max_entry_bytes=9)
    expect("cache.misses", "cache.full", cache_max_account_bytes=9)
    cache.buffer = Buffer(9)
    expect("cache.misses", "cache.no_buffer")
    cache.buffer = Buffer(usual.cache_buffer_bytes)
    world.swift.on_private = fail
    expect("cache.misses", "cache.store_failures")
    world.swift.on_private = None
    cache._pauses.clear()
    world.worker.num_errors = 1
    expect("cache.misses", "cache.with_errors")
    world.worker.num_errors = 0
    expect("cache.misses", "cache.stores")
    expect("cache.hits", "cached_answers", mode="read")
    world.swift.on_private = lambda _: Response(status=503)
    expect("cache.read_failures", mode="read")
    world.swift.on_private = None
    (entry,) = (path for path in world.swift.objects if "\x00" in path)
    world.swift.put(entry, b"nonsense")
    expect("cache.damaged", mode="read")

    world.send("GET", f"/{ACCOUNT}", query="?hapi-cache")
    found = statsd.counts()
    assert found == {"requests": 1, "cache_requests": 1}
    seen.add("cache_requests")
    assert seen == {name for name in documented() if is_of_cache(name)}


def test_bytes_of_a_stream_are_counted(world, statsd):
    world.worker.answer = lambda source: (chunk[:10] for chunk in source)
    answer = world.send(headers=annotation())
    found = statsd.counts()

    assert found["source_bytes"] == len(SHARD)
    assert found["sent_bytes"] == len(answer.body) < len(SHARD)


def test_timings_are_milliseconds(world, statsd):
    read(world)
    statsd.lines()
    world.worker.delay_seconds = 0.2
    read(world)

    timings = {}
    for line in statsd.lines():
        name, value, kind = re.split("[:|]", line)
        if kind == "ms":
            timings[name.removeprefix("proxy-server.hapi.")] = float(value)
    assert 200 <= timings["grant.timing"] < 2000
    # POST /jobs and POST /jobs/<id> wait once each.
    assert 400 <= timings["first_byte.timing"] < 4000
    assert timings["stream.timing"] < 2000


def test_plain_requests_count_nothing(world, statsd):
    assert world.send().body == SHARD
    put = world.send("PUT", headers=annotation())

    assert put.status == 204
    assert statsd.lines() == []


def test_every_code_is_a_valid_name_for_statsd():
    assert all(re.fullmatch("[a-z_]+", code) for code in CODES)


@pytest.mark.parametrize(("cut", "num_asked"), [("3", 1), ("x", 0)])
def test_transaction_id_goes_to_the_worker_and_back(world, cut, num_asked):
    app = catch_errors.CatchErrorMiddleware(world.pipeline, {})
    world.worker.refuse_job = make_error("queue_full", "wait", retry_after=1)
    headers = {**annotation(cut=cut), "X-Trans-Id-Extra": "job 7, épo"}
    response = world.request(headers=headers).get_response(app)

    trans_id = response.headers["X-Trans-Id"]
    assert "job%207" in trans_id
    assert response.headers["X-Openstack-Request-Id"] == trans_id
    assert json.loads(response.body)["trans_id"] == trans_id
    sent = [trans_id] * num_asked
    assert world.worker.trans_ids == sent
    assert [job.trans_id for job in world.worker.jobs] == sent


def test_swifts_log_lines_about_the_source_name_the_request(world):
    """The source is read in its own green thread."""
    read(world)
    logger = world.filter.logger
    seen = []

    def another(request):
        logger.thread_locals = ("tx-another", None)

    def stream():
        seen.append(logger.thread_locals)
        yield SHARD

    found = world.swift.objects[SOURCE]
    found.on_request, found.stream = another, stream
    logger.thread_locals = ("tx1", "192.0.2.1")
    read(world)
    logger.thread_locals = (None, None)

    assert seen == [("tx1", "192.0.2.1")]


def test_one_request_has_one_log_line_without_a_source(world, monkeypatch):
    """Billing counts the lines of the access log without a source."""
    lines = []

    def logged(app):
        conf = {"log_msg_template": "{source}"}
        made = proxy_logging.ProxyLoggingMiddleware(app, conf)
        monkeypatch.setattr(made.access_logger, "info", lines.append)
        return made

    read(world)
    world.use(app=logged(world.swift))
    answer = world.send(headers=annotation(), app=logged(world.pipeline))
    assert answer.body == SHARD.upper()

    sources = Counter(lines)
    assert sources.pop("-") == 1
    assert set(sources) == {"HP"}


def test_no_credential_is_logged_or_sent_to_the_worker(
    world, statsd, monkeypatch
):
    token = world.token("test:tester")
    signature = "5" * 40
    how = {"query": f"?X-Amz-Signature={signature}"}
    tempurl = {"query": f"?temp_url_sig={signature}"}
    granted = {
        "swift.authorize": lambda request: None,
        "swift.authorize_override": True,
    }
    lines = []
    for level in ("debug", "info", "warning", "error", "exception"):
        monkeypatch.setattr(
            world.filter.logger,
            level,
            lambda text, *args: lines.append(text % args),
        )
    for scene in (
        read,
        break_stream,
        find_no_worker,
        ask(400, annotation(cut="x"), **how),
        ask(404, annotation(model="/AUTH_test/models/none"), **how),
        ask(200, **how),
        ask(401, app=world.filter, env=granted, **tempurl),
    ):
        scene(world)
    assert lines
    sent = map(repr, [*world.worker.jobs, *world.worker.calls])
    told = "\n".join([*lines, *statsd.lines(), *sent])

    assert token not in told
    assert signature not in told


WAITING = "eventlet|greenlet|socket|select|threading|subprocess|queue"
BLOCKING_IMPORT = re.compile(
    rf"^\s*import ({WAITING}|swift\.common\.concurrency)\b"
    rf"|^\s*from ({WAITING}|swift\.common\.concurrency)[\w.]* import"
    r"|^\s*from swift\.common import (\([^)]*|.*)\bconcurrency\b",
    re.MULTILINE,
)


def test_only_one_module_of_the_filter_can_block():
    """Or switch threads."""
    found = {
        path.name
        for path in MIDDLEWARE.rglob("*.py")
        if BLOCKING_IMPORT.search(path.read_text())
    }
    assert found == {"concurrency.py"}
