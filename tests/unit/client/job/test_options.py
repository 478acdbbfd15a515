"""What a user may ask of a job, and what is refused by its value."""

from __future__ import annotations

import math

import pytest

from hapi_client.job.options import (
    check_cache,
    check_cut,
    check_epochs,
    check_on_error,
    checked_encodings,
)
from hapi_protocol.errors import ClientError


@pytest.mark.parametrize(
    ("check", "values", "words"),
    [
        (check_cut, (-1,), "cut is -1; 'auto' plans"),
        (check_cut, (True,), "cut is True"),
        (check_cut, ("half",), "cut is 'half'"),
        (checked_encodings, ("int3", "half"), "int3"),
        (checked_encodings, (None, "third"), "third"),
        (checked_encodings, ("uint8", "half"), "rounds more than floor"),
        (check_on_error, ("ignore",), "is 'ignore'; allowed: raise, skip"),
        (check_epochs, (0,), "epochs is 0; a positive number"),
        (check_epochs, (math.inf,), "epochs is inf"),
        (check_epochs, (math.nan,), "epochs is nan"),
        (check_cache, ("on",), "cache is 'on'; one of off, read"),
    ],
)
def test_what_cannot_be_is_refused_by_its_value(check, values, words):
    with pytest.raises(ClientError, match=words) as caught:
        check(*values)
    assert caught.value.code == "bad_configuration"


@pytest.mark.parametrize(
    ("check", "value"),
    [
        *((check_cut, each) for each in ("auto", "freeze", "stream", 0, 7)),
        *((check_on_error, each) for each in ("raise", "skip")),
        *((check_epochs, each) for each in (None, 1, 2.5)),
        *((check_cache, each) for each in ("off", "read", "readwrite")),
    ],
)
def test_what_can_be_is_left_alone(check, value):
    assert check(value) is None


@pytest.mark.parametrize(
    ("encoding", "floor"),
    [("uint8", "lossless"), ("float16;lz4", "half"), ("float32", "uint8")],
)
def test_encoding_goes_with_a_floor_that_allows_it(encoding, floor):
    """The floor's default is no wish of anybody's."""
    assert checked_encodings(encoding, floor) == (encoding,)
