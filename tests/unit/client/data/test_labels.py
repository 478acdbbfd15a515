"""From the index's facts to the integers of the loss."""

from __future__ import annotations

import pytest

from hapi_client.data.index import NamedRow, number_classes, sample_row
from hapi_client.data.labels import (
    OPTIONAL,
    UNLABELLED,
    renumbered,
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


def test_labels_of_the_index_are_the_default():
    (found,) = span_labels([span(3, 1)], None)
    assert found.tolist() == [3, 1]
    assert found.dtype == "int64"


def test_a_missing_label_names_shard_and_key():
    with pytest.raises(LabelError) as caught:
        span_labels([span(0, None)], None)
    assert caught.value.code == "missing_label"
    assert "'cat/1'" in caught.value.message
    assert "train/a.tar" in caught.value.message
    assert "labels=" in caught.value.message


def test_labels_that_may_be_missing_are_told_apart():
    (found,) = span_labels([span(0, None, 1)], OPTIONAL, ("cat", "dog"))
    assert found.tolist() == [0, UNLABELLED, 1]
    same = renumbered([found], ("cat", "dog"), ("dog", "cat"), "here")
    assert same[0].tolist() == [1, UNLABELLED, 0]


def test_another_word_is_refused():
    with pytest.raises(ClientError, match="only word allowed is 'optional'"):
        span_labels([span(0)], "none")


def test_a_function_sees_the_key():
    (found,) = span_labels([span(None, None)], lambda key: int(key[-1]) + 5)
    assert found.tolist() == [5, 6]


def test_a_mapping_is_looked_up_by_key_then_by_class_name():
    labels = {"cat/0": 9, "dog": 4}
    (found,) = span_labels([span(0, 1)], labels, ("cat", "dog"))
    assert found.tolist() == [9, 4]


def test_without_class_names_a_mapping_translates_integers():
    (found,) = span_labels([span(7)], {"7": 0})
    assert found.tolist() == [0]


def test_a_class_that_a_mapping_lacks_is_named():
    with pytest.raises(LabelError, match="'dog'"):
        span_labels([span(1)], {"cat": 0}, ("cat", "dog"))


@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_without_a_name_is_an_error(label):
    with pytest.raises(LabelError) as caught:
        span_labels([span(0, label)], None, ("cat", "dog"))
    assert caught.value.code == "missing_label"
    for words in ("'cat/1'", "train/a.tar", f"label {label},", "0 to 1;"):
        assert words in caught.value.message


def test_integers_without_any_names_are_as_the_user_wants_them():
    (found,) = span_labels([span(-1, 7)], None)
    assert found.tolist() == [-1, 7]


def named(name, label=None):
    return NamedRow(IndexRow(0, "k", 0, 512, label), name)


def info(name):
    return ObjectInfo(name, "e", 1)


def test_class_names_are_numbered_in_sorted_order():
    shards, names = number_classes(
        [(info("a"), [named("dog")]), (info("b"), [named("cat")])]
    )
    assert names == ("cat", "dog")
    assert [s.rows[0].label for s in shards] == [1, 0]


def test_known_classes_keep_their_numbers():
    shards, names = number_classes(
        [(info("a"), [named("ant"), named("dog")])], ("dog",)
    )
    assert names == ("dog", "ant")
    assert [row.label for row in shards[0].rows] == [1, 0]


def test_integers_are_left_as_they_are():
    shards, names = number_classes([(info("a"), [named(None, 12)])])
    assert names == ()
    assert shards[0].rows[0].label == 12


@pytest.mark.parametrize(
    ("members", "label", "name"),
    [
        ({"cls": b"7"}, 7, None),
        ({"cls": b"dog\n"}, None, "dog"),
        ({"json": b'{"cls": "dog"}'}, None, "dog"),
        ({"json": b'{"cls": 3}'}, None, None),
        ({"json": b"not json"}, None, None),
        ({}, None, None),
    ],
)
def test_a_sample_says_its_label_or_class_name(members, label, name):
    found = sample_row(Sample(0, "k", 0, 512, members))
    assert (found.row.label, found.class_name) == (label, name)
