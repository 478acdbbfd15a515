"""The filter's cache with failures that a real Swift rarely has."""

from __future__ import annotations

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
from hapi_protocol.errors import InternalError
from stub_worker import CLIENT_END, KEPT_END

COMPUTED = SHARD.upper() + CLIENT_END
KEPT = SHARD.upper() + KEPT_END
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


def ask(world, mode="readwrite", **changes):
    user = changes.pop("user", "test:tester")
    query = changes.pop("query", "")
    env = changes.pop("env", None)
    headers = annotation(cache=mode, **changes)
    return world.send(headers=headers, user=user, query=query, env=env)


def warm(world):
    answer = ask(world)
    assert (answer.status, answer.headers["X-Hapi-Cache"]) == (200, "store")
    assert answer.body == COMPUTED
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


def test_hit_is_answered_without_a_job(world):
    warm(world)
    jobs = len(world.worker.jobs)
    log_info: list[str] = []
    hit = ask(world, "read", env={"swift.log_info": log_info})

    assert (hit.status, hit.body) == (200, KEPT)
    assert log_info[0].startswith("hapi:model=")
    assert log_info[1:] == ["hapi:cache=hit"]
    assert hit.headers["X-Hapi-Cache"] == "hit"
    assert hit.headers["Content-Length"] == str(len(KEPT))
    assert len(world.worker.jobs) == jobs


def test_hit_is_found_after_the_upload_of_a_model_new_to_the_host(world):
    warm(world)
    world.worker.digests.clear()
    hit = ask(world, "read")
    assert (hit.body, hit.headers["X-Hapi-Cache"]) == (KEPT, "hit")
    assert len(world.worker.sources) == 1


def test_one_request_looks_up_the_cache_once(world):
    ask(world, "read")
    before = len(world.swift.calls)
    assert ask(world, "read").headers["X-Hapi-Cache"] == "miss"
    paths = [env["PATH_INFO"] for env in world.swift.calls[before:]]
    assert sum(path.startswith(CACHE_PATH) for path in paths) == 1


@pytest.mark.parametrize("mode", ["off", "read"])
def test_features_are_cached_on_request_only(world, mode):
    answer = ask(world, mode)
    expected = "off" if mode == "off" else "miss"
    assert answer.headers["X-Hapi-Cache"] == expected
    assert answer.body == SHARD.upper()
    assert not world.worker.jobs[-1].is_split
    assert entries(world) == []


def test_cache_is_off_unless_the_operator_turns_it_on(tmp_path):
    with world_of(tmp_path, cache="no") as world:
        answer = ask(world)
        assert (answer.status, answer.body) == (200, SHARD.upper())
        assert answer.headers["X-Hapi-Cache"] == "off"
        assert not any(CACHE_PATH in e["PATH_INFO"] for e in world.swift.calls)


@pytest.mark.parametrize("mode", ["", "on", "write"])
def test_unknown_mode_is_refused(world, mode):
    answer = ask(world, mode)
    assert answer.refusal == (400, "bad_cache")
    assert answer.json["allowed"] == ["off", "read", "readwrite"]


def test_head_and_304_read_no_entry(world):
    warm(world)
    etag = ask(world, "read").headers["Etag"]
    before = len(world.swift.calls)
    headers = {**annotation(cache="readwrite"), "If-None-Match": etag}
    assert world.send(headers=headers).status == 304
    assert world.send("HEAD", headers=annotation(cache="read")).status == 200
    paths = [env["PATH_INFO"] for env in world.swift.calls[before:]]
    assert not any(path.startswith(CACHE_PATH) for path in paths)


def test_object_with_a_long_name_is_not_cached(world):
    path = f"/{ACCOUNT}/data/{'n' * 990}"
    world.swift.put(path, SHARD)
    answer = world.send(path=path, headers=annotation(cache="readwrite"))
    assert answer.headers["X-Hapi-Cache"] == "off"
    assert answer.body == SHARD.upper()


@pytest.mark.parametrize(
    "header", ["X_Static_Large_Object", "X_Object_Manifest"]
)
def test_large_object_is_not_cached(world, header):
    world.swift.put(SOURCE, SHARD, **{header: "parts/of-it"})
    answer = ask(world)
    assert (answer.body, answer.headers["X-Hapi-Cache"]) == (
        SHARD.upper(),
        "off",
    )
    assert not any(CACHE_PATH in e["PATH_INFO"] for e in world.swift.calls)


def test_temporary_url_reads_and_does_not_store(tmp_path):
    options = {"allow_unauthenticated_compute": "yes"}
    with world_of(tmp_path, **options) as world:
        world.swift.read_acls[MODEL.rpartition("/")[0]] = ".r:*"
        query = signed(world, SOURCE)
        answer = ask(world, user=None, query=query)
        assert answer.headers["X-Hapi-Cache"] == "miss"
        assert answer.body == SHARD.upper()
        warm(world)
        hit = ask(world, user=None, query=query)
        assert (hit.body, hit.headers["X-Hapi-Cache"]) == (KEPT, "hit")
        world.swift.read_acls[MODEL.rpartition("/")[0]] = ""
        assert ask(world, user=None, query=query).status == 401


def test_account_that_may_not_compute_gets_no_hit(tmp_path):
    with world_of(tmp_path) as world:
        warm(world)
        world.configure(allowed_accounts=frozenset({"AUTH_physics"}))
        refused = ask(world, "read")
        assert refused.json["code"] == "compute_not_allowed"


@pytest.mark.parametrize(
    ("num_errors", "error"), [(2, ""), (None, "last frame"), (-1, "-1 errors")]
)
def test_stream_with_errors_or_a_wrong_end_is_not_cached(
    world, caplog, num_errors, error
):
    world.swift.may_be_unread = True
    world.worker.num_errors = num_errors
    if error:
        with pytest.raises(InternalError, match=error):
            ask(world)
    else:
        assert ask(world).body == COMPUTED
    assert ("breaks off" in caplog.text) == (num_errors == -1)
    eventlet.sleep(0.1)
    assert entries(world) == []


def test_stream_of_a_worker_without_tee_streams_is_not_cached(world):
    world.worker.splits = False
    answer = ask(world)
    assert (answer.status, answer.body) == (200, SHARD.upper())
    assert answer.headers["X-Hapi-Cache"] == "miss"
    eventlet.sleep(0.1)
    assert entries(world) == []


@pytest.mark.parametrize(
    "option", ["cache_max_entry_bytes", "cache_buffer_bytes"]
)
def test_features_over_a_limit_are_not_cached(tmp_path, option):
    with world_of(tmp_path, **{option: str(len(KEPT) - 1)}) as world:
        assert ask(world).body == COMPUTED
        eventlet.sleep(0.1)
        assert entries(world) == []
    folder = tmp_path / "again"
    folder.mkdir()
    with world_of(folder, **{option: str(len(KEPT))}) as world:
        warm(world)


def test_account_over_its_limit_caches_no_more(tmp_path):
    options = {"cache_max_account_bytes": str(2 * len(KEPT))}
    with world_of(tmp_path, **options) as world:
        world.swift.private_bytes = len(KEPT)
        assert ask(world).body == COMPUTED
        eventlet.sleep(0.1)
        assert entries(world) == []
        world.swift.private_bytes = len(KEPT) // 2
        warm(world)


@pytest.mark.parametrize("status", [413, 500, 503, 507])
def test_failed_store_does_not_affect_the_answer(world, status):
    failures = on_entries(world, "PUT", status)
    assert ask(world).body == COMPUTED
    until(failures)
    until(lambda: world.filter.context.cache.is_paused(ACCOUNT))
    for _ in range(3):
        answer = ask(world)
        assert answer.body == SHARD.upper()
        assert answer.headers["X-Hapi-Cache"] == "miss"
    assert failures() == 1
    assert entries(world) == []


@pytest.mark.parametrize(
    ("status", "is_other_paused"), [(413, False), (400, False), (507, True)]
)
def test_quota_of_an_account_pauses_no_other_account(
    world, status, is_other_paused
):
    on_entries(world, "PUT", status)
    ask(world)
    cache = world.filter.context.cache
    until(lambda: cache.is_paused(ACCOUNT))
    assert cache.is_paused(OTHER) == is_other_paused


def test_slow_store_is_cancelled(world, monkeypatch):
    monkeypatch.setattr("hapi_middleware.cache.store.STORE_SECONDS", 0.2)

    def slow(request):
        if request.method == "PUT":
            eventlet.sleep(10)

    world.swift.on_private = slow
    assert ask(world).body == COMPUTED
    until(lambda: world.filter.context.cache.is_paused(OTHER))
    assert entries(world) == []


def test_storing_continues_after_a_pause(world, monkeypatch):
    monkeypatch.setattr("hapi_middleware.cache.store.PAUSE_SECONDS", 0.3)
    failures = on_entries(world, "PUT", 507)
    ask(world)
    until(failures)
    until(lambda: world.filter.context.cache.is_paused(ACCOUNT))
    world.swift.on_private = None
    until(lambda: not world.filter.context.cache.is_paused(ACCOUNT))
    warm(world)


@pytest.mark.parametrize("status", [403, 500, 503])
def test_features_are_computed_if_the_entry_cannot_be_read(world, status):
    warm(world)
    failures = on_entries(world, "GET", status)
    answer = ask(world, "read")
    assert (answer.status, answer.body) == (200, SHARD.upper())
    assert answer.headers["X-Hapi-Cache"] == "miss"
    assert failures() >= 1


def test_features_are_computed_if_the_read_is_slow(tmp_path):
    with world_of(tmp_path, cache_timeout="0.2") as world:
        warm(world)

        def slow(request):
            if request.method == "GET":
                eventlet.sleep(10)

        world.swift.on_private = slow
        started = time.monotonic()
        answer = ask(world, "read")
        assert time.monotonic() - started < 3
        assert (answer.status, answer.body) == (200, SHARD.upper())


def test_features_are_computed_if_the_read_breaks_off(world):
    warm(world)
    (path,) = entries(world)
    whole = world.swift.objects[path]

    def broken():
        yield whole.body[:100]
        raise OSError("a disk")

    whole.stream = broken
    world.swift.may_be_unread = True
    answer = ask(world, "read")
    assert (answer.status, answer.body) == (200, SHARD.upper())


def test_entry_with_another_key_is_deleted(world):
    warm(world)
    (path,) = entries(world)
    world.swift.put(path, pack("0" * 64, [b"features of others"]))
    answer = ask(world, "read")
    assert (answer.status, answer.body) == (200, SHARD.upper())
    until(lambda: entries(world) == [])


def test_answer_does_not_wait_for_the_deletion_of_a_damaged_entry(world):
    warm(world)
    (path,) = entries(world)
    world.swift.put(path, b"nonsense")
    may_delete = []

    def slow(request):
        while request.method == "DELETE" and not may_delete:
            eventlet.sleep(0.01)

    world.swift.on_private = slow
    assert ask(world, "read").body == SHARD.upper()
    assert entries(world) == [path]
    may_delete.append(True)
    until(lambda: entries(world) == [])


def test_entry_that_cannot_be_closed_in_time_frees_its_memory(
    tmp_path, monkeypatch
):
    with world_of(tmp_path, cache_timeout="0.2") as world:
        warm(world)
        close = TrackedBody.close

        def stuck(body):
            close(body)
            if f"GET {quote(CACHE_PATH)}" in body.what:
                eventlet.sleep(10)

        monkeypatch.setattr(TrackedBody, "close", stuck)
        assert ask(world, "read").body == SHARD.upper()


@pytest.mark.parametrize("source", [None, "S3"])
def test_disconnected_client_frees_the_buffer(world, source):
    world.swift.may_be_unread = True
    env = s3_env() if source else {}
    request = world.request(headers=annotation(cache="readwrite"), env=env)
    _status, _headers, chunks = request.call_application(world.pipeline)
    next(iter(chunks))
    assert world.filter.context.cache.buffer.used_bytes > 0
    chunks.close()
    assert world.filter.context.cache.buffer.used_bytes == 0
    assert entries(world) == []


def test_holder_of_a_presigned_url_stores_nothing(tmp_path):
    options = {"allow_unauthenticated_compute": "yes"}
    with world_of(tmp_path, **options) as world:
        world.swift.read_acls[MODEL.rpartition("/")[0]] = ".r:*"
        query = "X-Amz-Credential=test:tester/20261123/us-east-1/s3"
        for env, state in ((s3_env(query), "miss"), (s3_env(), "store")):
            answer = world.send(headers=annotation(cache="readwrite"), env=env)
            assert answer.headers["X-Hapi-Cache"] == state


def test_hits_use_no_more_memory_than_allowed(tmp_path):
    options = {"cache_buffer_bytes": str(2 * len(KEPT) - 1)}
    with world_of(tmp_path, **options) as world:
        warm(world)
        world.swift.may_be_unread = True
        request = world.request(headers=annotation(cache="read"))
        _status, headers, chunks = request.call_application(world.pipeline)
        assert dict(headers)["X-Hapi-Cache"] == "hit"
        other = ask(world, "read")
        assert (other.status, other.body) == (200, SHARD.upper())
        assert other.headers["X-Hapi-Cache"] == "miss"
        chunks.close()
        assert ask(world, "read").headers["X-Hapi-Cache"] == "hit"


@pytest.mark.parametrize("pieces", ["all", "one"])
def test_hit_frees_its_memory_when_swift_closes_it(
    tmp_path, monkeypatch, pieces
):
    """``proxy-logging`` closes only the result of ``iter()``."""
    monkeypatch.setattr("hapi_middleware.cache.store.PIECE_BYTES", 1000)
    options = {"cache_buffer_bytes": str(2 * len(KEPT) - 1)}
    with world_of(tmp_path, **options) as world:
        app = proxy_logging.ProxyLoggingMiddleware(world.pipeline, {})
        warm(world)
        for _ in range(3):
            request = world.request(headers=annotation(cache="read"))
            _status, headers, chunks = request.call_application(app)
            assert dict(headers)["X-Hapi-Cache"] == "hit"
            if pieces == "all":
                assert b"".join(chunks) == KEPT
            else:
                assert next(iter(chunks)) == SHARD.upper()[:1000]
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
    chunks = [
        content[start : start + 7] for start in range(0, len(content), 7)
    ]
    assert unpack("k", iter(chunks), len(content)) == b"abc" * 1000


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
    names = {
        entry_name("a", "b/c", "k"),
        entry_name("a/b", "c", "k"),
        entry_name("ab", "c", "k"),
    }
    assert len(names) == 3
    with pytest.raises(ValueError, match="reserved"):
        entry_name("a", "b\x00c", "k")
