"""Requests against a server that misbehaves as told."""

from __future__ import annotations

import io
import json
import threading
import time

import pytest

from hapi_client.data.index import load_index
from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.http_client import ConnectionOptions
from hapi_client.swift.retry import Backoff
from hapi_client.swift.swift_url import Location
from hapi_client.swift.transport import CancelScope
from hapi_protocol.errors import (
    AnnotationError,
    ClientError,
    HapiError,
    RightsError,
    SourceChangedError,
    TooSlowError,
    TruncatedStreamError,
    UnavailableError,
)
from hapi_protocol.headers import (
    CONTENT_TYPE_STREAM,
    Annotation,
    ByteRange,
    ModelPath,
)
from scripted_swift import Answer, scripted_swift
from stub_worker import stub_profile

FAST = ConnectionOptions(
    connect_seconds=5,
    read_seconds=5,
    body_seconds=10,
    backoff=Backoff(attempts=3, first_seconds=0.01, max_seconds=0.02),
)
ANNOTATION = Annotation(ModelPath("AUTH_test", "m", "x.hapi"), 1)
BUSY = Answer(
    503,
    json.dumps({"code": "queue_full", "message": "full"}).encode(),
    {"X-Trans-Id": "tx1", "Retry-After": "0"},
)


@pytest.fixture
def swift():
    with scripted_swift() as server:
        yield server


@pytest.fixture
def connection(swift):
    login = Credentials.v1(swift.auth_url, "test:tester", "testing")
    with Connection(login, FAST) as made:
        yield made


def test_account_comes_from_the_storage_url(connection):
    assert connection.account == "AUTH_test"
    assert connection.storage_url.endswith("/v1/AUTH_test")


def test_one_token_serves_many_requests(swift, connection):
    swift.script(Answer(200, b"abc"))
    for _ in range(3):
        with connection.open("c", "o") as body:
            assert body.read() == b"abc"
    assert swift.num_tokens == 1
    assert swift.requests[0].headers["X-Auth-Token"] == "token1"


def test_names_are_quoted(swift, connection):
    swift.script(Answer())
    with connection.open("c", "a b/ü?.tar"):
        pass
    assert swift.requests[0].path == "/v1/AUTH_test/c/a%20b/%C3%BC%3F.tar"


def test_an_expired_token_is_renewed_once(swift, connection):
    swift.script(Answer(401), Answer(201))
    connection.put("c", "o", io.BytesIO(b"data"), 4)
    tokens = [r.headers["X-Auth-Token"] for r in swift.requests]
    assert tokens == ["token1", "token2"]
    assert [r.body for r in swift.requests] == [b"data", b"data"]


def test_a_second_401_is_the_users_error(swift, connection):
    swift.script(Answer(401))
    with pytest.raises(RightsError) as caught:
        connection.open("c", "o")
    assert caught.value.status == 401
    assert len(swift.requests) == 2


@pytest.mark.parametrize("status", [429, 498, 500, 502, 503, 504])
def test_idempotent_requests_are_repeated(swift, connection, status):
    swift.script(Answer(status), Answer(status), Answer(200, b"fine"))
    with connection.open("c", "o") as body:
        assert body.read() == b"fine"
    assert connection.traffic.count().retries == 2


def test_a_put_sends_its_body_again_from_the_start(swift, connection):
    swift.script(Answer(503), Answer(201, headers={"ETag": '"e"'}))
    source = io.BytesIO(b"skipped-data")
    source.seek(8)
    assert connection.put("c", "o", source, 4) == "e"
    assert [r.body for r in swift.requests] == [b"data", b"data"]
    assert connection.traffic.count().sent_bytes == 8


def test_the_last_failure_is_the_error_with_all_its_facts(swift, connection):
    swift.script(BUSY)
    with pytest.raises(UnavailableError) as caught:
        connection.open("c", "o")
    error = caught.value
    assert (error.code, error.status) == ("queue_full", 503)
    assert (error.object_name, error.trans_id) == ("c/o", "tx1")
    assert error.retry_after == 0
    assert len(swift.requests) == 3


def test_an_impatient_request_is_not_repeated(swift, connection):
    swift.script(BUSY)
    with pytest.raises(UnavailableError):
        connection.get_features("c", "o", ANNOTATION, retry=False)
    assert len(swift.requests) == 1


@pytest.mark.parametrize("status", [400, 403, 404, 409, 413, 422])
def test_refusals_are_not_repeated(swift, connection, status):
    swift.script(Answer(status))
    with pytest.raises(Exception, match=f"{status}"):
        connection.open("c", "o")
    assert len(swift.requests) == 1


def test_swifts_own_pages_become_text(swift, connection):
    page = b"<html><h1>Not Found</h1><p>No such thing.</p></html>"
    swift.script(Answer(404, page, {"Content-Type": "text/html"}))
    with pytest.raises(RightsError) as caught:
        connection.open("c", "o")
    assert "404: Not Found No such thing." in caught.value.message


def test_a_body_that_breaks_off_is_named_truncated(swift, connection):
    swift.script(Answer(200, b"half", cut_off=4))
    with (
        connection.open("c", "o") as body,
        pytest.raises(TruncatedStreamError, match="after 4 bytes"),
    ):
        body.read()
    assert connection.traffic.count().received_bytes == 4


def test_bytes_on_the_wire_are_counted_both_ways(swift, connection):
    swift.script(Answer(201, b"x" * 10), Answer(200, b"y" * 1000))
    connection.put("c", "o", io.BytesIO(b"z" * 50), 50)
    with connection.open("c", "o") as body:
        body.read()
    count = connection.traffic.count()
    assert (count.sent_bytes, count.received_bytes) == (50, 1010)
    assert count.requests == 2


def test_a_silent_server_is_a_named_error(swift):
    options = ConnectionOptions(read_seconds=0.2, backoff=Backoff(attempts=1))
    login = Credentials.v1(swift.auth_url, "u", "k")
    swift.script(Answer(hang_seconds=5))
    with Connection(login, options) as connection:
        assert connection.account
        with pytest.raises(TooSlowError, match=r"0\.2 s"):
            connection.open("c", "o")


def test_a_body_has_a_deadline(swift, connection):
    swift.script(Answer(200, b"x" * 100))
    with connection.open("c", "o", seconds=0.05) as body:
        time.sleep(0.1)
        with pytest.raises(TooSlowError, match="deadline"):
            body.read()


def test_nobody_there_is_a_named_error():
    login = Credentials.v1("http://127.0.0.1:9/auth", "u", "k")
    with (
        Connection(login, FAST) as connection,
        pytest.raises(ClientError, match=r"127\.0\.0\.1:9"),
    ):
        connection.open("c", "o")


def test_cancelling_ends_a_waiting_thread_at_once(swift, connection):
    swift.script(Answer(hang_seconds=30))
    scope = CancelScope()
    caught = []

    def wait():
        with connection.working_for(scope):
            try:
                connection.open("c", "o")
            except ClientError as error:
                caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not swift.requests:
        time.sleep(0.01)
    time.sleep(0.05)
    started = time.monotonic()
    connection.cancel(scope)
    thread.join(5)
    assert time.monotonic() - started < 2
    assert caught[0].code == "not_connected"


def test_cancelling_one_scope_leaves_others_alone(swift, connection):
    swift.script(Answer(200, b"abc"))
    scope = CancelScope()
    with connection.working_for(scope), connection.open("c", "o") as body:
        body.read()
    with connection.open("c", "o") as body:
        connection.cancel(scope)
        assert body.read() == b"abc"


def test_a_range_names_its_version(swift, connection):
    swift.script(Answer(206, b"abc"))
    got = connection.get_range("c", "o", ByteRange(2, 4), if_match="tag")
    assert got == b"abc"
    headers = swift.requests[0].headers
    assert headers["Range"] == "bytes=2-4"
    assert headers["If-Match"] == '"tag"'


@pytest.mark.parametrize(("num_bytes", "first"), [(160, 140), (3, 3)])
def test_a_range_that_has_nearly_come_is_told(
    swift, connection, num_bytes, first
):
    data = bytes(range(num_bytes))
    swift.script(Answer(206, data))
    before = connection.traffic.count().received_bytes
    told = []
    got = connection.get_range(
        "c",
        "o",
        ByteRange(0, num_bytes - 1),
        if_match="tag",
        ending=lambda: told.append(connection.traffic.count().received_bytes),
    )
    assert got == data
    assert told == [before + first]


def test_a_changed_shard_is_named(swift, connection):
    swift.script(Answer(412))
    with pytest.raises(SourceChangedError, match="c/o has changed"):
        connection.get_range("c", "o", ByteRange(0, 1), if_match="tag")


def test_a_gateway_that_drops_range_is_noticed(swift, connection):
    swift.script(Answer(200, b"everything"))
    with pytest.raises(ClientError, match="Range"):
        connection.get_range("c", "o", ByteRange(0, 1), if_match="tag")


def test_plain_bytes_for_an_annotated_get_mean_no_filter(swift, connection):
    swift.script(Answer(200, b"tar", {"Content-Type": "application/x-tar"}))
    with pytest.raises(ClientError) as caught:
        connection.get_features("c", "o", ANNOTATION)
    assert caught.value.code == "no_hapi"
    assert "application/x-tar" in caught.value.message


def test_an_annotation_travels_as_headers(swift, connection):
    swift.script(Answer(200, b"", {"Content-Type": CONTENT_TYPE_STREAM}))
    with connection.get_features("c", "o", ANNOTATION):
        pass
    headers = swift.requests[0].headers
    assert headers["X-Hapi-Model"] == "/AUTH_test/m/x.hapi"
    assert headers["X-Hapi-Cut"] == "1"


@pytest.mark.parametrize("info", [{}, {"swift": {}}, {"hapi": None}])
def test_a_proxy_without_the_filter_is_told_apart(swift, connection, info):
    swift.script(Answer(200, json.dumps(info).encode()))
    with pytest.raises(ClientError) as caught:
        connection.require_hapi()
    assert caught.value.code == "no_hapi"
    assert "cut 0" in caught.value.message


def test_head_of_nothing_is_none(swift, connection):
    swift.script(Answer(404))
    assert connection.head("c", "o") is None


def test_listing_follows_pages_and_slo_etags(swift, connection, monkeypatch):
    monkeypatch.setattr("hapi_client.swift.account.LIST_LIMIT", 1)
    first = [{"name": "a", "hash": "h", "bytes": 3, "slo_etag": '"s"'}]
    second = [{"name": "b", "hash": "k", "bytes": 4}]
    swift.script(
        *(Answer(200, json.dumps(page).encode()) for page in (first, second)),
        Answer(200, b"[]"),
    )
    assert list(connection.list("c", "p")) == [
        ObjectInfo("a", "s", 3),
        ObjectInfo("b", "k", 4),
    ]
    assert "marker=b" in swift.requests[-1].path


def test_a_fork_gets_sockets_of_its_own(swift, connection, monkeypatch):
    swift.script(Answer(200, b"abc"))
    connection.head("c", "o")
    mine = connection._http._current
    monkeypatch.setattr("os.getpid", lambda: 1)
    connection.head("c", "o")
    assert connection._http._current is not mine


def test_profile_is_asked_for_again_while_the_worker_is_busy(
    swift, connection
):
    profile = stub_profile("d" * 64, 3)
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    swift.script(BUSY, BUSY, Answer(200, profile.to_body(), headers))
    assert connection.get_profile("m", "x.hapi", seconds=5) == profile
    assert len(swift.requests) == 3
    asked = swift.requests[-1]
    assert asked.path == "/v1/AUTH_test/m/x.hapi"
    names = [name for name in asked.headers if name.startswith("X-Hapi")]
    assert names == ["X-Hapi-Profile"]
    assert asked.headers["X-Hapi-Profile"] == "true"


def test_profile_may_take_longer_than_other_answers(swift):
    profile = stub_profile("d" * 64, 3)
    headers = {"Content-Type": "application/json"}
    swift.script(Answer(200, profile.to_body(), headers, hang_seconds=0.5))
    options = ConnectionOptions(read_seconds=0.1, backoff=Backoff(attempts=1))
    login = Credentials.v1(swift.auth_url, "u", "k")
    with Connection(login, options) as connection:
        assert connection.get_profile("m", "x.hapi", seconds=5) == profile


def test_profile_of_a_busy_worker_is_an_error_in_the_end(swift, connection):
    swift.script(BUSY)
    with pytest.raises(UnavailableError) as caught:
        connection.get_profile("m", "x.hapi", seconds=5)
    assert caught.value.code == "queue_full"
    assert len(swift.requests) == FAST.backoff.attempts


def test_bytes_in_the_place_of_a_profile_mean_no_filter(swift, connection):
    headers = {"Content-Type": "application/octet-stream"}
    swift.script(Answer(200, b"PK", headers))
    with pytest.raises(ClientError) as caught:
        connection.get_profile("m", "x.hapi", seconds=5)
    assert caught.value.code == "no_hapi"
    swift.script(Answer(200, b"{}", {"Content-Type": "application/json"}))
    swift.answers.popleft()
    with pytest.raises(AnnotationError, match="no profile"):
        connection.get_profile("m", "x.hapi", seconds=5)


# --- whose answer it was ----------------------------------------------------

ID = {"X-Trans-Id": "tx1"}
STREAM = {**ID, "Content-Type": CONTENT_TYPE_STREAM}
PAGE = Answer(200, b"<html>welcome</html>", ID)
NAMES = ("a.jpg", "b.jpg")


@pytest.mark.parametrize(
    ("answer", "ask"),
    [
        (Answer(403, headers=ID), lambda c: c.open("c", "o")),
        (Answer(302, headers=ID), lambda c: c.open("c", "o")),
        (Answer(401, headers=ID), lambda c: c.open("c", "o")),
        (Answer(404, headers=ID), lambda c: list(c.list("c"))),
        (PAGE, lambda c: list(c.list("c"))),
        (PAGE, lambda c: c.info()),
        (PAGE, lambda c: c.account_request("GET", {"hapi-cache": ""})),
        (Answer(200, b"{}", ID), lambda c: c.require_hapi()),
        (Answer(200, b'{"hapi": {}}', ID), lambda c: c.require_hapi()),
        (
            Answer(412, headers=ID),
            lambda c: c.get_range("c", "o", ByteRange(0, 1), if_match="e"),
        ),
        (
            Answer(200, b"ab", ID),
            lambda c: c.get_range("c", "o", ByteRange(0, 1), if_match="e"),
        ),
        (
            Answer(206, b"a", ID, cut_off=1),
            lambda c: c.get_range("c", "o", ByteRange(0, 1), if_match="e"),
        ),
        (
            Answer(200, b"{}", {**ID, "Content-Type": "application/json"}),
            lambda c: c.get_profile("m", "x", seconds=5),
        ),
        (
            Answer(200, b"no stream", STREAM),
            lambda c: list(c.get_many("c", NAMES, ANNOTATION)),
        ),
        (
            Answer(200, b"PK", ID),
            lambda c: c.get_features("c", "o", ANNOTATION),
        ),
        (Answer(404, headers=ID), lambda c: load_index(c, Location("c"))),
        (Answer(200, b"PK", ID), lambda c: load_index(c, Location("c"))),
    ],
)
def test_errors_of_an_answer_have_its_transaction(
    swift, connection, answer, ask
):
    swift.script(answer)
    with pytest.raises(HapiError) as caught:
        ask(connection)
    assert caught.value.trans_id == "tx1"
    assert caught.value.object_name is not None


def test_a_redirection_is_not_followed_and_not_taken_for_success(
    swift, connection
):
    swift.script(Answer(301, headers={"Location": "https://other/v1"}))
    with pytest.raises(ClientError, match="301, to be found at https://other"):
        connection.head("c", "o")
    assert len(swift.requests) == 1
