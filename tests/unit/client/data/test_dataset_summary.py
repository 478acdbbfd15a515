"""What a data set is, as far as one may look."""

from __future__ import annotations

import pytest

from hapi_client.data.dataset_summary import describe_data
from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import DataIndex, IndexRow, ShardIndex
from hapi_protocol.errors import RightsError
from photos import tar_of
from scripted_swift import Answer, scripted_swift

SHARD = tar_of([("k.jpg", b"0"), ("k.cls", b"1")])[:2048]
ROW = IndexRow(0, "k", 0, len(SHARD), 1)
INDEX = DataIndex((ShardIndex("p/a.tar", "e", (ROW,)),), ("x", "y"))


@pytest.fixture
def swift():
    with scripted_swift() as server:
        yield server


@pytest.fixture
def connection(swift):
    with Connection(Credentials.v1(swift.auth_url, "u", "k")) as made:
        yield made


def test_shards_that_may_be_read_and_not_listed_are_described(
    swift, connection
):
    swift.script(
        Answer(200, INDEX.to_bytes()), Answer(403), Answer(206, SHARD)
    )
    found = describe_data(connection, Location("c", "p"))
    assert (found.index, found.stored) == ("unknown", "")
    assert found.shard_bytes is None
    assert (found.kinds, found.looked_at) == ({"cls": 1, "jpg": 1}, 1)
    assert found.classes == {"x": 0, "y": 1}


def test_a_container_that_is_gone_is_an_error(swift, connection):
    swift.script(Answer(200, INDEX.to_bytes()), Answer(404))
    with pytest.raises(RightsError, match="no container"):
        describe_data(connection, Location("c", "p"))
