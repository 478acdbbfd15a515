"""Labels: from the index to the integers of the loss."""

import numpy as np
import pytest

from hapi_client.data.index import NamedRow, number_classes, sample_row
from hapi_client.data.labels import (
    OPTIONAL,
    UNLABELLED,
    renumber_labels,
    span_labels,
)
from hapi_client.swift.account import ObjectInfo
from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.errors import ClientError, LabelError
from hapi_protocol.shards import Sample


def span(*labels):
    rows = tuple(
        IndexRow(n, f"cat/{n}", n * 1024, 1024, label)
        for n, label in enumerate(labels)
    )
    return Span("train/a.tar", "etag", rows)


@pytest.mark.parametrize(
    ("in_index", "labels", "class_names", "expected"),
    [
        ([3, 1], None, (), [3, 1]),
        ([-1, 7], None, (), [-1, 7]),
        ([0, None, 1], OPTIONAL, ("cat", "dog"), [0, UNLABELLED, 1]),
        ([None, None], lambda key: int(key[-1]) + 5, (), [5, 6]),
        ([0, 1], {"cat/0": 9, "dog": 4}, ("cat", "dog"), [9, 4]),
        ([7], {"7": 0}, (), [0]),
    ],
    ids=["index", "unnamed", "optional", "function", "mapping", "integer"],
)
def test_labels_come_from_the_index_or_the_user(
    in_index, labels, class_names, expected
):
    (found,) = span_labels([span(*in_index)], labels, class_names)
    assert found.tolist() == expected
    assert found.dtype == "int64"


@pytest.mark.parametrize(
    ("in_index", "labels", "class_names", "messages"),
    [
        ([0, None], None, (), ["labels="]),
        ([0, 1], {"cat": 0}, ("cat", "dog"), ["'dog'"]),
        ([0, -1], None, ("cat", "dog"), ["label -1,", "0 to 1;"]),
        ([0, 2], None, ("cat", "dog"), ["label 2,", "0 to 1;"]),
    ],
)
def test_missing_label_names_shard_and_key(
    in_index, labels, class_names, messages
):
    with pytest.raises(LabelError) as caught:
        span_labels([span(*in_index)], labels, class_names)
    assert caught.value.code == "missing_label"
    for words in ("'cat/1'", "train/a.tar", *messages):
        assert words in caught.value.message


def test_unlabelled_samples_stay_so_under_other_class_numbers():
    labels = [np.array([0, UNLABELLED, 1])]
    (found,) = renumber_labels(labels, ("cat", "dog"), ("dog", "cat"), "here")
    assert found.tolist() == [1, UNLABELLED, 0]


def test_unknown_string_is_refused():
    with pytest.raises(ClientError, match="only string allowed is"):
        span_labels([span(0)], "none")


@pytest.mark.parametrize(
    ("in_shards", "known", "class_names", "labels"),
    [
        ([["dog"], ["cat"]], (), ("cat", "dog"), [[1], [0]]),
        ([["ant", "dog"]], ("dog",), ("dog", "ant"), [[1, 0]]),
        ([[12]], (), (), [[12]]),
    ],
    ids=["sorted", "known", "integer"],
)
def test_classes_are_numbered_by_name(in_shards, known, class_names, labels):
    def row(label):
        if isinstance(label, int):
            return NamedRow(IndexRow(0, "k", 0, 512, label), None)
        return NamedRow(IndexRow(0, "k", 0, 512, None), label)

    parts = [
        (ObjectInfo("a", "e", 1), [row(each) for each in shard])
        for shard in in_shards
    ]
    shards, names = number_classes(parts, known)
    assert names == class_names
    assert [[row.label for row in s.rows] for s in shards] == labels


@pytest.mark.parametrize(
    ("members", "label", "name"),
    [
        ({"cls": b"7"}, 7, None),
        ({"cls": b"dog\n"}, None, "dog"),
        ({"json": b'{"cls": "dog"}'}, None, "dog"),
        ({"json": b'{"cls": 3}'}, None, None),
        ({"json": b"not json"}, None, None),
        ({"json": b"[" * 60_000}, None, None),
        ({}, None, None),
    ],
)
def test_sample_has_a_label_or_a_class_name(members, label, name):
    found = sample_row(Sample(0, "k", 0, 512, members))
    assert (found.row.label, found.class_name) == (label, name)
