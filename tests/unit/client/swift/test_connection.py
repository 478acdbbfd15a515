"""Requests to a scripted server that fails in every known way."""

import hashlib
import io
import json
import threading
import time

import pytest

from hapi_client.data.index import load_index
from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.http_client import OTHER_REPLICAS, ConnectionOptions
from hapi_client.swift.retry import Backoff
from hapi_client.swift.swift_url import Location
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import DataIndex, IndexRow, ShardIndex
from hapi_protocol.errors import (
    ClientError,
    HapiError,
    NotFoundError,
    RightsError,
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
from scripted_swift import Answer
from stub_worker import stub_profile

ANNOTATION = Annotation(ModelPath("AUTH_test", "m", "x.hapi"), 1)
TRANS_ID = {"X-Trans-Id": "tx1"}
JSON = {"Content-Type": "application/json; charset=UTF-8"}
BUSY = Answer(
    503,
    json.dumps({"code": "queue_full", "message": "full"}).encode(),
    {**TRANS_ID, "Retry-After": "0"},
)
PROFILE = stub_profile("d" * 64, 3)


def read(connection):
    with connection.open("c", "o") as body:
        return body.read()


def get_range(connection, first=0, last=1, **options):
    byte_range = ByteRange(first, last)
    return connection.get_range(
        "c", "o", byte_range, if_match="tag", **options
    )


def get_profile(connection):
    return connection.get_profile("m", "x.hapi", seconds=5)


def test_one_token_serves_many_requests_with_quoted_names(swift, connection):
    assert connection.account == "AUTH_test"
    assert connection.storage_url.endswith("/v1/AUTH_test")
    swift.script(Answer(200, b"abc"))
    assert [read(connection) for _ in range(3)] == [b"abc"] * 3
    connection.head("c", "a b/ü?.tar")
    assert swift.num_tokens == 1
    assert swift.requests[0].headers["X-Auth-Token"] == "token1"
    assert swift.requests[3].path == "/v1/AUTH_test/c/a%20b/%C3%BC%3F.tar"


def test_expired_token_is_renewed_and_the_body_sent_again(swift, connection):
    swift.script(Answer(401), Answer(201))
    connection.put("c", "o", io.BytesIO(b"data"), 4)
    tokens = [r.headers["X-Auth-Token"] for r in swift.requests]
    assert tokens == ["token1", "token2"]
    assert [r.body for r in swift.requests] == [b"data", b"data"]


def test_second_401_is_an_error_of_the_user(swift, connection):
    swift.script(Answer(401, b"no", TRANS_ID))
    with pytest.raises(RightsError, match="with a new token too") as caught:
        connection.open("c", "o")
    assert (caught.value.status, caught.value.trans_id) == (401, "tx1")
    assert (swift.num_tokens, len(swift.requests)) == (2, 2)


@pytest.mark.parametrize("status", [429, 498, 500, 502, 503, 504])
def test_idempotent_requests_are_retried(swift, connection, status):
    swift.script(Answer(status), Answer(status), Answer(200, b"fine"))
    assert read(connection) == b"fine"
    assert connection.traffic.count().retries == 2


def test_retried_put_sends_its_body_from_the_start(swift, connection):
    swift.script(Answer(503), Answer(201, headers={"ETag": '"e"'}))
    source = io.BytesIO(b"skipped-data")
    source.seek(8)
    assert connection.put("c", "o", source, 4) == "e"
    assert [r.body for r in swift.requests] == [b"data", b"data"]
    assert connection.traffic.count().sent_bytes == 8


@pytest.mark.parametrize(
    "request_of",
    [lambda c: c.open("c", "o"), get_profile],
    ids=["object", "profile"],
)
def test_last_failure_is_raised_with_all_its_facts(
    swift, connection, request_of
):
    swift.script(BUSY)
    with pytest.raises(UnavailableError) as caught:
        request_of(connection)
    error = caught.value
    assert (error.code, error.status) == ("queue_full", 503)
    assert (error.trans_id, error.retry_after) == ("tx1", 0)
    assert error.object_name in ("c/o", "m/x.hapi")
    assert len(swift.requests) == connection.options.backoff.attempts


def test_request_without_retry_is_sent_once(swift, connection):
    swift.script(BUSY)
    with pytest.raises(UnavailableError):
        connection.get_features("c", "o", ANNOTATION, retry=False)
    assert len(swift.requests) == 1


def test_large_object_with_an_old_replica_of_a_segment_is_read_again(
    swift, connection
):
    swift.script(*[Answer(409)] * 2, Answer(200, b"whole"))
    assert read(connection) == b"whole"


def test_large_object_with_a_replaced_segment_is_an_error(swift, connection):
    swift.script(*[Answer(409)] * 9)
    with pytest.raises(HapiError) as caught:
        connection.open("c", "o")
    assert caught.value.status == 409
    assert len(swift.requests) == 1 + OTHER_REPLICAS


@pytest.mark.parametrize("status", [400, 403, 404, 413, 422])
def test_refusals_are_not_retried(swift, connection, status):
    swift.script(Answer(status))
    with pytest.raises(HapiError) as caught:
        connection.open("c", "o")
    assert caught.value.status == status
    assert len(swift.requests) == 1


def test_html_error_pages_become_text(swift, connection):
    page = b"<html><h1>Not Found</h1><p>No such thing.</p></html>"
    swift.script(Answer(404, page, {"Content-Type": "text/html"}))
    with pytest.raises(NotFoundError, match="404: Not Found No such thing"):
        connection.open("c", "o")


def test_body_that_breaks_off_is_truncated(swift, connection):
    swift.script(Answer(200, b"half", cut_off=4))
    with pytest.raises(TruncatedStreamError, match="after 4 bytes"):
        read(connection)
    assert connection.traffic.count().received_bytes == 4


def test_bytes_are_counted_in_both_directions(swift, connection):
    swift.script(Answer(201, b"x" * 10), Answer(200, b"y" * 1000))
    connection.put("c", "o", io.BytesIO(b"z" * 50), 50)
    read(connection)
    count = connection.traffic.count()
    assert (count.sent_bytes, count.received_bytes) == (50, 1010)
    assert count.requests == 2


def test_bad_limit_of_a_connection_is_refused(credentials):
    with pytest.raises(ClientError, match="read_seconds is -1; give seconds"):
        Connection(credentials, read_seconds=-1)


def test_silent_server_is_too_slow(swift, credentials):
    options = ConnectionOptions(read_seconds=0.2, backoff=Backoff(attempts=1))
    swift.script(Answer(hang_seconds=5))
    with Connection(credentials, options) as connection:
        assert connection.account
        with pytest.raises(TooSlowError, match=r"0\.2 s"):
            connection.open("c", "o")


def test_body_has_a_deadline(swift, connection):
    swift.script(Answer(200, b"x" * 100))
    with connection.open("c", "o", seconds=0.05) as body:
        time.sleep(0.1)
        with pytest.raises(TooSlowError, match="deadline"):
            body.read()


def test_unreachable_auth_service_is_named(fast):
    credentials = Credentials.v1("http://127.0.0.1:9/auth", "u", "k")
    with (
        Connection(credentials, fast) as connection,
        pytest.raises(ClientError, match=r"127\.0\.0\.1:9") as caught,
    ):
        connection.open("c", "o")
    assert caught.value.code == "not_connected"


def test_cancelling_ends_a_waiting_thread_at_once(swift, connection):
    swift.script(Answer(hang_seconds=30))
    scope = CancelScope()
    errors = []

    def wait():
        with connection.working_for(scope):
            try:
                connection.open("c", "o")
            except ClientError as error:
                errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not swift.requests:
        time.sleep(0.01)
    time.sleep(0.05)
    started = time.monotonic()
    connection.cancel(scope)
    thread.join()
    assert time.monotonic() - started < 15
    assert errors[0].code == "not_connected"


def test_cancelling_one_scope_leaves_others_alone(swift, connection):
    swift.script(Answer(200, b"abc"))
    scope = CancelScope()
    with connection.working_for(scope):
        read(connection)
    with connection.open("c", "o") as body:
        connection.cancel(scope)
        assert body.read() == b"abc"


def test_range_request_names_its_version(swift, connection):
    swift.script(Answer(206, b"abc"))
    assert get_range(connection, 2, 4) == b"abc"
    headers = swift.requests[0].headers
    assert headers["Range"] == "bytes=2-4"
    assert headers["If-Match"] == '"tag"'


@pytest.mark.parametrize(("num_bytes", "first"), [(160, 140), (3, 3)])
def test_range_reports_when_its_last_part_remains(
    swift, connection, num_bytes, first
):
    data = bytes(range(num_bytes))
    swift.script(Answer(206, data))
    before = connection.traffic.count().received_bytes
    reports = []
    received = get_range(
        connection,
        0,
        num_bytes - 1,
        ending=lambda: reports.append(
            connection.traffic.count().received_bytes
        ),
    )
    assert received == data
    assert reports == [before + first]


def test_annotation_is_sent_as_headers(swift, connection):
    swift.script(Answer(200, b"", {"Content-Type": CONTENT_TYPE_STREAM}))
    with connection.get_features("c", "o", ANNOTATION):
        pass
    headers = swift.requests[0].headers
    assert headers["X-Hapi-Model"] == "/AUTH_test/m/x.hapi"
    assert headers["X-Hapi-Cut"] == "1"


def test_head_of_a_missing_object_is_none(swift, connection):
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


def test_fork_opens_its_own_sockets(swift, connection, monkeypatch):
    swift.script(Answer(200, b"abc"))
    connection.head("c", "o")
    transport = connection._http._current
    monkeypatch.setattr("os.getpid", lambda: 1)
    connection.head("c", "o")
    assert connection._http._current is not transport


def test_profile_is_requested_again_while_the_worker_is_busy(
    swift, connection
):
    swift.script(BUSY, BUSY, Answer(200, PROFILE.to_body(), JSON))
    assert get_profile(connection) == PROFILE
    assert len(swift.requests) == 3
    request = swift.requests[-1]
    assert request.path == "/v1/AUTH_test/m/x.hapi"
    sent = {k: v for k, v in request.headers.items() if k.startswith("X-Hapi")}
    assert sent == {"X-Hapi-Profile": "true"}


def test_profile_may_take_longer_than_the_read_timeout(swift, credentials):
    swift.script(Answer(200, PROFILE.to_body(), JSON, hang_seconds=0.5))
    options = ConnectionOptions(read_seconds=0.1, backoff=Backoff(attempts=1))
    with Connection(credentials, options) as connection:
        assert get_profile(connection) == PROFILE


def test_redirect_is_neither_followed_nor_taken_for_success(swift, connection):
    swift.script(Answer(301, headers={"Location": "https://other/v1"}))
    with pytest.raises(ClientError, match="301 redirects to https://other"):
        connection.head("c", "o")
    assert len(swift.requests) == 1


STREAM = {**TRANS_ID, "Content-Type": CONTENT_TYPE_STREAM}
TAR = {**TRANS_ID, "Content-Type": "application/x-tar"}
PAGE = Answer(200, b"<html>welcome</html>", TRANS_ID)


def open_object(connection):
    return connection.open("c", "o")


def list_objects(connection):
    return list(connection.list("c"))


def find_index(connection):
    return load_index(connection, Location("c"))


def md5(data):
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def index_answer(body):
    return Answer(200, body, {**TRANS_ID, "ETag": f'"{md5(INDEX)}"'})


INDEX = DataIndex(
    (ShardIndex("a.tar", "e", (IndexRow(0, "k", 0, 512, 1),)),)
).to_bytes()
CHANGED = INDEX.replace(b"a.tar", b"b.tar")


def test_index_that_differs_from_its_etag_is_read_again(swift, connection):
    swift.script(index_answer(CHANGED), index_answer(INDEX))
    assert find_index(connection) == DataIndex.from_bytes(INDEX)
    assert len(swift.requests) == 2


def test_index_that_stays_damaged_is_refused_with_the_remedy(
    swift, connection
):
    swift.script(index_answer(CHANGED))
    with pytest.raises(HapiError, match=r"MD5 .* 'hapi index swift") as caught:
        find_index(connection)
    assert caught.value.trans_id == "tx1"
    assert len(swift.requests) == 3


@pytest.mark.parametrize(
    ("headers", "is_refused"),
    [
        ({"ETag": f'"{md5(b"stored")}"'}, True),
        ({"ETag": md5(b"stored")}, True),
        ({"ETag": md5(b"stored"), "X-Static-Large-Object": "True"}, False),
        ({"ETag": md5(b"stored"), "X-Object-Manifest": "c/o"}, False),
        ({"ETag": f"{md5(b'stored')}-2"}, False),
        ({"ETag": md5(b"changed")}, False),
        ({}, False),
    ],
)
def test_whole_object_is_compared_with_its_etag(
    swift, connection, headers, is_refused
):
    swift.script(Answer(200, b"changed", headers))
    if is_refused:
        with pytest.raises(
            HapiError, match=r"c/o is damaged: .* MD5"
        ) as caught:
            connection.get_object("c", "o")
        assert caught.value.code == "source_damaged"
    else:
        assert connection.get_object("c", "o") == b"changed"


def get_features(connection):
    return connection.get_features("c", "o", ANNOTATION)


def open_many(connection):
    return connection.open_many("c", ("a b.jpg", "ü\n.jpg"), ANNOTATION)


def test_names_of_many_objects_are_quoted_and_not_retried(swift, connection):
    swift.script(answer(503))
    with pytest.raises(UnavailableError):
        open_many(connection)
    (request,) = swift.requests
    assert request.method == "POST"
    assert request.path == "/v1/AUTH_test/c?hapi"
    assert request.body == b"a%20b.jpg\n%C3%BC%0A.jpg"
    assert request.headers["X-Hapi-Model"] == "/AUTH_test/m/x.hapi"


def purge(connection):
    return connection.account_request("GET", {"hapi-cache": ""})


def answer(status, body=b"", headers=TRANS_ID, **options):
    return Answer(status, body, headers, **options)


@pytest.mark.parametrize(
    ("request_of", "answer", "code"),
    [
        (open_object, answer(403), "forbidden"),
        (open_object, answer(302), "bad_configuration"),
        (open_object, answer(401), "unauthorized"),
        (list_objects, answer(404), "not_found"),
        (list_objects, PAGE, "bad_configuration"),
        (Connection.info, PAGE, "bad_configuration"),
        (purge, PAGE, "bad_configuration"),
        (Connection.require_hapi, answer(200, b"{}"), "no_hapi"),
        (Connection.require_hapi, answer(200, b'{"swift": {}}'), "no_hapi"),
        (Connection.require_hapi, answer(200, b'{"hapi": null}'), "no_hapi"),
        (
            Connection.require_hapi,
            answer(200, b'{"hapi": {}}'),
            "unsupported_version",
        ),
        (get_range, answer(412), "source_changed"),
        (get_range, answer(200, b"everything"), "bad_configuration"),
        (get_range, answer(200, b"ab"), "bad_configuration"),
        (get_range, answer(206, b"a", cut_off=1), "truncated"),
        (get_profile, answer(200, b"{}", {**TRANS_ID, **JSON}), "bad_request"),
        (get_profile, answer(200, b"PK"), "no_hapi"),
        (open_many, answer(204), "no_hapi"),
        (open_many, answer(404), "not_found"),
        (open_many, answer(503), "service_unavailable"),
        (get_features, answer(200, b"tar", TAR), "no_hapi"),
        (get_features, answer(200, b"PK"), "no_hapi"),
        (find_index, answer(404), "not_found"),
        (find_index, answer(200, b"PK"), "bad_index"),
    ],
)
def test_errors_have_a_code_the_transaction_id_and_object_name(
    swift, connection, answer, request_of, code
):
    swift.script(answer)
    with pytest.raises(HapiError) as caught:
        request_of(connection)
    assert caught.value.code == code
    assert caught.value.trans_id == "tx1"
    assert caught.value.object_name is not None
