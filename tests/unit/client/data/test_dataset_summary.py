"""Summary of a data set, as far as its container may be read."""

import pytest

from hapi_client.data.dataset_summary import summarize_data_set
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import DataIndex, IndexRow, ShardIndex
from hapi_protocol.errors import RightsError
from photos import tar_of
from scripted_swift import Answer

SHARD = tar_of([("k.jpg", b"0"), ("k.cls", b"1")])[:2048]
ROW = IndexRow(0, "k", 0, len(SHARD), 1)
INDEX = DataIndex((ShardIndex("p/a.tar", "e", (ROW,)),), ("x", "y"))


def test_data_set_without_permission_to_list_is_summarized(swift, connection):
    swift.script(
        Answer(200, INDEX.to_bytes()), Answer(403), Answer(206, SHARD)
    )
    found = summarize_data_set(connection, Location("c", "p"))
    assert (found.index, found.stored) == ("unknown", "")
    assert found.shard_bytes is None
    assert (found.kinds, found.looked_at) == ({"cls": 1, "jpg": 1}, 1)
    assert found.classes == {"x": 0, "y": 1}


def test_missing_container_is_an_error(swift, connection):
    swift.script(Answer(200, INDEX.to_bytes()), Answer(404))
    with pytest.raises(RightsError, match="no container"):
        summarize_data_set(connection, Location("c", "p"))
