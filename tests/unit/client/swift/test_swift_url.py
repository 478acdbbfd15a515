"""Parsing of Swift locations."""

import pytest

from hapi_client.swift.swift_url import Location, parse_location
from hapi_protocol.errors import ClientError


@pytest.mark.parametrize(
    ("text", "container", "prefix"),
    [
        ("swift://photos", "photos", ""),
        ("swift://photos/", "photos", ""),
        ("photos/train", "photos", "train"),
        ("swift://photos/a/b/", "photos", "a/b"),
        ("swift://für uns/größe", "für uns", "größe"),
    ],
)
def test_location_has_a_container_and_a_prefix(text, container, prefix):
    location = parse_location(text)
    assert location == Location(container, prefix)
    assert parse_location(str(location)) == location


@pytest.mark.parametrize(
    "text",
    ["", "/", "swift://", "swift:///x", "s3://bucket/x", "..", "a/b//c"],
)
def test_invalid_location_is_refused_with_its_value(text):
    with pytest.raises(ClientError) as caught:
        parse_location(text)
    assert caught.value.code == "bad_configuration"
    assert repr(text) in caught.value.message


def test_objects_of_a_data_set_have_its_prefix():
    assert Location("c").index_name == "hapi-index.arrow"
    assert Location("c", "a/b").object_name("x.tar") == "a/b/x.tar"
