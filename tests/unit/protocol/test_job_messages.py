"""Messages between filter and worker: round trips and strict reading."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hapi_protocol.errors import AnnotationError
from hapi_protocol.headers import SampleRange
from hapi_protocol.job_messages import (
    JobGrant,
    JobRequest,
    ModelIdentity,
    ProfileRequest,
    Usage,
)
from hapi_protocol.json_messages import MAX_MESSAGE_BYTES

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
GRANT = JobGrant("id", 1 << 20, "d" * 64, "exact;cpu")
PROFILE_REQUEST = ProfileRequest("AUTH_b", IDENTITY, "tx1")


@pytest.mark.parametrize(
    "message",
    [JOB, INDEX_JOB, MULTI_JOB, USAGE, INDEX_USAGE, GRANT, PROFILE_REQUEST],
)
def test_message_survives_its_own_body(message):
    assert type(message).from_body(message.to_body()) == message


def test_identity_survives_its_own_header():
    assert IDENTITY.to_json().isascii()
    assert ModelIdentity.from_json(IDENTITY.to_json()) == IDENTITY


@pytest.mark.parametrize(
    ("message", "field", "changes"),
    [
        (JOB, "kind", {"kind": "training"}),
        (JOB, "charged_account", {"charged_account": ""}),
        (JOB, "charged_account", {"charged_account": 5}),
        (JOB, "model", {"model": None}),
        (JOB, "model.container", {"model": {"account": "a"}}),
        (
            JOB,
            "model.length_bytes",
            {"model": {**vars(IDENTITY), "length_bytes": True}},
        ),
        (JOB, "cut", {"cut": 0}),
        (JOB, "cut", {"cut": -1}),
        (JOB, "cut", {"cut": 1.5}),
        (JOB, "cut", {"cut": True}),
        (JOB, "samples", {"samples": [5, 3]}),
        (JOB, "samples", {"samples": [-1, 3]}),
        (JOB, "samples", {"samples": "0-3"}),
        (JOB, "samples", {"samples": None, "ranged": True}),
        (JOB, "ranged", {"ranged": "yes"}),
        (JOB, "is_split", {"is_split": None}),
        (JOB, "source_etag", {"source_etag": ""}),
        (JOB, "source_length_bytes", {"source_length_bytes": None}),
        (JOB, "source_length_bytes", {"source_length_bytes": 2**64}),
        (MULTI_JOB, "num_objects", {"num_objects": 0}),
        (MULTI_JOB, "num_objects", {"num_objects": -1}),
        (MULTI_JOB, "num_objects", {"num_objects": True}),
        (MULTI_JOB, "source_etag", {"num_objects": None}),
        (MULTI_JOB, "source_length_bytes", {"source_length_bytes": 5}),
        (MULTI_JOB, "samples", {"samples": [0, 3]}),
        (MULTI_JOB, "num_objects", {"kind": "index", "model": None, "cut": 0}),
        (USAGE, "kind", {"kind": "profile"}),
        (USAGE, "charged_account", {"charged_account": ""}),
        (USAGE, "model_digest", {"model_digest": ""}),
        (USAGE, "samples", {"samples": -1}),
        (USAGE, "samples", {"samples": 1.5}),
        (USAGE, "device_seconds", {"device_seconds": -0.1}),
        (USAGE, "device_seconds", {"device_seconds": float("nan")}),
        (USAGE, "decode_seconds", {"decode_seconds": float("inf")}),
        (USAGE, "decode_seconds", {"decode_seconds": 10**400}),
        (USAGE, "cpu_seconds", {"cpu_seconds": True}),
        (USAGE, "cpu_seconds", {"cpu_seconds": "1"}),
        (USAGE, "sent_bytes", {"sent_bytes": None}),
        (USAGE, "outcome", {"outcome": "lost"}),
        (USAGE, "reason", {"reason": None}),
        (PROFILE_REQUEST, "charged_account", {"charged_account": ""}),
        (PROFILE_REQUEST, "charged_account", {"charged_account": 3}),
        (PROFILE_REQUEST, "model", {"model": None}),
        (PROFILE_REQUEST, "model.account", {"model": {}}),
        (PROFILE_REQUEST, "trans_id", {"trans_id": None}),
    ],
)
def test_bad_field_is_refused_by_name(message, field, changes):
    fields = {**json.loads(message.to_body()), **changes}
    with pytest.raises(AnnotationError, match=f"'{field}'") as caught:
        type(message).from_body(json.dumps(fields).encode())
    assert caught.value.code == "bad_request"


def test_encoding_of_a_job_request_is_made_canonical():
    fields = {**json.loads(JOB.to_body()), "encoding": "bfloat16;none"}
    job = JobRequest.from_body(json.dumps(fields).encode())
    assert job.encoding == "bfloat16"
    fields["encoding"] = "float64"
    with pytest.raises(AnnotationError) as caught:
        JobRequest.from_body(json.dumps(fields).encode())
    assert caught.value.code == "unknown_encoding"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"[" * 50_000,
        JOB.to_body() + b" " * MAX_MESSAGE_BYTES,
    ],
)
def test_other_bodies_are_refused(body):
    with pytest.raises(AnnotationError) as caught:
        JobRequest.from_body(body)
    assert caught.value.code == "bad_request"
