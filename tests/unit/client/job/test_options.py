"""Options of data sets and jobs are refused by name and value."""

import math
from dataclasses import fields

import pytest

from hapi_client import CacheConfig, JobConfig, PlanConfig, ReadConfig
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
        (PlanConfig, "epochs", "3", "epochs is '3'; give int or float or"),
        (PlanConfig, "encoding", 3, "encoding is 3; give str or None"),
        (ReadConfig, "num_threads", None, "num_threads is None"),
        (ReadConfig, "retry_seconds", True, "retry_seconds is True"),
        (JobConfig, "plan", {"epochs": 3}, "give PlanConfig"),
        (JobConfig, "read", CacheConfig(), "give ReadConfig"),
        (JobConfig, "cache", "disk", "cache is 'disk'; give CacheConfig"),
        (JobConfig, "connection", "http://", "give Connection or None"),
        (JobConfig, "num_classes", 0, "num_classes is 0"),
        (JobConfig, "augment_period_epochs", 0, "augment_period_epochs is 0"),
        (JobConfig, "models_container", "a/b", "without a slash"),
        (CacheConfig, "directory", 3, "directory is 3"),
        (CacheConfig, "split_directory", 3, "split_directory is 3"),
        (ReadConfig, "partition", 4, "give EpochPartition or None"),
        (CacheConfig, "store", "on", "store is 'on'; one of off, read"),
        (CacheConfig, "memory_bytes", -1, "memory_bytes is -1"),
        (CacheConfig, "directory_bytes", 9, "there is no directory"),
        (PlanConfig, "encoding", "int3", "int3"),
        (PlanConfig, "min_precision", "third", "third"),
        (PlanConfig, "epochs", 0, "epochs is 0; a positive number"),
        (PlanConfig, "epochs", math.inf, "epochs is inf"),
        (PlanConfig, "epochs", math.nan, "epochs is nan"),
        (ReadConfig, "on_error", "ignore", "allowed: raise, skip"),
        (ReadConfig, "num_threads", 0, "num_threads is 0; give an integer"),
        (ReadConfig, "num_threads", 2.5, "num_threads is 2.5"),
        (ReadConfig, "num_threads", True, "num_threads is True"),
        (ReadConfig, "forward_samples", "8", "forward_samples is '8'"),
        (ReadConfig, "retry_seconds", math.nan, "retry_seconds is nan"),
        (ReadConfig, "retry_seconds", "9", "retry_seconds is '9'"),
        (ReadConfig, "retry_seconds", -1, "retry_seconds is -1; give seconds"),
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
        (CacheConfig, "store", ("off", "read", "readwrite")),
        (PlanConfig, "epochs", (None, 1, 2.5)),
        (ReadConfig, "on_error", ("raise", "skip")),
    ],
)
def test_allowed_values_are_accepted(config, option, values):
    for value in values:
        assert getattr(config(**{option: value}), option) == value


def test_all_options_fit_on_a_page():
    configs = (JobConfig, PlanConfig, ReadConfig, CacheConfig, EpochPartition)
    assert sum(len(fields(config)) for config in configs) <= 31
    assert len(fields(ReadConfig)) <= 8


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
