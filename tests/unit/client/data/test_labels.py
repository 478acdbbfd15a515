"""Labels: from the index to the integers of the loss."""

import numpy as np
import pytest

from hapi_client.data.indexing import IndexOptions, checked_rows, sample_row
from hapi_client.data.label_texts import (
    JsonLabels,
    LabelledRow,
    label_text,
    labelled_rows,
    number_labels,
)
from hapi_client.data.labels import (
    OPTIONAL,
    UNLABELLED,
    read_source,
    renumber_labels,
    span_labels,
)
from hapi_protocol.data_index import DataIndex, IndexRow, Span
from hapi_protocol.errors import ClientError, LabelError, UnsupportedError
from hapi_protocol.samples import Sample

NO_INDEX = DataIndex(())


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


def rows_of(*texts):
    return [
        LabelledRow(IndexRow(n, f"k{n}", n * 512, 512, None), text)
        for n, text in enumerate(texts)
    ]


def labels_of(index):
    return [row.label for shard in index.shards for row in shard.rows]


@pytest.mark.parametrize(
    ("texts", "names", "labels"),
    [
        (["12", "-3", None], (), [12, -3, None]),
        (["dog", "cat", None], ("cat", "dog"), [1, 0, None]),
        (["0", "other"], ("0", "other"), [0, 1]),
        (["1_2", "12"], ("12", "1_2"), [1, 0]),
        (["9.0", "10.0", "11.0"], ("10.0", "11.0", "9.0"), [2, 0, 1]),
        (["007", "7"], ("007", "7"), [0, 1]),
        (["9" * 40], ("9" * 40,), [0]),
        (["\u0663"], ("\u0663",), [0]),
    ],
    ids=[
        "integers",
        "names",
        "mixed",
        "underscore",
        "floats",
        "zeros",
        "long",
        "digits",
    ],
)
def test_texts_are_integers_only_if_all_are_plain_decimals(
    texts, names, labels
):
    index = number_labels({"a": rows_of(*texts)}, {"a": "e"}, old=NO_INDEX)
    assert (index.class_names, labels_of(index)) == (names, labels)
    assert DataIndex.from_bytes(index.to_bytes()) == index


@pytest.mark.parametrize(
    ("old", "texts", "names", "labels"),
    [
        # Names keep their numbers.
        ((["dog"], ()), ["ant", "dog"], ("dog", "ant"), [0, 1, 0]),
        # Integers turn into names, because not all texts are integers.
        ((["3", "1"], ()), ["x"], ("1", "3", "x"), [1, 0, 2]),
        # Packed folders state positions in the names.
        ((["1", "0"], ("10", "2")), ["1"], ("10", "2"), [1, 0, 1]),
        ((["1", "0"], ("10", "2")), ["x"], ("10", "2", "x"), [1, 0, 2]),
    ],
    ids=["names", "integers", "positions", "positions and a name"],
)
def test_new_shards_join_those_of_an_index(old, texts, names, labels):
    old_texts, packed_names = old
    first = number_labels(
        {"a": rows_of(*old_texts)},
        {"a": "e"},
        old=DataIndex((), packed_names),
    )
    rows = labelled_rows(first) | {"b": rows_of(*texts)}
    index = number_labels(rows, {"a": "e", "b": "f"}, old=first)
    assert (index.class_names, labels_of(index)) == (names, labels)


JSON = b'{"cls": 2, "a": {"b": "dog"}, "flag": true, "f": 1.5, "n": null}'


@pytest.mark.parametrize(
    ("source", "members", "text"),
    [
        ("cls", {"cls": b"dog\n", "json": JSON}, "dog"),
        ("cls", {"CLS": b"7"}, "7"),
        ("cls", {"json": JSON}, "2"),
        ("cls", {"json": b"not json"}, None),
        ("cls", {"json": b'["dog"]'}, None),
        ("cls", {"json": b"[" * 60_000}, None),
        ("cls", {"cls": b" "}, None),
        ("cls", {}, None),
        ("json:a.b", {"cls": b"7", "json": JSON}, "dog"),
        ("json:a.c", {"json": JSON}, None),
        ("json:n", {"json": JSON}, None),
    ],
)
def test_text_of_a_label(source, members, text):
    options = IndexOptions(labels=source)
    found = sample_row(Sample(0, "k", 0, 512, members), "s.tar", options)
    assert found.text == text


@pytest.mark.parametrize("field", ["flag", "f", "a"])
def test_label_that_is_no_integer_and_no_text_is_refused(field):
    sample = Sample(0, "k", 0, 512, {"json": JSON})
    with pytest.raises(LabelError, match=r"'k' of s.tar has the label"):
        sample_row(sample, "s.tar", IndexOptions(labels=f"json:{field}"))


def test_function_makes_labels_of_the_json():
    labels = JsonLabels(lambda facts: facts["a"]["b"] + "!")
    assert label_text(labels, "7", JSON.decode(), "k") == "dog!"


@pytest.mark.parametrize("labels", ["none", "json:", "json:a..b", "cls "])
def test_unknown_source_of_labels_is_refused(labels):
    with pytest.raises(ClientError, match="'json:FIELD' a field"):
        read_source(labels)
    with pytest.raises(ClientError, match="'json:FIELD' a field"):
        IndexOptions(labels=labels)


def test_sample_with_two_images_is_refused_unless_one_is_named():
    sample = Sample(0, "k", 0, 512, {"depth.png": b"d", "left.png": b"l"})
    with pytest.raises(UnsupportedError, match=r"k\.depth\.png and k\.left"):
        sample_row(sample, "s.tar", IndexOptions())
    sample_row(sample, "s.tar", IndexOptions(image="left.png"))
    with pytest.raises(UnsupportedError, match=r"no member 'jpg'"):
        sample_row(sample, "s.tar", IndexOptions(image="jpg"))


def test_members_that_are_not_together_are_refused():
    rows = [LabelledRow(IndexRow(n, "k", n * 512, 512, None)) for n in (0, 1)]
    with pytest.raises(UnsupportedError, match=r"'k' are not together \(byt"):
        checked_rows("s.tar", rows)


def test_class_names_in_two_unicode_forms_are_both_shown():
    """They look the same on screen: only their code points tell them apart."""
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    with pytest.raises(LabelError) as caught:
        renumber_labels([np.zeros(1)], [composed], [decomposed], "data/val")
    assert r"'caf\xe9'" in caught.value.message
    assert r"'cafe\u0301'" in caught.value.message
    with pytest.raises(LabelError) as caught:
        renumber_labels([np.zeros(1)], ["dog"], [decomposed], "data/val")
    assert "Unicode" not in caught.value.message
