"""Mistakes are found before a model is split, which takes seconds."""

import json
import os

import pytest

from hapi_client import (
    CacheConfig,
    FeatureDataset,
    JobConfig,
    TransferJob,
    split_model,
)
from hapi_client.model import frozen_region
from hapi_client.model.registry import ModelSource
from hapi_protocol.data_index import DataIndex, IndexRow, ShardIndex
from hapi_protocol.errors import ClientError, DataIndexError, NotFoundError
from networks import small_network, small_transform
from scripted_swift import Answer

pytestmark = pytest.mark.usefixtures("no_early_reads")
NO_INDEX = Answer(404)
EMPTY = Answer(200, json.dumps([]).encode())


def index_of(*labels):
    rows = tuple(
        IndexRow(number, f"{number}", 512 * number, 512, label)
        for number, label in enumerate(labels)
    )
    return DataIndex((ShardIndex("p/a.tar", "e", rows),)).to_bytes()


@pytest.fixture
def login(swift, monkeypatch):
    """Credentials of the scripted Swift."""
    for variable in os.environ:
        if variable.startswith(("ST_", "OS_")):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("ST_AUTH", swift.auth_url)
    monkeypatch.setenv("ST_USER", "test:tester")
    monkeypatch.setenv("ST_KEY", "testing")


@pytest.fixture
def split(monkeypatch):
    """Fails a test that reaches the export of its model."""

    def begin(*arguments, exporting, **options):
        exporting()
        pytest.fail("the model is split")

    monkeypatch.setattr(frozen_region, "split", begin)


def job_of(config=None, **options):
    config = config or JobConfig(
        cut="stream",
        cache=CacheConfig(split_directory=""),
    )
    return TransferJob(
        small_network(),
        **{
            "freeze": "body",
            "data": "swift://c/p",
            "transform": small_transform(),
            "config": config,
            **options,
        },
    )


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({}, NotFoundError, "there is no container 'c'"),
        ({"data": "swift://d/p"}, DataIndexError, "swift://d/p has no object"),
        ({"batch_size": 0}, ClientError, "batch_size is 0"),
        ({"batch_size": 2.5}, ClientError, "batch_size is 2.5"),
        ({"seed": -1}, ClientError, "seed is -1"),
        ({"data": {}}, ClientError, "must be 'train'"),
        (
            {"config": JobConfig(device="abacus")},
            ClientError,
            "device is 'abacus'",
        ),
        ({"transform": print}, ClientError, "transform is <built-in"),
    ],
)
def test_mistakes_come_before_the_split(
    swift, login, split, options, kind, message
):
    is_there = options.get("data") == "swift://d/p"
    swift.script(NO_INDEX, EMPTY if is_there else NO_INDEX)
    with pytest.raises(kind, match=message):
        job_of(**options)


def test_missing_credentials_come_before_the_split(login, split, monkeypatch):
    monkeypatch.delenv("ST_AUTH")
    with pytest.raises(ClientError, match="no credentials"):
        job_of()


def dataset_of(config):
    frozen, _ = split_model(
        small_network(),
        "body",
        transform=small_transform(),
        split_directory="",
    )
    options = {"cut": "stream", "connection": config.connection}
    return FeatureDataset("swift://c/p", frozen, **options)


@pytest.mark.parametrize("make", [job_of, dataset_of])
@pytest.mark.parametrize(("most", "num_warnings"), [(3, 0), (4, 1)])
def test_labels_beyond_the_outputs_are_a_warning(
    swift, connection, caplog, make, most, num_warnings
):
    swift.script(Answer(200, index_of(0, most)))
    config = JobConfig(
        cut="stream",
        connection=connection,
        cache=CacheConfig(split_directory=""),
    )
    with make(config):
        pass
    warnings = [
        each for each in caplog.records if "cross entropy" in each.getMessage()
    ]
    assert len(warnings) == num_warnings
    assert all("yields 4 numbers" in w.getMessage() for w in warnings)


def test_train_compares_classes_before_the_split(
    swift, login, split, hapi, monkeypatch, capsys
):
    monkeypatch.setattr(ModelSource, "build_with_transform", None)
    swift.script(Answer(200), Answer(200, index_of(0, 5)))
    words = ("--data", "c/p", "--classes", 2, "--freeze", "body")
    assert hapi("train", *words) == 1
    assert "(--classes) is 2" in capsys.readouterr().err
