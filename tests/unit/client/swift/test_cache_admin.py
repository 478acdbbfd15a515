"""What an account keeps, asked of stores that keep nothing."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from hapi_client import Connection, Credentials
from hapi_client.swift.cache_admin import FeatureCache
from hapi_protocol.errors import ClientError
from scripted_swift import Answer, scripted_swift


@pytest.mark.parametrize(
    "info",
    [{}, {"swift": {}}, {"hapi": None}, {"hapi": {"version": 1}}],
    ids=str,
)
@pytest.mark.parametrize("method", ["pages", "purge"])
def test_store_without_a_cache_is_asked_nothing_about_it(
    info: dict[str, Any], method: str
) -> None:
    """Swift alone would take it for a request of the account itself."""
    with scripted_swift() as swift:
        swift.script(Answer(200, json.dumps(info).encode()))
        login = Credentials.v1(swift.auth_url, "test:tester", "testing")
        with (
            Connection(login) as connection,
            pytest.raises(ClientError) as caught,
        ):
            list(getattr(FeatureCache(connection), method)())
        asked = [(each.method, each.path) for each in swift.requests]
    assert caught.value.code == "no_hapi"
    assert asked == [("GET", "/info")]


@pytest.mark.parametrize("method", ["pages", "purge"])
@pytest.mark.parametrize("source", ["", "swift://", "/train", "s3://photos"])
def test_source_that_is_none_is_refused_before_anything_is_asked(
    method: str, source: str
) -> None:
    """Empty, it would be all of the account."""
    with scripted_swift() as swift:
        login = Credentials.v1(swift.auth_url, "test:tester", "testing")
        with (
            Connection(login) as connection,
            pytest.raises(ClientError, match="CONTAINER/PREFIX") as caught,
        ):
            list(getattr(FeatureCache(connection), method)(source))
        assert not swift.requests
    assert caught.value.code == "bad_configuration"


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        (None, [""]),
        ("swift://photos", ["photos"]),
        ("photos/", ["photos"]),
        ("swift://photos/train", ["photos/train", "photos/train/"]),
        ("photos/train/", ["photos/train/"]),
    ],
)
def test_place_of_a_data_set_is_a_source(
    source: str | None, asked: list[str]
) -> None:
    page = {"deleted": 1, "marker": None}
    with scripted_swift() as swift:
        swift.script(Answer(200, b'{"hapi": {"version": 1, "cache": true}}'))
        for _ in asked:
            swift.script(Answer(200, json.dumps(page).encode()))
        login = Credentials.v1(swift.auth_url, "test:tester", "testing")
        with Connection(login) as connection:
            deleted = list(FeatureCache(connection).purge(source))
        paths = [urlsplit(each.path) for each in swift.requests[1:]]
    queries = [parse_qs(path.query, True) for path in paths]
    assert deleted == [1] * len(asked)
    assert [each["source"] for each in queries] == [[name] for name in asked]
