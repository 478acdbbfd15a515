"""Requests for the features of many objects."""

import io
import json

import numpy as np
import pytest
import torch

from hapi_client.swift.connection import Connection
from hapi_client.swift.response_body import ResponseBody
from hapi_protocol.errors import (
    RightsError,
    TruncatedStreamError,
    UnavailableError,
)
from hapi_protocol.feature_stream import Row, feature_schema
from hapi_protocol.feature_writer import FeatureStreamWriter
from hapi_protocol.headers import CONTENT_TYPE_STREAM, Annotation, ModelPath
from hapi_splitter.encodings import encode
from scripted_swift import Answer

SHAPE = (2, 3)
NAMES = ["a b.jpg", "ü\n.jpg", "a b.jpg", "what?.png"]
FAILED = "service_unavailable: Swift answers 503 now"
VALUES = torch.arange(5 * 6, dtype=torch.float32).view(5, *SHAPE)


def annotation(encoding="float32"):
    return Annotation(ModelPath("AUTH_test", "m", "x.hapi"), 2, encoding)


def stream(names, failed=(), encoding="float32"):
    """Writes rows in two batches; failed rows have no features."""
    sink = io.BytesIO()
    writer = FeatureStreamWriter(sink, feature_schema(SHAPE, encoding))
    rows = [
        row(n, name, FAILED if n in failed else None)
        for n, name in enumerate(names)
    ]
    for part in (slice(0, 2), slice(2, len(names))):
        good = [n for n in range(len(names))[part] if n not in failed]
        sent = encode(VALUES[good], encoding)
        writer.write(
            rows[part], sent.array, {}, scale=sent.scale, zero=sent.zero
        )
    writer.close(source_etag="", source_bytes=1)
    return sink.getvalue()


def row(number, name, error):
    status = 200 if error is None else 503
    etag = None if error else f"e{number}"
    meta = json.dumps({"status": status, "etag": etag})
    return Row(number, name, meta=meta, error=error)


def respond(swift, body, **options):
    headers = {"Content-Type": CONTENT_TYPE_STREAM}
    swift.script(Answer(200, body, headers, **options))


def get_many(connection, **options):
    return list(connection.get_many("c d", NAMES, annotation(**options)))


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "uint8;zstd"])
def test_rows_come_in_order_with_their_features(swift, connection, encoding):
    respond(swift, stream(NAMES, [1], encoding))
    rows = get_many(connection, encoding=encoding)

    assert [(row.index, row.name) for row in rows] == list(enumerate(NAMES))
    assert [(row.status, row.etag, row.error) for row in rows] == [
        (200, "e0", None),
        (503, None, FAILED),
        (200, "e2", None),
        (200, "e3", None),
    ]
    assert rows[1].code == "service_unavailable"
    assert [row.is_retryable for row in rows] == [False, True, False, False]
    assert rows[1].features is None
    for number in (0, 2, 3):
        features = rows[number].features
        assert features is not None
        assert features.dtype == torch.float32
        torch.testing.assert_close(
            features, VALUES[number], rtol=0.01, atol=0.03
        )


def test_request_posts_quoted_names(swift, connection):
    respond(swift, stream(NAMES))
    get_many(connection)
    (request,) = swift.requests
    assert request.method == "POST"
    assert request.path == "/v1/AUTH_test/c%20d?hapi"
    assert request.body == (
        b"a%20b.jpg\n%C3%BC%0A.jpg\na%20b.jpg\nwhat%3F.png"
    )
    assert request.headers["X-Hapi-Model"] == "/AUTH_test/m/x.hapi"
    assert request.headers["X-Hapi-Cut"] == "2"


@pytest.mark.parametrize(
    "names",
    [
        NAMES[:3],
        [*NAMES, "more"],
        [NAMES[1], NAMES[0], *NAMES[2:]],
        [*NAMES[:3], "other"],
    ],
)
def test_response_with_other_names_is_refused(swift, connection, names):
    respond(swift, stream(names))
    with pytest.raises(TruncatedStreamError):
        get_many(connection)


@pytest.mark.parametrize("num_missing", [100, 0])
def test_response_that_breaks_off_is_refused(swift, connection, num_missing):
    """It is refused even if it breaks off after its last row."""
    body = stream(NAMES)
    respond(swift, body[: len(body) - num_missing], cut_off=100)
    with pytest.raises(TruncatedStreamError):
        get_many(connection)


def test_row_without_a_status_is_refused(swift, connection):
    sink = io.BytesIO()
    writer = FeatureStreamWriter(sink, feature_schema(SHAPE, "float32"))
    writer.write([Row(0, NAMES[0])], np.zeros((1, *SHAPE), np.float32))
    writer.close(source_etag="", source_bytes=1)
    respond(swift, sink.getvalue())
    with pytest.raises(TruncatedStreamError, match="row 0 has no status"):
        get_many(connection)


@pytest.mark.parametrize(
    ("status", "kind"), [(404, RightsError), (503, UnavailableError)]
)
def test_refused_request_fails_before_any_row_without_a_retry(
    swift, connection, status, kind
):
    swift.script(Answer(status))
    with pytest.raises(kind):
        connection.get_many("c", NAMES, annotation())
    assert len(swift.requests) == 1


@pytest.mark.parametrize("reads_all", [True, False])
def test_response_is_closed_after_its_reader(
    swift, connection, monkeypatch, reads_all
):
    bodies: list[ResponseBody] = []
    original = Connection._open

    def recording(*args, **kwargs):
        bodies.append(original(*args, **kwargs))
        return bodies[-1]

    monkeypatch.setattr(Connection, "_open", recording)
    respond(swift, stream(NAMES))
    rows = connection.get_many("c", NAMES, annotation())
    assert next(rows).name == NAMES[0]
    assert not bodies[0].closed
    if reads_all:
        assert len(list(rows)) == len(NAMES) - 1
    else:
        rows.close()  # type: ignore[attr-defined]
    assert bodies[0].closed
