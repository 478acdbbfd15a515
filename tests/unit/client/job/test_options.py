"""Options of data sets and jobs are refused by name and value."""

import math

import pytest

from hapi_client import JobConfig, PlanConfig, ReadConfig
from hapi_client.sampling.partition import EpochPartition
from hapi_client.swift.http_client import ConnectionOptions
from hapi_client.swift.retry import Backoff
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
        (PlanConfig, "replan_seconds", -1.0, "replan_seconds is -1"),
        (PlanConfig, "replan_min_spans", 0, "replan_min_spans is 0"),
        (ReadConfig, "on_error", "ignore", "allowed: raise, skip"),
        (ReadConfig, "num_threads", 0, "num_threads is 0; give an integer"),
        (ReadConfig, "num_threads", 2.5, "num_threads is 2.5"),
        (ReadConfig, "num_threads", True, "num_threads is True"),
        (ReadConfig, "decode_threads", 0, "decode_threads is 0"),
        (ReadConfig, "forward_samples", "8", "forward_samples is '8'"),
        (ReadConfig, "cache_memory_bytes", -1, "cache_memory_bytes is -1"),
        (ReadConfig, "span_seconds", math.nan, "span_seconds is nan"),
        (ReadConfig, "pause_seconds", -1, "pause_seconds is -1; give seconds"),
        (ReadConfig, "wait_seconds", "9", "wait_seconds is '9'"),
        (Backoff, "attempts", 0, "attempts is 0"),
        (Backoff, "max_seconds", math.inf, "max_seconds is inf"),
        (ConnectionOptions, "read_seconds", -1, "read_seconds is -1"),
        (EpochPartition, "batch_partitions", 0, "batch_partitions is 0"),
        (EpochPartition, "step_partitions", 1 << 20, "too many partitions"),
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
