"""Messages between filter and worker: round trips and strict reading."""

import dataclasses
import json
import math

import pytest

from hapi_protocol.errors import AnnotationError, UnavailableError
from hapi_protocol.headers import SampleRange
from hapi_protocol.job_messages import (
    JobGrant,
    JobRequest,
    ModelIdentity,
    ProfileRequest,
    Usage,
)
from hapi_protocol.json_messages import MAX_MESSAGE_BYTES
from stub_worker import stub_profile

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
    JOB, samples=None, source_etag="", source_length_bytes=None, num_objects=7
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
GRANT = JobGrant("id", 1 << 20, "d" * 64, "exact;cpu", 10.0)
PROFILE_REQUEST = ProfileRequest("AUTH_b", IDENTITY, "tx1")


@pytest.mark.parametrize(
    "message",
    [JOB, INDEX_JOB, MULTI_JOB, USAGE, INDEX_USAGE, GRANT, PROFILE_REQUEST],
)
def test_message_survives_its_own_body(message):
    assert type(message).from_body(message.to_body()) == message


@pytest.mark.parametrize(
    "message", [GRANT, USAGE, stub_profile("d" * 64, 3), PROFILE_REQUEST]
)
def test_worker_of_another_release_is_unavailable(message):
    read = type(message).from_body
    fields = json.loads(message.to_body())
    assert fields["version"] == 1
    with pytest.raises(UnavailableError) as caught:
        read(json.dumps({**fields, "version": 2}).encode())
    assert caught.value.status == 503
    assert "run filter and worker of one release" in caught.value.message
    assert read(json.dumps(fields).encode()) == message
    del fields["version"]
    with pytest.raises(AnnotationError):
        read(json.dumps(fields).encode())


def test_identity_survives_its_own_header():
    assert IDENTITY.to_json().isascii()
    assert ModelIdentity.from_json(IDENTITY.to_json()) == IDENTITY


ENDLESS = {**vars(IDENTITY), "length_bytes": True}


def bad(message, field, *values):
    """Returns a case for each value that the field must not have."""
    return [(message, field, {field: value}) for value in values]


@pytest.mark.parametrize(
    ("message", "field", "changes"),
    [
        *bad(JOB, "kind", "training"),
        *bad(JOB, "charged_account", "", 5),
        *bad(JOB, "model", None),
        (JOB, "model.container", {"model": {"account": "a"}}),
        (JOB, "model.length_bytes", {"model": ENDLESS}),
        *bad(JOB, "cut", 0, -1, 1.5, True),
        *bad(JOB, "samples", [5, 3], [-1, 3], "0-3"),
        (JOB, "samples", {"samples": None, "ranged": True}),
        *bad(JOB, "ranged", "yes"),
        *bad(JOB, "is_split", None),
        *bad(JOB, "source_etag", ""),
        *bad(JOB, "source_length_bytes", None, 2**64),
        *bad(MULTI_JOB, "num_objects", 0, -1, True),
        (MULTI_JOB, "source_etag", {"num_objects": None}),
        *bad(MULTI_JOB, "source_length_bytes", 5),
        *bad(MULTI_JOB, "samples", [0, 3]),
        (MULTI_JOB, "num_objects", {"kind": "index", "model": None, "cut": 0}),
        *bad(USAGE, "kind", "profile"),
        *bad(USAGE, "charged_account", ""),
        *bad(USAGE, "model_digest", ""),
        *bad(USAGE, "samples", -1, 1.5),
        *bad(USAGE, "device_seconds", -0.1, math.nan),
        *bad(USAGE, "decode_seconds", math.inf, 10**400),
        *bad(USAGE, "cpu_seconds", True, "1"),
        *bad(USAGE, "sent_bytes", None),
        *bad(USAGE, "outcome", "lost"),
        *bad(USAGE, "reason", None),
        *bad(PROFILE_REQUEST, "charged_account", "", 3),
        *bad(PROFILE_REQUEST, "model", None),
        (PROFILE_REQUEST, "model.account", {"model": {}}),
        *bad(PROFILE_REQUEST, "trans_id", None),
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


LONG = JOB.to_body() + b" " * MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b"[" * 50_000, LONG]
)
def test_other_bodies_are_refused(body):
    with pytest.raises(AnnotationError) as caught:
        JobRequest.from_body(body)
    assert caught.value.code == "bad_request"
