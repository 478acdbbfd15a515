"""What an account keeps, asked of stores that keep nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hapi_client import Connection, Credentials
from hapi_client.feature_cache import FeatureCache
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
