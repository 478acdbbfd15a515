"""Catalog and summary of data sets in a container."""

import json

import pytest

from hapi_client.data.catalog import IndexDifference, list_data_sets
from hapi_client.data.dataset_summary import summarize_data_set
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import DataIndex, IndexRow, ShardIndex
from hapi_protocol.errors import NotFoundError
from photos import tar_of
from scripted_swift import Answer


def index_of(**etags):
    row = IndexRow(0, "k", 0, 1024, 1)
    return DataIndex(
        tuple(ShardIndex(name, etag, (row,)) for name, etag in etags.items())
    )


@pytest.mark.parametrize(
    ("etags", "changed", "missing", "added"),
    [
        ({"a": "1", "b": "2"}, (), (), ()),
        ({"a": "1", "b": "3"}, ("b",), (), ()),
        ({"a": "1"}, (), ("b",), ()),
        ({"a": "1", "b": "2", "c": "3"}, (), (), ("c",)),
    ],
)
def test_index_differs_by_changed_missing_and_added_shards(
    etags, changed, missing, added
):
    difference = IndexDifference.between(index_of(a="1", b="2"), etags)
    assert difference == IndexDifference(changed, missing, added)
    assert difference.is_stale is bool(changed or missing or added)


def listing(*names):
    entries = [{"name": name, "hash": "1", "bytes": 5} for name in names]
    return Answer(200, json.dumps(entries).encode())


def test_shards_belong_to_the_nearest_index_above_them(swift, connection):
    names = (
        "all/hapi-index.arrow all/a.tar all/train/b.tar "
        "all/train/hapi-index.arrow val/c.tar val/more/d.tar photo.jpg "
        "val/._c.tar"
    )
    both = index_of(**{"all/a.tar": "1"})
    stale = index_of(**{"all/train/b.tar": "2"})
    swift.script(
        listing(*names.split()),
        Answer(200, both.to_bytes()),
        Answer(200, stale.to_bytes()),
    )
    entries = list_data_sets(connection, Location("c"))
    assert [
        (str(e.location), e.index, e.num_shards, e.num_samples, e.length_bytes)
        for e in entries
    ] == [
        ("swift://c/all", "there", 1, 1, 5),
        ("swift://c/all/train", "stale", 1, 1, 5),
        ("swift://c/val", "missing", 1, None, 5),
        ("swift://c/val/more", "missing", 1, None, 5),
    ]


def test_damaged_index_is_reported(swift, connection):
    swift.script(listing("hapi-index.arrow"), Answer(200, b"none"))
    [entry] = list_data_sets(connection, Location("c"))
    assert (entry.index, entry.num_samples) == ("damaged", None)


SHARD = tar_of([("k.jpg", b"0"), ("k.cls", b"1")])[:2048]
ROW = IndexRow(0, "k", 0, len(SHARD), 1)
INDEX = DataIndex((ShardIndex("p/a.tar", "e", (ROW,)),), ("x", "y"))


def test_data_set_without_permission_to_list_is_summarized(swift, connection):
    swift.script(
        Answer(200, INDEX.to_bytes()), Answer(403), Answer(206, SHARD)
    )
    summary = summarize_data_set(connection, Location("c", "p"))
    assert (summary.index, summary.stored) == ("unknown", "")
    assert summary.shard_bytes is None
    assert (summary.kinds, summary.looked_at) == ({"cls": 1, "jpg": 1}, 1)
    assert summary.classes == {"x": 0, "y": 1}


def test_missing_container_is_an_error(swift, connection):
    swift.script(Answer(200, INDEX.to_bytes()), Answer(404))
    with pytest.raises(NotFoundError, match="no container"):
        summarize_data_set(connection, Location("c", "p"))
