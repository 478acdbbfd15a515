"""Options of data sets and jobs are refused by name and value."""

import math

import pytest

from hapi_client import JobConfig, PlanConfig, ReadConfig
from hapi_protocol.errors import ClientError


@pytest.mark.parametrize(
    ("config", "option", "value", "words"),
    [
        (JobConfig, "cut", -1, "cut is -1; give 'auto' to plan"),
        (JobConfig, "cut", True, "cut is True"),
        (JobConfig, "cut", "half", "cut is 'half'"),
        (JobConfig, "cache", "on", "cache is 'on'; one of off, read"),
        (PlanConfig, "encoding", "int3", "int3"),
        (PlanConfig, "min_precision", "third", "third"),
        (PlanConfig, "epochs", 0, "epochs is 0; a positive number"),
        (PlanConfig, "epochs", math.inf, "epochs is inf"),
        (PlanConfig, "epochs", math.nan, "epochs is nan"),
        (PlanConfig, "replan_seconds", 0.0, "replan_seconds is 0"),
        (PlanConfig, "replan_min_spans", 0, "replan_min_spans 0"),
        (ReadConfig, "on_error", "ignore", "allowed: raise, skip"),
        (ReadConfig, "num_threads", 0, "num_threads is 0; at least 1"),
        (ReadConfig, "ahead_bytes", 0, "ahead_bytes is 0; at least 1"),
    ],
)
def test_bad_option_is_refused_by_its_value(config, option, value, words):
    with pytest.raises(ClientError, match=words) as caught:
        config(**{option: value})
    assert caught.value.code == "bad_configuration"


@pytest.mark.parametrize(
    ("config", "option", "values"),
    [
        (JobConfig, "cut", ("auto", "freeze", "stream", 0, 7)),
        (JobConfig, "cache", ("off", "read", "readwrite")),
        (PlanConfig, "epochs", (None, 1, 2.5)),
        (ReadConfig, "on_error", ("raise", "skip")),
    ],
)
def test_allowed_values_are_accepted(config, option, values):
    for value in values:
        assert getattr(config(**{option: value}), option) == value


@pytest.mark.parametrize(
    ("encoding", "min_precision"),
    [("uint8", "lossless"), ("float16;lz4", "half"), ("float32", "uint8")],
)
def test_encoding_is_accepted_if_the_precision_allows_it(
    encoding, min_precision
):
    """The default precision is no request of the user."""
    config = PlanConfig(encoding=encoding, min_precision=min_precision)
    assert config.encodings() == (encoding,)


def test_encoding_below_a_given_precision_is_refused():
    with pytest.raises(ClientError, match="rounds more than min_precision"):
        PlanConfig(encoding="uint8", min_precision="half")
