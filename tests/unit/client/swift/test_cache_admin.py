"""Listing and purging of an account's feature cache."""

import json
from urllib.parse import parse_qs, urlsplit

import pytest

from hapi_client.swift.cache_admin import CacheAdminClient
from hapi_protocol.errors import ClientError
from scripted_swift import Answer

METHODS = pytest.mark.parametrize("method", ["pages", "purge"])


@METHODS
@pytest.mark.parametrize(
    "info",
    [{}, {"swift": {}}, {"hapi": None}, {"hapi": {"version": 1}}],
    ids=str,
)
def test_store_without_a_cache_gets_no_cache_request(
    swift, connection, info, method
):
    """Swift without the filter would act on the account itself."""
    swift.script(Answer(200, json.dumps(info).encode()))
    with pytest.raises(ClientError) as caught:
        list(getattr(CacheAdminClient(connection), method)())
    assert caught.value.code == "no_hapi"
    requests = [(request.method, request.path) for request in swift.requests]
    assert requests == [("GET", "/info")]


@METHODS
@pytest.mark.parametrize("source", ["", "swift://", "/train", "s3://photos"])
def test_invalid_source_is_refused_before_any_request(
    swift, connection, method, source
):
    """An empty source would select the whole account."""
    with pytest.raises(ClientError) as caught:
        list(getattr(CacheAdminClient(connection), method)(source))
    assert caught.value.code == "bad_configuration"
    assert not swift.requests


@pytest.mark.parametrize(
    ("source", "queried"),
    [
        (None, [""]),
        ("swift://photos", ["photos"]),
        ("photos/", ["photos"]),
        ("swift://photos/train", ["photos/train", "photos/train/"]),
        ("photos/train/", ["photos/train/"]),
    ],
)
def test_source_selects_an_object_and_everything_below_it(
    swift, connection, source, queried
):
    swift.script(Answer(200, b'{"hapi": {"version": 1, "cache": true}}'))
    page = json.dumps({"deleted": 1, "marker": None}).encode()
    swift.script(*[Answer(200, page)] * len(queried))
    deleted = list(CacheAdminClient(connection).purge(source))
    queries = [
        parse_qs(urlsplit(request.path).query, True)
        for request in swift.requests[1:]
    ]
    assert deleted == [1] * len(queried)
    assert [query["source"] for query in queries] == [[s] for s in queried]
