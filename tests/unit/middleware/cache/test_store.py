"""The filter's cache with failures that a real Swift rarely has."""

import hashlib
import time
from contextlib import contextmanager
from urllib.parse import quote

import eventlet
import pytest
from swift.common.middleware import proxy_logging
from swift.common.swob import Response

from fake_swift import CACHE_PATH, TrackedBody
from filter_under_test import (
    ACCOUNT,
    MODEL,
    OTHER,
    PACKAGE,
    SHARD,
    SOURCE,
    annotation,
    filter_and_worker,
    s3_env,
    signed,
)
from hapi_middleware.cache.entries import (
    DamagedEntryError,
    entry_name,
    pack,
    unpack,
)
from hapi_protocol.errors import InternalError, TooSlowError
from stub_worker import CLIENT_END, KEPT_END

FEATURES = SHARD.upper()
COMPUTED = FEATURES + CLIENT_END
KEPT = FEATURES + KEPT_END
SECONDS = 5.0


@contextmanager
def world_of(tmp_path, **options):
    given = {"cache": "yes", **options}
    with filter_and_worker(tmp_path, **given) as world:
        yield world
        until(lambda: world.filter.context.cache.buffer.used_bytes == 0)
        world.swift.assert_nothing_is_open()
        assert_private_requests_are_for_entries(world.swift)


@pytest.fixture
def world(tmp_path):
    with world_of(tmp_path) as world:
        yield world


def assert_private_requests_are_for_entries(swift):
    for env in swift.calls:
        if env.get("REMOTE_USER") != ".wsgi.pre_authed":
            continue
        if env["REQUEST_METHOD"] == "HEAD" and env["PATH_INFO"].count("/") < 4:
            # Swift's own get_account_info() and get_container_info().
            continue
        assert env["PATH_INFO"].startswith(CACHE_PATH), env["PATH_INFO"]
        assert env["HTTP_X_BACKEND_ALLOW_RESERVED_NAMES"] == "true"
        assert not env["QUERY_STRING"]


def until(is_so):
    """Waits for a condition: entries are stored after the answer's end."""
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "timeout"
        eventlet.sleep(0.01)


def entries(world):
    return [path for path in world.swift.objects if CACHE_PATH[3:] in path]


def ask(world, mode="readwrite", **how):
    return world.send(headers=annotation(cache=mode), **how)


def assert_computed(answer, state="miss", body=FEATURES):
    assert (answer.status, answer.body) == (200, body)
    assert answer.headers["X-Hapi-Cache"] == state


def assert_hit(answer):
    assert_computed(answer, "hit", KEPT)


def assert_nothing_is_stored(world):
    eventlet.sleep(0.1)
    assert entries(world) == []


def until_paused(world, account=ACCOUNT):
    until(lambda: world.filter.context.cache.is_paused(account))


def cache_requests(world, first=0):
    """Swift's requests for the cache's containers, from the given one on."""
    paths = [env["PATH_INFO"] for env in world.swift.calls[first:]]
    return [path for path in paths if path.startswith(CACHE_PATH)]


def warm(world):
    assert_computed(ask(world), "store", COMPUTED)
    until(lambda: entries(world))


def on_entries(world, method, status):
    """Lets Swift fail on entries; returns a counter of the failures."""
    failures = []

    def fail(request):
        if request.method != method:
            return None
        failures.append(request.path)
        return Response(status=status, request=request)

    world.swift.on_private = fail
    return lambda: len(failures)


def slow_on_entries(world, method):
    def slow(request):
        if request.method == method:
            eventlet.sleep(60)

    world.swift.on_private = slow


def test_hit_is_answered_without_a_job(world):
    warm(world)
    jobs = len(world.worker.jobs)
    log_info = []
    hit = ask(world, "read", env={"swift.log_info": log_info})

    assert_hit(hit)
    assert hit.headers["Content-Length"] == str(len(KEPT))
    assert log_info[0].startswith("hapi:model=")
    assert log_info[1:] == ["hapi:cache=hit"]
    assert len(world.worker.jobs) == jobs


def test_hit_is_found_after_the_upload_of_a_model_new_to_the_host(world):
    warm(world)
    world.worker.digests.clear()
    assert_hit(ask(world, "read"))
    assert len(world.worker.sources) == 1


def test_one_request_looks_up_the_cache_once(world):
    ask(world, "read")
    before = len(world.swift.calls)
    assert_computed(ask(world, "read"))
    assert len(cache_requests(world, before)) == 1


@pytest.mark.parametrize(("mode", "state"), [("off", "off"), ("read", "miss")])
def test_features_are_cached_on_request_only(world, mode, state):
    assert_computed(ask(world, mode), state)
    assert not world.worker.jobs[-1].is_split
    assert entries(world) == []


def test_cache_is_off_unless_the_operator_turns_it_on(tmp_path):
    with world_of(tmp_path, cache="no") as world:
        assert_computed(ask(world), "off")
        assert cache_requests(world) == []


def test_head_and_304_read_no_entry(world):
    warm(world)
    etag = ask(world, "read").headers["Etag"]
    before = len(world.swift.calls)
    headers = {**annotation(cache="readwrite"), "If-None-Match": etag}
    assert world.send(headers=headers).status == 304
    assert ask(world, "read", method="HEAD").status == 200
    assert cache_requests(world, before) == []


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        (f"/{ACCOUNT}/data/{'n' * 990}", {}),
        (SOURCE, {"X_Static_Large_Object": "parts/of-it"}),
        (SOURCE, {"X_Object_Manifest": "parts/of-it"}),
    ],
    ids=["long name", "slo", "dlo"],
)
def test_unsuitable_object_is_not_cached(world, path, facts):
    world.swift.put(path, SHARD, **facts)
    assert_computed(ask(world, path=path), "off")
    assert cache_requests(world) == []


@pytest.fixture
def public_world(tmp_path):
    """Anybody may compute with the public model."""
    options = {"allow_unauthenticated_compute": "yes"}
    with world_of(tmp_path, **options) as world:
        world.swift.read_acls[MODEL.rpartition("/")[0]] = ".r:*"
        yield world


def test_temporary_url_reads_and_does_not_store(public_world):
    query = signed(public_world, SOURCE)
    assert_computed(ask(public_world, user=None, query=query))
    warm(public_world)
    assert_hit(ask(public_world, user=None, query=query))
    public_world.swift.read_acls[MODEL.rpartition("/")[0]] = ""
    assert ask(public_world, user=None, query=query).status == 401


def test_account_that_may_not_compute_gets_no_hit(world):
    warm(world)
    world.configure(allowed_accounts=frozenset({"AUTH_physics"}))
    assert ask(world, "read").json["code"] == "compute_not_allowed"


@pytest.mark.parametrize(
    ("num_errors", "error"), [(2, ""), (None, "last frame"), (-1, "-1 errors")]
)
def test_stream_with_errors_is_not_cached(world, caplog, num_errors, error):
    world.swift.may_be_unread = True
    world.worker.num_errors = num_errors
    if error:
        with pytest.raises(InternalError, match=error):
            ask(world)
    else:
        assert ask(world).body == COMPUTED
    assert ("breaks off" in caplog.text) == (num_errors == -1)
    assert_nothing_is_stored(world)


def test_stream_of_a_worker_without_tee_streams_is_not_cached(world):
    world.worker.splits = False
    assert_computed(ask(world))
    assert_nothing_is_stored(world)


@pytest.mark.parametrize(
    "option", ["cache_max_entry_bytes", "cache_buffer_bytes"]
)
@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_features_over_a_limit_are_not_cached(tmp_path, option, missing_bytes):
    limit = str(len(KEPT) - missing_bytes)
    with world_of(tmp_path, **{option: limit}) as world:
        if missing_bytes:
            assert ask(world).body == COMPUTED
            assert_nothing_is_stored(world)
        else:
            warm(world)


def test_account_over_its_limit_caches_no_more(tmp_path):
    options = {"cache_max_account_bytes": str(2 * len(KEPT))}
    with world_of(tmp_path, **options) as world:
        world.swift.private_bytes = len(KEPT)
        assert ask(world).body == COMPUTED
        assert_nothing_is_stored(world)
        world.swift.private_bytes = len(KEPT) // 2
        warm(world)


@pytest.mark.parametrize(
    ("status", "is_other_paused"),
    [(400, False), (413, False), (500, True), (503, True), (507, True)],
)
def test_failed_store_affects_no_answer(world, status, is_other_paused):
    """The quota of an account pauses no other account."""
    failures = on_entries(world, "PUT", status)
    assert ask(world).body == COMPUTED
    until(failures)
    until_paused(world)
    for _ in range(3):
        assert_computed(ask(world))
    assert failures() == 1
    assert entries(world) == []
    assert world.filter.context.cache.is_paused(OTHER) == is_other_paused


def test_slow_store_is_cancelled(world, monkeypatch):
    monkeypatch.setattr("hapi_middleware.cache.store.STORE_SECONDS", 0.2)
    slow_on_entries(world, "PUT")
    assert ask(world).body == COMPUTED
    until_paused(world, OTHER)
    assert entries(world) == []


def test_storing_continues_after_a_pause(world, monkeypatch):
    monkeypatch.setattr("hapi_middleware.cache.store.PAUSE_SECONDS", 0.3)
    failures = on_entries(world, "PUT", 507)
    ask(world)
    until(failures)
    until_paused(world)
    world.swift.on_private = None
    until(lambda: not world.filter.context.cache.is_paused(ACCOUNT))
    warm(world)


@pytest.mark.parametrize("status", [403, 500, 503])
def test_features_are_computed_if_the_entry_cannot_be_read(world, status):
    warm(world)
    failures = on_entries(world, "GET", status)
    assert_computed(ask(world, "read"))
    assert failures() >= 1


def test_features_are_computed_if_the_read_is_slow(tmp_path):
    with world_of(tmp_path, cache_timeout="0.2") as world:
        warm(world)
        slow_on_entries(world, "GET")
        started = time.monotonic()
        assert_computed(ask(world, "read"))
        assert time.monotonic() - started < 20


def test_features_are_computed_if_the_read_breaks_off(world):
    warm(world)
    (path,) = entries(world)
    whole = world.swift.objects[path]

    def broken():
        yield whole.body[:100]
        raise OSError("a disk")

    whole.stream = broken
    world.swift.may_be_unread = True
    assert_computed(ask(world, "read"))


@pytest.mark.parametrize("content", [b"nonsense", pack("0" * 64, [b"others"])])
def test_wrong_entry_is_deleted_in_the_background(world, content):
    warm(world)
    (path,) = entries(world)
    world.swift.put(path, content)
    may_delete = []

    def slow(request):
        while request.method == "DELETE" and not may_delete:
            eventlet.sleep(0.01)

    world.swift.on_private = slow
    assert_computed(ask(world, "read"))
    assert entries(world) == [path]
    may_delete.append(True)
    until(lambda: entries(world) == [])


def test_entry_closed_too_slowly_frees_its_memory(tmp_path, monkeypatch):
    with world_of(tmp_path, cache_timeout="0.2") as world:
        warm(world)
        close = TrackedBody.close

        def stuck(body):
            close(body)
            if f"GET {quote(CACHE_PATH)}" in body.what:
                eventlet.sleep(10)

        monkeypatch.setattr(TrackedBody, "close", stuck)
        assert ask(world, "read").body == SHARD.upper()


@pytest.mark.parametrize("env", [{}, s3_env()], ids=["swift", "s3"])
def test_disconnected_client_frees_the_buffer(world, env):
    world.swift.may_be_unread = True
    request = world.request(headers=annotation(cache="readwrite"), env=env)
    _status, _headers, chunks = request.call_application(world.pipeline)
    next(iter(chunks))
    assert world.filter.context.cache.buffer.used_bytes > 0
    chunks.close()
    assert world.filter.context.cache.buffer.used_bytes == 0
    assert entries(world) == []


def test_holder_of_a_presigned_url_stores_nothing(public_world):
    query = "X-Amz-Credential=test:tester/20261123/us-east-1/s3"
    for env, state in ((s3_env(query), "miss"), (s3_env(), "store")):
        answer = ask(public_world, env=env)
        assert answer.headers["X-Hapi-Cache"] == state


def test_hits_use_no_more_memory_than_allowed(tmp_path):
    options = {"cache_buffer_bytes": str(2 * len(KEPT) - 1)}
    with world_of(tmp_path, **options) as world:
        warm(world)
        world.swift.may_be_unread = True
        request = world.request(headers=annotation(cache="read"))
        _status, headers, chunks = request.call_application(world.pipeline)
        assert dict(headers)["X-Hapi-Cache"] == "hit"
        assert_computed(ask(world, "read"))
        chunks.close()
        assert_hit(ask(world, "read"))


def test_silent_readers_of_an_account_leave_hits_to_others(tmp_path):
    options = {"cache_buffer_bytes": str(8 * len(KEPT))}
    with world_of(tmp_path, **options) as world:
        for container in ("data", "models"):
            path = f"/{ACCOUNT}/{container}"
            world.swift.read_acls[path] = "test2:tester2"
        warm(world)
        world.swift.may_be_unread = True
        unread = [
            world.request(headers=annotation(cache="read")).call_application(
                world.pipeline
            )[2]
            for _ in range(8)
        ]
        assert_hit(ask(world, "read", user="test2:tester2"))
        for chunks in unread:
            chunks.close()


def test_hit_read_too_slowly_breaks_off_if_others_need_its_memory(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("hapi_middleware.cache.store.PIECE_BYTES", 1000)
    options = {"cache_buffer_bytes": str(2 * len(KEPT) - 1)}
    with world_of(tmp_path, **options) as world:
        warm(world)
        world.swift.may_be_unread = True
        request = world.request(headers=annotation(cache="read"))
        chunks = iter(request.call_application(world.pipeline)[2])
        next(chunks)
        assert_computed(ask(world, "read"))
        monkeypatch.setattr("hapi_middleware.cache.buffer.SILENT_SECONDS", 0.0)
        assert_hit(ask(world, "read"))
        with pytest.raises(TooSlowError, match="too slowly"):
            next(chunks)
        chunks.close()


@pytest.mark.parametrize("is_read", [True, False])
def test_closed_hit_frees_its_memory(world, monkeypatch, is_read):
    """``proxy-logging`` closes only the result of ``iter()``."""
    monkeypatch.setattr("hapi_middleware.cache.store.PIECE_BYTES", 1000)
    app = proxy_logging.ProxyLoggingMiddleware(world.pipeline, {})
    warm(world)
    request = world.request(headers=annotation(cache="read"))
    _status, headers, chunks = request.call_application(app)
    assert dict(headers)["X-Hapi-Cache"] == "hit"
    assert world.filter.context.cache.buffer.used_bytes > 0
    if is_read:
        assert b"".join(chunks) == KEPT
    else:
        assert next(iter(chunks)) == FEATURES[:1000]
    chunks.close()
    assert world.filter.context.cache.buffer.used_bytes == 0


def test_entries_are_stored_with_time_to_live_and_policy(tmp_path):
    options = {"cache_ttl_seconds": "77", "cache_policy": "Policy-0"}
    with world_of(tmp_path, **options) as world:
        warm(world)
        puts = [e for e in world.swift.calls if e["REQUEST_METHOD"] == "PUT"]
        container, entry = puts
        assert container["PATH_INFO"] == CACHE_PATH
        assert container["HTTP_X_STORAGE_POLICY"] == "Policy-0"
        assert entry["HTTP_X_DELETE_AFTER"] == "77"
        content = entry["wsgi.input"].getvalue()
        assert entry["HTTP_ETAG"] == hashlib.md5(content).hexdigest()
        assert PACKAGE not in content


def test_entry_survives_packing():
    content = pack("k", [b"abc" * 400, b"abc" * 600])
    chunks = (content[n : n + 7] for n in range(0, len(content), 7))
    assert unpack("k", chunks, len(content)) == b"abc" * 1000


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c[:-1],
        lambda c: c + b"x",
        lambda c: c[:-1] + b"x",
        lambda c: c[1:],
        lambda c: b"",
        lambda c: c.replace(b'"key"', b'"kez"'),
        lambda c: c.replace(b"{", b"", 1),
        lambda c: c.replace(b"\n", b" "),
        lambda c: c + bytes(100_000),
    ],
)
def test_damage_is_detected(damage):
    content = damage(pack("k", [b"abc" * 1000]))
    with pytest.raises(DamagedEntryError):
        unpack("k", iter([content]), 4000)


def test_names_of_entries_are_unambiguous():
    parts = [("a", "b/c", "k"), ("a/b", "c", "k"), ("ab", "c", "k")]
    assert len({entry_name(*each) for each in parts}) == 3
    with pytest.raises(ValueError, match="reserved"):
        entry_name("a", "b\x00c", "k")
