"""Segments and ranges of large objects, when answers are bad."""

import hashlib

import pytest

from hapi_protocol.errors import (
    HapiError,
    SourceChangedError,
    TruncatedStreamError,
)
from hapi_training.checkpoints.segments import put_segment, read_range
from scripted_swift import Answer

DATA = b"skipped-data"
HALF = Answer(206, b"abc", cut_off=5)


def read(connection):
    return read_range(connection, "c", "o", "tag", 10, 18)


def put(connection):
    return put_segment(
        connection, "c", "o", lambda start, n: DATA[start : start + n], 8, 4
    )


def test_range_goes_on_where_its_body_broke_off(swift, connection):
    swift.script(HALF, Answer(206, b"defgh"))
    assert read(connection) == b"abcdefgh"
    facts = [
        (r.headers["Range"], r.headers["If-Match"]) for r in swift.requests
    ]
    assert facts == [("bytes=10-17", '"tag"'), ("bytes=13-17", '"tag"')]


@pytest.mark.parametrize(
    ("then", "error"),
    [
        (Answer(412), SourceChangedError),
        (Answer(206), TruncatedStreamError),
        (Answer(206, cut_off=5), TruncatedStreamError),
        (Answer(200, b"abcdefgh"), HapiError),
    ],
)
def test_range_of_another_version_or_length_is_an_error(
    swift, connection, then, error
):
    swift.script(HALF, then)
    with pytest.raises(error):
        read(connection)


def test_segment_is_sent_again_and_compared(swift, connection):
    md5 = hashlib.md5(b"data").hexdigest()
    swift.script(Answer(503), Answer(201, headers={"ETag": md5}))
    assert put(connection).etag == md5
    assert [r.body for r in swift.requests] == [b"data", b"data"]


def test_segment_that_arrived_damaged_is_deleted(swift, connection):
    swift.script(Answer(201, headers={"ETag": "0" * 32}), Answer(204))
    with pytest.raises(HapiError, match="MD5"):
        put(connection)
    assert [r.method for r in swift.requests] == ["PUT", "DELETE"]
