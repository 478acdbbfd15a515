"""Labels: from the index to the integers of the loss."""

import contextlib
import io

import numpy as np
import pytest

from hapi_client.data.indexing import (
    IndexOptions,
    checked_rows,
    cut_off_note,
    sample_row,
)
from hapi_client.data.label_texts import (
    JsonLabels,
    LabelledRow,
    label_text,
    labelled_rows,
    number_labels,
    unlabelled_note,
)
from hapi_client.data.labels import (
    OPTIONAL,
    UNLABELLED,
    read_source,
    renumber_labels,
    span_labels,
)
from hapi_client.data.loose_objects import object_labels
from hapi_client.swift.swift_url import parse_location
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
    (numbers,) = span_labels([span(*in_index)], labels, class_names)
    assert numbers.tolist() == expected
    assert numbers.dtype == "int64"


@pytest.mark.parametrize(
    ("in_index", "labels", "class_names", "messages"),
    [
        ([0, None], None, (), ["labels="]),
        ([0, 1], {"cat": 0}, ("cat", "dog"), ["'dog'"]),
        ([0, -1], None, ("cat", "dog"), ["label -1,", "0 to 1;"]),
        ([0, 2], None, ("cat", "dog"), ["label 2,", "0 to 1;"]),
        ([0, 1], {"cat/0": 0, "cat/1": "x"}, (), ["label 'x'", "integers"]),
        ([0, 1], {"cat/0": 0, "cat/1": 1.7}, (), ["label 1.7", "integers"]),
        (
            [0, 1],
            lambda key: None if key == "cat/1" else 1,
            (),
            ["label None", "integers"],
        ),
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
    (numbers,) = renumber_labels(
        labels, ("cat", "dog"), ("dog", "cat"), "here"
    )
    assert numbers.tolist() == [1, UNLABELLED, 0]


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
    row = sample_row(Sample(0, "k", 0, 512, members), "s.tar", options)
    assert row.text == text


@pytest.mark.parametrize("field", ["flag", "f", "a"])
def test_label_that_is_no_integer_and_no_text_is_refused(field):
    sample = Sample(0, "k", 0, 512, {"json": JSON})
    with pytest.raises(LabelError, match=r"'k' of s.tar has the label"):
        sample_row(sample, "s.tar", IndexOptions(labels=f"json:{field}"))


def test_function_makes_labels_of_the_json():
    labels = JsonLabels(lambda facts: facts["a"]["b"] + "!")
    assert label_text(labels, "7", JSON.decode(), "k") == ("dog!", "")


LONG = b'{"exif": "' + b"x" * 70_000 + b'"}'


@pytest.mark.parametrize(
    ("members", "text", "problem"),
    [
        ({"cls": b"caf\xe9"}, "caf\\xe9", ""),
        ({"cls": b"\xef\xbb\xbf7"}, "7", ""),
        ({"json": b'\xef\xbb\xbf{"cls": 3}'}, "3", ""),
        ({"cls": b"7", "json": LONG}, "7", ""),
        ({"json": LONG}, None, "no .cls or .json member of at most 64 kB"),
        ({"json": b'{"cls": 1.5}'}, None, "the label 1.5 (float)"),
        ({"json": b'{"cls": true}'}, None, "the label True (bool)"),
        ({"json": b'{"cls": [1]}'}, None, "the label [1] (list)"),
        ({"json": b'{"a": 1, "b": 2}'}, None, "whose fields are a, b"),
        ({"json": b'["dog"]'}, None, "which is a list"),
        ({"json": b"{"}, None, "a damaged .json member: Expecting"),
        ({"cls": b" "}, None, "an empty .cls member"),
        ({"json": b'{"cls": ""}'}, None, "an empty label in its .json"),
    ],
)
def test_texts_are_kept_and_missing_ones_are_explained(members, text, problem):
    sample = Sample(0, "k", 0, 512, members)
    row = sample_row(sample, "s.tar", IndexOptions())
    assert row.text == text
    assert problem in row.problem
    note = unlabelled_note({"s.tar": [row]}, "cls")
    if text is None:
        assert note.startswith("no sample has a label: 'k' of s.tar has ")
        assert problem in note
        two = {"s.tar": [row, LabelledRow(row.row, "1")]}
        assert "1 of 2 samples have no label" in unlabelled_note(two, "cls")
    else:
        assert note is None


def test_classes_of_other_encodings_stay_apart():
    rows = [
        sample_row(
            Sample(n, f"k{n}", 512 * n, 512, {"cls": text}),
            "s",
            IndexOptions(),
        )
        for n, text in enumerate((b"caf\xe9", b"caf\xe8", "café".encode()))
    ]
    index = number_labels({"s": rows}, {"s": "e"}, old=DataIndex(()))
    assert index.class_names == ("caf\\xe8", "caf\\xe9", "café")


def test_label_that_stands_for_none_is_refused_where_labels_are_optional():
    with pytest.raises(
        LabelError, match="label -1, which stands for no label"
    ):
        span_labels([span(-1, 0)], OPTIONAL)


class Table:
    """A connection with one object, a table of labels."""

    def __init__(self, text):
        self._data = text if isinstance(text, bytes) else text.encode()

    @contextlib.contextmanager
    def open(self, container, name):
        yield io.BytesIO(self._data)


FILES = [f"train/{n // 2}/{n}.jpg" for n in range(4)] + ["train/1/0.jpg"]
HEAD = "file_name,label\n"


def table_of(text, name="t.csv"):
    return object_labels(
        Table(text), parse_location("swift://c/train"), name, FILES
    )


@pytest.mark.parametrize(
    "row",
    ["0/1.jpg", "./0/1.jpg", "/0/1.jpg", "0\\1.jpg", "1.jpg", "x/../0/1.jpg"],
)
def test_rows_of_tables_match_where_it_is_clear(row):
    text_of, note = table_of(f"{HEAD}{row},cat\n")
    assert text_of("train/0/1.jpg") == "cat"
    assert text_of("train/0/0.jpg") is None
    assert note == "t.csv: 1 of 5 files have a label"


def test_rows_that_match_nothing_are_told():
    text_of, note = table_of(
        f"{HEAD}0/1.jpg,a\n0.jpg,b\nno.jpg,c\n0/1.jpg,a\n"
    )
    assert text_of("train/0/1.jpg") == "a"
    assert "2 rows state no file" in note
    assert "'0.jpg' (line 3)" in note


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            f"{HEAD}a/0.jpg,x\n",
            "none of its 1 rows, such as 'a/0.jpg' (line 2)",
        ),
        (HEAD, "none of its 0 rows states one of the 5 files"),
        (
            f"{HEAD}0/1.jpg,a\n./0/1.jpg,b\n",
            "line 3 gives './0/1.jpg' the label",
        ),
        ("file_name;label\n0/1.jpg;a\n", "has semicolons between its fields"),
        ("file_name\tlabel\n0/1.jpg\ta\n", "has tabs between its fields"),
        (f"{HEAD}0/1.jpg,{'x' * 200_000}\n", "line 2 field larger than"),
        ("name,label\n0/1.jpg,a\n", "has no field 'file_name'"),
        ("file_name,label,label\n0/1.jpg,a,b\n", "has the field 'label' twi"),
        (f"{HEAD}0/1.jpg\n0/0.jpg,a", None),
        (f"{HEAD}0/1.jpg,a\n".replace("\n", "\r"), None),
        (f"{HEAD}0/1.jpg,a,more\n", None),
    ],
)
def test_tables_are_read_or_named(text, problem):
    if problem is None:
        _, note = table_of(text)
        assert "files have a label" in note
        return
    with pytest.raises(LabelError) as caught:
        table_of(text)
    assert problem in caught.value.message
    assert "t.csv" in caught.value.message


@pytest.mark.parametrize("label", ["1.5", "true", "[1]", "null"])
def test_labels_of_a_table_of_json_are_integers_or_texts(label):
    line = f'{{"file_name": "0/1.jpg", "label": {label}}}'
    with pytest.raises(LabelError, match="line 1 has the label"):
        table_of(line, "t.jsonl")


def test_field_that_stands_twice_in_a_line_is_an_error():
    line = '{"file_name": "0/1.jpg", "label": "a", "label": "b"}'
    with pytest.raises(LabelError, match="line 1 is no JSON: a field stands"):
        table_of(line, "t.jsonl")


def test_deep_json_of_a_table_is_named():
    with pytest.raises(LabelError, match=r"t\.jsonl: line 1 is no JSON"):
        table_of("[" * 100_000, "t.jsonl")


def test_tar_that_ends_with_its_last_sample_is_told():
    rows = [
        LabelledRow(IndexRow(n, f"k{n}", 1024 * n, 1024, 0)) for n in (0, 1)
    ]
    assert cut_off_note("s.tar", rows, 2048 + 1024) is None
    assert cut_off_note("s.tar", [], 0) is None
    note = cut_off_note("s.tar", rows, 2048)
    assert "cut off after its sample 'k1', number 2" in note


@pytest.mark.parametrize("labels", [3, ["cat"], {6: 0}])
def test_labels_of_another_type_are_refused(labels):
    with pytest.raises(ClientError, match=r"labels is .*; give str"):
        read_source(labels)


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
