"""The tree of errors: codes, pickling, HTTP bodies."""

import pickle

import pytest

from hapi_protocol.errors import (
    CODES,
    ClientError,
    error_from_body,
    make_error,
)


@pytest.mark.parametrize("code", sorted(CODES))
def test_each_error_survives_pickling_and_http(code):
    error = make_error(
        code,
        "what happened",
        object_name="/a/c/o",
        trans_id="tx",
        details={"needed_bytes": 5},
    )
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    if error.status:
        arrived = error_from_body(error.status, error.to_body())
        assert type(arrived) is type(error)
        assert vars(arrived) == vars(error)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (401, "unauthorized"),
        (403, "forbidden"),
        (404, "not_found"),
        (416, "bad_range"),
        (418, "bad_request"),
        (498, "share_exceeded"),
        (503, "service_unavailable"),
        (507, "internal"),
    ],
)
@pytest.mark.parametrize(
    "body",
    [b"<html>no</html>", b"", b"[1]", b'{"code": "made-up"}', b"[" * 9999],
)
def test_foreign_error_body_gives_an_error_by_status(status, code, body):
    error = error_from_body(status, body, object_name="/a/c/o")
    assert (error.code, error.status) == (code, status)
    assert error.object_name == "/a/c/o"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (str(ClientError("bad_state", "x", object_name="c/o")), "bad_state"),
        ("Traceback …\nTypeError: 'int'", "internal"),
        ("hapi_protocol.errors.ClientError: x (code nobodys)\n", "internal"),
        ("", "internal"),
    ],
)
def test_error_of_a_loader_worker_keeps_its_code(text, code):
    """torch re-raises it with a traceback as the only argument."""
    error = ClientError(f"Caught ClientError in worker 0.\n{text}\n")
    assert error.code == code
    assert text in str(error)
