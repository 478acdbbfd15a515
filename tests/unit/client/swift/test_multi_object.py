"""Requests for many objects, against a server that answers as told."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.multi_object import ObjectFeatures
from hapi_client.swift.response_body import ResponseBody
from hapi_protocol.errors import (
    ClientError,
    RightsError,
    TruncatedStreamError,
    UnavailableError,
)
from hapi_protocol.feature_stream import Row, feature_schema
from hapi_protocol.feature_writer import FeatureStreamWriter
from hapi_protocol.headers import CONTENT_TYPE_STREAM, Annotation, ModelPath
from hapi_splitter.encodings import encode
from scripted_swift import Answer, ScriptedSwift, scripted_swift

SHAPE = (2, 3)
NAMES = ["a b.jpg", "ü\n.jpg", "a b.jpg", "what?.png"]
FAILED = "service_unavailable: Swift answers 503 now"


@pytest.fixture
def swift() -> Iterator[ScriptedSwift]:
    with scripted_swift() as server:
        yield server


@pytest.fixture
def connection(swift: ScriptedSwift) -> Iterator[Connection]:
    login = Credentials.v1(swift.auth_url, "test:tester", "testing")
    with Connection(login) as made:
        yield made


def asked(encoding: str = "float32") -> Annotation:
    return Annotation(ModelPath("AUTH_test", "m", "x.hapi"), 2, encoding)


def values(count: int) -> torch.Tensor:
    return torch.arange(count * 6, dtype=torch.float32).view(count, *SHAPE)


def stream(
    names: Sequence[str], failed: Sequence[int] = (), encoding: str = "float32"
) -> bytes:
    """Two batches of rows; those that failed have no features."""
    sink = io.BytesIO()
    writer = FeatureStreamWriter(sink, feature_schema(SHAPE, encoding))
    rows = [
        row(n, name, FAILED if n in failed else None)
        for n, name in enumerate(names)
    ]
    all_values = values(len(names))
    for part in (slice(0, 2), slice(2, len(names))):
        good = [n for n in range(len(names))[part] if n not in failed]
        sent = encode(all_values[good], encoding)
        writer.write(
            rows[part], sent.array, {}, scale=sent.scale, zero=sent.zero
        )
    writer.close(source_etag="", source_bytes=1)
    return sink.getvalue()


def row(number: int, name: str, error: str | None) -> Row:
    status = 200 if error is None else 503
    etag = None if error else f"e{number}"
    meta = json.dumps({"status": status, "etag": etag})
    return Row(number, name, meta=meta, error=error)


def answered(body: bytes, **changes: Any) -> Answer:
    return Answer(200, body, {"Content-Type": CONTENT_TYPE_STREAM}, **changes)


def ask(connection: Connection, **options: Any) -> list[ObjectFeatures]:
    found = connection.get_many("c d", NAMES, asked(**options))
    return list(found)


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "uint8;zstd"])
def test_rows_come_in_order_with_their_features(
    swift: ScriptedSwift, connection: Connection, encoding: str
) -> None:
    swift.script(answered(stream(NAMES, [1], encoding)))
    found = ask(connection, encoding=encoding)

    assert [(each.index, each.name) for each in found] == list(
        enumerate(NAMES)
    )
    assert [each.status for each in found] == [200, 503, 200, 200]
    assert [each.etag for each in found] == ["e0", None, "e2", "e3"]
    assert [each.error for each in found] == [None, FAILED, None, None]
    assert [each.code for each in found][1] == "service_unavailable"
    assert [each.is_retryable for each in found] == [False, True, False, False]
    assert found[1].features is None
    for number in (0, 2, 3):
        features = found[number].features
        assert features is not None
        assert features.dtype == torch.float32
        torch.testing.assert_close(
            features, values(4)[number], rtol=0.01, atol=0.03
        )


def test_request_is_a_post_of_quoted_names(
    swift: ScriptedSwift, connection: Connection
) -> None:
    swift.script(answered(stream(NAMES)))
    ask(connection)

    (request,) = swift.requests
    assert (request.method, request.path) == (
        "POST",
        "/v1/AUTH_test/c%20d?hapi",
    )
    assert request.body.split(b"\n") == [
        b"a%20b.jpg",
        b"%C3%BC%0A.jpg",
        b"a%20b.jpg",
        b"what%3F.png",
    ]
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
def test_answer_to_other_names_is_refused(
    swift: ScriptedSwift, connection: Connection, names: list[str]
) -> None:
    swift.script(answered(stream(names)))
    with pytest.raises(TruncatedStreamError):
        ask(connection)


@pytest.mark.parametrize("left_out", [100, 0])
def test_answer_that_breaks_off_is_refused(
    swift: ScriptedSwift, connection: Connection, left_out: int
) -> None:
    """Also behind its last row."""
    body = stream(NAMES)
    swift.script(answered(body[: len(body) - left_out], cut_off=100))
    with pytest.raises(TruncatedStreamError):
        ask(connection)


def test_row_without_a_status_is_refused(
    swift: ScriptedSwift, connection: Connection
) -> None:
    sink = io.BytesIO()
    writer = FeatureStreamWriter(sink, feature_schema(SHAPE, "float32"))
    writer.write([Row(0, NAMES[0])], np.zeros((1, *SHAPE), np.float32))
    writer.close(source_etag="", source_bytes=1)
    swift.script(answered(sink.getvalue()))
    with pytest.raises(TruncatedStreamError, match="row 0 has no status"):
        ask(connection)


def test_proxy_without_the_filter_is_named(
    swift: ScriptedSwift, connection: Connection
) -> None:
    """A container's owner has just changed nothing of its metadata."""
    swift.script(Answer(204))
    with pytest.raises(ClientError) as caught:
        ask(connection)
    assert caught.value.code == "no_hapi"


@pytest.mark.parametrize(
    ("status", "kind"), [(404, RightsError), (503, UnavailableError)]
)
def test_refusal_of_the_request_comes_before_any_row(
    swift: ScriptedSwift,
    connection: Connection,
    status: int,
    kind: type[Exception],
) -> None:
    swift.script(Answer(status))
    with pytest.raises(kind):
        connection.get_many("c", NAMES, asked())
    assert len(swift.requests) == 1


@pytest.mark.parametrize("reads_all", [True, False])
def test_answer_is_closed_behind_its_reader(
    swift: ScriptedSwift,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    reads_all: bool,
) -> None:
    bodies: list[ResponseBody] = []
    plain_open = Connection._open

    def opened(*args: Any, **kwargs: Any) -> ResponseBody:
        bodies.append(plain_open(*args, **kwargs))
        return bodies[-1]

    monkeypatch.setattr(Connection, "_open", opened)
    swift.script(answered(stream(NAMES)))
    rows = connection.get_many("c", NAMES, asked())
    assert next(rows).name == NAMES[0]
    assert not bodies[0].closed
    if reads_all:
        assert len(list(rows)) == len(NAMES) - 1
    else:
        rows.close()  # type: ignore[attr-defined]
    assert bodies[0].closed
