"""Refusals of a real Swift are named, with the transaction id of its log."""

import io
from collections.abc import Callable
from typing import Any

import pytest

from hapi_client.data.index import load_index
from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.http_client import ConnectionOptions
from hapi_client.swift.retry import Backoff
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import HapiError
from hapi_protocol.headers import Annotation, ByteRange, ModelPath
from photos import shard

ONCE = ConnectionOptions(backoff=Backoff(attempts=1))
INDEX = Annotation(model=None, cut=0, index=True)
NO_MODEL = Annotation(ModelPath("AUTH_test", "errors", "no.hapi"), 1)
NO_PACKAGE = Annotation(ModelPath("AUTH_test", "errors", "a.tar"), 1)
Ask = Callable[[Connection], Any]


@pytest.fixture(scope="module")
def data(owner):
    owner.put("/AUTH_test/errors")
    owner.put("/AUTH_test/errors/a.tar", shard(2))
    owner.put("/AUTH_test/errors/not.tar", b"no tar" * 200)
    owner.put("/AUTH_test/errors/hapi-index.arrow", b"no index")


def put_with_other_md5(connection):
    connection.put("errors", "b", io.BytesIO(b"b"), 1, md5="0" * 32)


def read_range(etag, start=0):
    wanted = ByteRange(start, start + 1)
    return lambda c: c.get_range("errors", "a.tar", wanted, if_match=etag)


def range_behind_the_end(connection):
    found = connection.head("errors", "a.tar")
    assert found is not None
    read_range(found.etag, 1 << 30)(connection)


def features(name, annotation):
    return lambda c: c.get_features("errors", name, annotation)


@pytest.mark.parametrize(
    ("ask", "code"),
    [
        (lambda c: c.open("errors", "none"), "not_found"),
        (lambda c: list(c.list("no container")), "not_found"),
        (lambda c: c.delete("errors", "none"), "not_found"),
        (lambda c: c.put_container("x" * 300), "bad_request"),
        (put_with_other_md5, "unsupported_object"),
        (read_range("e" * 32), "source_changed"),
        (range_behind_the_end, "bad_range"),
        (lambda c: load_index(c, Location("errors")), "bad_index"),
        (lambda c: load_index(c, Location("errors", "x")), "bad_index"),
        (features("none", INDEX), "not_found"),
        (features("not.tar", INDEX), "unsupported_object"),
        (features("a.tar", NO_MODEL), "not_found"),
        (features("a.tar", NO_PACKAGE), "bad_package"),
        (
            lambda c: c.get_profile("errors", "a.tar", seconds=300),
            "bad_package",
        ),
        (lambda c: c.account_request("PUT", {"hapi-cache": ""}), None),
    ],
)
def test_error_has_the_transaction_of_swifts_log(cluster, data, ask, code):
    login = Credentials.v1(cluster.auth_url, cluster.user, cluster.key)
    with (
        Connection(login, ONCE) as connection,
        pytest.raises(HapiError) as caught,
    ):
        ask(connection)
    error = caught.value
    assert code is None or error.code == code
    assert error.trans_id is not None
    assert error.trans_id in str(error)
    assert error.trans_id in cluster.log("swift").read_text()


@pytest.mark.parametrize(
    ("user", "key", "storage_path"),
    [
        ("test:tester", "wrong", ""),
        # Of the account, but no admin of it.
        ("test:tester3", "testing3", "/v1/AUTH_test"),
        ("test2:tester2", "testing2", "/v1/AUTH_test"),
    ],
)
def test_refusal_of_a_user_has_a_transaction(
    cluster, data, user, key, storage_path
):
    environ = {"ST_AUTH": cluster.auth_url, "ST_USER": user, "ST_KEY": key}
    if storage_path:
        environ["OS_STORAGE_URL"] = cluster.proxy_url + storage_path
    with (
        Connection(Credentials.from_environment(environ), ONCE) as connection,
        pytest.raises(HapiError) as caught,
    ):
        connection.open("errors", "a.tar")
    assert caught.value.status in (401, 403)
    assert caught.value.trans_id in cluster.log("swift").read_text()
