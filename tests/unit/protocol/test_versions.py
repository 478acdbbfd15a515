"""Negotiation of the protocol version, and its errors."""

from __future__ import annotations

import json

import pytest

from hapi_protocol import versions
from hapi_protocol.errors import AnnotationError, ClientError, UnavailableError
from hapi_protocol.job_messages import (
    JobGrant,
    ModelIdentity,
    ProfileRequest,
    Usage,
)
from hapi_protocol.profiles import ModelProfile
from hapi_protocol.versions import common_version
from stub_worker import stub_profile

IDENTITY = ModelIdentity("AUTH_test", "m", "x.hapi", "e" * 32, 9)
USAGE = Usage(
    kind="features",
    charged_account="AUTH_test",
    model_digest="d" * 64,
    cut=1,
    encoding="float32",
    samples=1,
    errors=0,
    device_seconds=0.1,
    decode_seconds=0.1,
    cpu_seconds=0.1,
    source_bytes=1,
    sent_bytes=1,
    outcome="done",
    reason="",
)


def negotiated(section):
    return common_version(section, "the proxy at swift:8080", "0.1.0")


@pytest.mark.parametrize(
    "section",
    [
        {"version": 1},
        {"version": 1, "versions": [1]},
        {"version": 2, "versions": [2, 1]},
        {"version": 2, "versions": [1, "later", 2]},
    ],
)
def test_common_version_is_chosen(section):
    assert negotiated(section) == 1


def test_newest_common_version_is_chosen(monkeypatch):
    monkeypatch.setattr(versions, "VERSIONS", (3, 2, 1))
    assert negotiated({"version": 4, "versions": [4, 2, 1]}) == 2


@pytest.mark.parametrize(
    ("section", "theirs", "remedy"),
    [
        ({"version": 2}, "version 2", "a newer client"),
        ({"versions": [3, 2], "version": 3}, "versions 3, 2", "a newer"),
        ({"version": 0}, "version 0", "an older client"),
        ({}, "no readable version", "an older client"),
        ({"version": "1"}, "no readable version", "client"),
        ({"version": True}, "no readable version", "client"),
        (
            {"versions": "2", "version": "2"},
            "no readable version",
            "a newer client",
        ),
    ],
)
def test_no_common_version_is_named_with_the_remedy(section, theirs, remedy):
    with pytest.raises(ClientError) as caught:
        negotiated(section)
    assert caught.value.code == "unsupported_version"
    for words in (
        "the proxy at swift:8080",
        theirs,
        "client (swift-hapi 0.1.0) version 1",
        remedy,
        "cut 0",
    ):
        assert words in caught.value.message


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (JobGrant, JobGrant("id", 1, "d" * 64, "exact;cpu")),
        (Usage, USAGE),
        (ModelProfile, stub_profile("d" * 64, 3)),
        (ProfileRequest, ProfileRequest("AUTH_test", IDENTITY, "tx1")),
    ],
)
def test_worker_of_another_release_is_unavailable(kind, message):
    fields = json.loads(message.to_body())
    assert fields["version"] == 1
    body = json.dumps({**fields, "version": 2}).encode()
    with pytest.raises(UnavailableError) as caught:
        kind.from_body(body)
    assert caught.value.status == 503
    assert "run filter and worker of one release" in caught.value.message
    assert kind.from_body(json.dumps(fields).encode()) == message
    del fields["version"]
    with pytest.raises(AnnotationError):
        kind.from_body(json.dumps(fields).encode())
