"""Parsing of option values."""

from __future__ import annotations

from datetime import timedelta

import pytest

from hapi_client.cli.parse import parse_age
from hapi_protocol.errors import ClientError


@pytest.mark.parametrize(
    ("text", "age"),
    [
        ("30d", timedelta(days=30)),
        ("1.5 h", timedelta(minutes=90)),
        ("2W", timedelta(weeks=2)),
        ("90m", timedelta(minutes=90)),
    ],
)
def test_age_has_a_unit(text, age):
    assert parse_age(text) == age


@pytest.mark.parametrize(
    "text", ["", "30", "-1d", "1y", "d", "9e9d", "9" * 30 + "d"]
)
def test_invalid_age_is_refused(text):
    with pytest.raises(ClientError, match="as in 30d"):
        parse_age(text)
