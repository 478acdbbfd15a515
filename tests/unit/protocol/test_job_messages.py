"""Messages between filter and worker, and the tree of errors."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

from hapi_protocol import errors
from hapi_protocol.errors import (
    CODES,
    AnnotationError,
    ClientError,
    HapiError,
    error_from_body,
    make_error,
)
from hapi_protocol.headers import SampleRange
from hapi_protocol.job_messages import (
    JobGrant,
    JobRequest,
    ModelIdentity,
    Usage,
)

IDENTITY = ModelIdentity("AUTH_a", "models", "é/x.hapi", "e" * 32, 1234)
JOB = JobRequest(
    kind="features",
    charged_account="AUTH_b",
    model=IDENTITY,
    cut=3,
    encoding="float16",
    transform="eval",
    numerics="exact",
    samples=SampleRange(4, None),
    ranged=False,
    source_name="/AUTH_b/data/train-0.tar",
    source_etag="abc",
    source_length_bytes=10_240,
    trans_id="tx1",
)
INDEX_JOB = dataclasses.replace(
    JOB, kind="index", model=None, cut=0, samples=None
)
MULTI_JOB = dataclasses.replace(
    JOB,
    samples=None,
    source_etag="",
    source_length_bytes=None,
    num_objects=7,
)

USAGE = Usage(
    kind="features",
    charged_account="AUTH_b",
    model_digest="d" * 64,
    cut=3,
    encoding="float16",
    samples=64,
    errors=1,
    device_seconds=0.5,
    decode_seconds=0.25,
    cpu_seconds=1.5,
    source_bytes=10_240,
    sent_bytes=4096,
    outcome="failed",
    reason="too_slow",
)
INDEX_USAGE = dataclasses.replace(
    USAGE, kind="index", model_digest=None, cut=0, outcome="done", reason=""
)


@pytest.mark.parametrize("job", [JOB, INDEX_JOB, MULTI_JOB])
def test_job_request_survives_its_own_body(job):
    assert JobRequest.from_body(job.to_body()) == job


def test_grant_and_identity_survive_their_own_text():
    grant = JobGrant("id", 1 << 20, "d" * 64, "exact;cpu")
    assert JobGrant.from_body(grant.to_body()) == grant
    assert IDENTITY.to_json().isascii()
    assert ModelIdentity.from_json(IDENTITY.to_json()) == IDENTITY


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "training"),
        ("charged_account", ""),
        ("charged_account", 5),
        ("model", None),
        ("model", {"account": "a"}),
        ("model", {**vars(IDENTITY), "length_bytes": True}),
        ("cut", 0),
        ("cut", -1),
        ("cut", 1.5),
        ("cut", True),
        ("samples", [5, 3]),
        ("samples", [-1, 3]),
        ("samples", "0-3"),
        ("ranged", "yes"),
        ("source_length_bytes", None),
        ("source_length_bytes", 2**64),
    ],
)
def test_bad_field_of_a_job_request_is_named(field, value):
    fields = {**json.loads(JOB.to_body()), field: value}
    with pytest.raises(AnnotationError) as caught:
        JobRequest.from_body(json.dumps(fields).encode())
    assert caught.value.code == "bad_request"


@pytest.mark.parametrize(
    "changes",
    [
        {"num_objects": 0},
        {"num_objects": -1},
        {"num_objects": True},
        {"num_objects": None},
        {"source_length_bytes": 5},
        {"samples": [0, 3]},
        {"kind": "index", "model": None, "cut": 0},
    ],
)
def test_bad_field_of_a_job_for_many_objects_is_named(changes):
    fields = {**json.loads(MULTI_JOB.to_body()), **changes}
    with pytest.raises(AnnotationError) as caught:
        JobRequest.from_body(json.dumps(fields).encode())
    assert caught.value.code == "bad_request"


def test_encoding_of_a_job_request_is_made_canonical():
    fields = {**json.loads(JOB.to_body()), "encoding": "bfloat16;none"}
    job = JobRequest.from_body(json.dumps(fields).encode())
    assert job.encoding == "bfloat16"
    fields["encoding"] = "float64"
    with pytest.raises(AnnotationError) as caught:
        JobRequest.from_body(json.dumps(fields).encode())
    assert caught.value.code == "unknown_encoding"


@pytest.mark.parametrize("usage", [USAGE, INDEX_USAGE])
def test_usage_survives_its_own_body(usage):
    assert Usage.from_body(usage.to_body()) == usage


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "profile"),
        ("charged_account", ""),
        ("samples", -1),
        ("samples", 1.5),
        ("device_seconds", -0.1),
        ("device_seconds", float("nan")),
        ("decode_seconds", float("inf")),
        ("cpu_seconds", True),
        ("cpu_seconds", "1"),
        ("sent_bytes", None),
        ("outcome", "lost"),
        ("reason", None),
    ],
)
def test_bad_field_of_a_usage_is_named(field, value):
    fields = {**json.loads(USAGE.to_body()), field: value}
    with pytest.raises(AnnotationError, match=field) as caught:
        Usage.from_body(json.dumps(fields).encode())
    assert caught.value.code == "bad_request"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b"[" * 50_000, b" " * 70_000]
)
def test_what_is_no_message_is_refused(body):
    with pytest.raises(AnnotationError):
        JobRequest.from_body(body)


def test_ranged_job_needs_samples():
    job = dataclasses.replace(JOB, ranged=True, samples=None)
    with pytest.raises(AnnotationError, match="samples"):
        JobRequest.from_body(job.to_body())


@pytest.mark.parametrize("code", sorted(CODES))
def test_each_error_pickles_and_travels(code):
    error = make_error(
        code,
        "what happened",
        object_name="/a/c/o",
        trans_id="tx",
        details={"needed_bytes": 5},
    )
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert again._state() == error._state()
    if error.status:
        arrived = error_from_body(error.status, error.to_body())
        assert type(arrived) is type(error)
        assert arrived._state() == error._state()


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


def test_every_public_error_class_is_one_of_the_tree():
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert all(issubclass(value, HapiError) for value in classes)
    for value in classes:
        assert value.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            str(ClientError("bad_state", "x", object_name="c/o")),
            "bad_state",
        ),
        ("Traceback …\nTypeError: 'int'", "internal"),
        ("hapi_protocol.errors.ClientError: x (code nobodys)\n", "internal"),
        ("", "internal"),
    ],
)
def test_error_of_a_loader_worker_keeps_its_kind_and_code(text, code):
    """As torch raises it again: with a traceback as the only argument."""
    error = ClientError(f"Caught ClientError in worker 0.\n{text}\n")
    assert error.code == code
    assert text in str(error)
