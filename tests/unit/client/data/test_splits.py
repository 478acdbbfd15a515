"""Splits of a user's data, and refused data."""

import contextlib
import io

import pytest

from hapi_client.data.splits import TRAIN, load_splits
from hapi_protocol.data_index import DataIndex, IndexRow, ShardIndex
from hapi_protocol.errors import (
    ClientError,
    DataIndexError,
    HapiError,
    LabelError,
    NotFoundError,
)


def index_of(folder, names, labels, class_names=()):
    def shard(name):
        rows = tuple(
            IndexRow(number, f"{name}/{number}", 512 * number, 512, label)
            for number, label in enumerate(labels)
        )
        return ShardIndex(f"{folder}/{name}.tar", f"etag of {name}", rows)

    return DataIndex(tuple(map(shard, names)), class_names)


CONTAINERS = ("photos", "/AUTH_other/photos")


class Body(io.BytesIO):
    read_whole = io.BytesIO.read


class Store:
    """A store with the indexes of data sets and nothing else."""

    def __init__(self, **indexes):
        self.indexes = indexes

    @contextlib.contextmanager
    def open(self, container, name):
        folder = name.rpartition("/")[0]
        if container not in CONTAINERS or folder not in self.indexes:
            raise NotFoundError("not_found", "no such object")
        yield Body(self.indexes[folder].to_bytes())

    def list(self, container, prefix=""):
        return iter(())


STORE = Store(
    train=index_of("train", "abcd", [0, 1], ("cat", "dog")),
    val=index_of("val", "xy", [1, 0, 2], ("bird", "cat", "dog")),
    pets=index_of("pets", "pq", [1, 0], ("dog", "cat")),
    plain=index_of("plain", "z", [5, 7]),
    odd=index_of("odd", "o", [0, -1], ("dog", "cat")),
    bare=index_of("bare", "b", [None, None]),
)


def load(data, labels=None):
    return load_splits(STORE, data, labels)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("swift://photos/train", "abcd"),
        ("photos/train/", "abcd"),
        ("swift://photos/train/b.tar", "b"),
        ("swift://photos/train/{b..d}.tar", "bcd"),
        ("swift://photos/train/{d,a}.tar", "da"),
        (["swift://photos/train/c.tar", "swift://photos/train/a.tar"], "ca"),
        ({"train": "swift://photos/train"}, "abcd"),
        (["photos/train", "photos/pets/q.tar"], [*"abcd", "pets/q"]),
    ],
)
def test_data_is_a_whole_data_set_or_some_shards(data, expected):
    train = load(data)["train"]
    places = [path if "/" in path else f"train/{path}" for path in expected]
    assert [s.shard for s in train.spans] == [
        f"{place}.tar" for place in places
    ]
    assert train.containers == ["photos"]
    assert train.sizes == [2] * len(expected)


def test_classes_have_the_numbers_of_the_training_data():
    splits = load({"train": "photos/train", "val": "photos/pets"})
    assert splits["train"].labels[0].tolist() == [0, 1]
    # The index of pets numbers its classes in the opposite order.
    assert splits["val"].labels[0].tolist() == [0, 1]
    assert splits["val"].num_classes == splits["train"].num_classes == 2
    assert list(splits["val"].class_names) == ["cat", "dog"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("photos/val", "swift://photos/val differ .* it has 'bird'"),
        ("photos/plain", "photos/plain differ .* integers without names"),
    ],
)
def test_classes_unknown_to_the_training_data_are_refused(other, message):
    train = "photos/train"
    for data in ({"train": train, "val": other}, [train, other]):
        with pytest.raises(LabelError, match=message):
            load(data)


def test_label_without_a_class_name_is_refused():
    for data in ("photos/odd", {"train": "photos/train", "val": "photos/odd"}):
        with pytest.raises(LabelError, match=r"'o/1' of shard odd/o\.tar"):
            load(data)


def test_labels_of_the_user_override_the_indexes():
    splits = load(
        {"train": "photos/train", "val": "photos/val"},
        {"cat": 3, "dog": 4, "bird": 5},
    )
    assert splits["train"].labels[0].tolist() == [3, 4]
    assert splits["val"].labels[0].tolist() == [3, 5, 4]


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        ("photos/nowhere", DataIndexError, "photos/nowhere has no object"),
        (
            "photos/train/{a..g}.tar",
            DataIndexError,
            "3 of 7 shards are not in the index of swift://photos/train: "
            "train/e.tar, train/f.tar, train/g.tar; run 'hapi index",
        ),
        ("photos/train/{a..d.tar", ClientError, "unbalanced braces"),
        ([], ClientError, "data names no data set"),
        ({}, ClientError, "data has the splits none; one .* 'train'"),
        ({"val": "photos/val"}, ClientError, "splits 'val'; one of them"),
        (
            ["photos/train", "photos/train/a.tar"],
            ClientError,
            "train/a.tar is repeated",
        ),
        ("swift:///train", ClientError, "is not a Swift location"),
        ("swift:////train/x", ClientError, "is not a Swift location"),
    ],
)
def test_invalid_data_is_refused(data, kind, message):
    with pytest.raises(HapiError, match=message) as caught:
        load(data)
    assert isinstance(caught.value, kind)


def test_digest_depends_on_shards_and_order():
    digests = {
        load(data)["train"].digest()
        for data in (
            "photos/train",
            "photos/train/{a..d}.tar",
            "photos/train/{b,a,c,d}.tar",
            "photos/train/{a..c}.tar",
            "photos/pets",
        )
    }
    assert len(digests) == 4


def test_data_may_be_in_several_containers_and_accounts():
    data = ["photos/train/a.tar", "swift:///AUTH_other/photos/train/a.tar"]
    train = load(data)["train"]
    assert [span.path for span in train.spans] == [
        "photos/train/a.tar",
        "/AUTH_other/photos/train/a.tar",
    ]
    assert train.containers == list(CONTAINERS)
    digests = {load(shards)["train"].digest() for shards in (data, data[::-1])}
    assert len(digests | {load(data[0])["train"].digest()}) == 3


@pytest.mark.parametrize("places", [["bare", "train"], ["train", "bare"]])
def test_data_without_labels_can_be_joined_with_labelled_data(places):
    data = [f"swift://photos/{place}" for place in places]
    train = load(data, labels="optional")[TRAIN]
    assert tuple(train.class_names) == ("cat", "dog")
    numbers = sorted(n for labels in train.labels for n in labels.tolist())
    assert numbers == sorted([-1, -1] + 4 * [0, 1])
    splits = dict(zip(("train", "val"), data, strict=True))
    both = load(splits, labels="optional")
    assert {tuple(split.class_names) for split in both.values()} <= {
        (),
        ("cat", "dog"),
    }
