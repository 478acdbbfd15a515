"""Negotiation of the protocol version."""

import pytest

from hapi_protocol import versions
from hapi_protocol.errors import ClientError
from hapi_protocol.versions import common_version


def negotiated(section):
    return common_version(section, "the proxy at swift:8080", "0.1.0")


@pytest.mark.parametrize(
    ("ours", "section", "expected"),
    [
        ((1,), {"version": 1}, 1),
        ((1,), {"version": 1, "versions": [1]}, 1),
        ((1,), {"version": 2, "versions": [2, 1]}, 1),
        ((1,), {"version": 2, "versions": [1, "later", 2]}, 1),
        ((3, 2, 1), {"version": 4, "versions": [4, 2, 1]}, 2),
    ],
)
def test_newest_common_version_is_chosen(ours, section, expected, monkeypatch):
    monkeypatch.setattr(versions, "VERSIONS", ours)
    assert negotiated(section) == expected


@pytest.mark.parametrize(
    ("section", "theirs", "remedy"),
    [
        ({"version": 2}, "version 2", "a newer client"),
        ({"versions": [3, 2], "version": 3}, "versions 3, 2", "a newer"),
        ({"version": 0}, "version 0", "an older client"),
        ({}, "no readable version", "an older client"),
        ({"version": "1"}, "no readable version", "client"),
        ({"version": True}, "no readable version", "client"),
        ({"versions": "2", "version": "2"}, "no readable version", "a newer"),
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
