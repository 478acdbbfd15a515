"""Parsing of option values."""

from datetime import timedelta

import pytest

from hapi_client.cli.parse import parse_age, parse_link
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
    ("text", "rate"),
    [
        ("100mbit", 12.5e6),
        ("100 Mbit/s", 12.5e6),
        ("1gbit", 125e6),
        ("2.5Gbit", 312.5e6),
        ("12MB/s", 12e6),
        ("800kB", 800e3),
        ("5000B/s", 5000.0),
    ],
)
def test_link_is_read_in_bits_and_bytes(text, rate):
    assert parse_link(text) == pytest.approx(rate)


def test_other_texts_are_refused():
    for text in ("", "30", "-1d", "1y", "d", "9e9d", "9" * 30 + "d"):
        with pytest.raises(ClientError, match="as in 30d"):
            parse_age(text)
    for text in ("fast", "100", "10mb", "0mbit", "-1mbit", ""):
        with pytest.raises(ClientError, match="100mbit"):
            parse_link(text)
