"""The index of a data set: round trips, spans, damage."""

import io

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapi_protocol.data_index import DataIndex, IndexRow, ShardIndex
from hapi_protocol.errors import DataIndexError
from hapi_protocol.feature_stream import index_schema
from hapi_protocol.feature_writer import FeatureStreamWriter

INDEX = DataIndex(
    (
        ShardIndex(
            "a.tar",
            "e1",
            tuple(
                IndexRow(i, f"k{i}", i * 100, 100, i, crc32=2**32 - 1 - i)
                for i in range(7)
            ),
        ),
        ShardIndex("b.tar", "e2", (IndexRow(0, "k", 0, 5000, None, 0),)),
    ),
    ("cat", "dog"),
)


def test_index_survives_its_own_bytes():
    assert DataIndex.from_bytes(INDEX.to_bytes()) == INDEX
    assert len(INDEX) == 8
    assert INDEX.etags == {"a.tar": "e1", "b.tar": "e2"}
    new = ShardIndex("a.tar", "e9", (IndexRow(0, "z", 0, 9, 1),))
    assert INDEX.replace([new]).shards == (new, INDEX.shards[1])


def test_index_of_version_1_works_without_checksums():
    with pa.ipc.open_stream(INDEX.to_bytes()) as reader:
        table = reader.read_all().drop_columns("crc32")
    sink = pa.BufferOutputStream()
    facts = b'{"version": 1, "class_names": ["cat", "dog"]}'
    schema = table.schema.with_metadata({b"hapi.index": facts})
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(table.cast(schema))
    old = DataIndex.from_bytes(sink.getvalue().to_pybytes())
    assert old.unchecked_shards == 2
    assert all(span.crc32s == () for span in old.spans())
    assert [s.etag for s in old.shards] == ["e1", "e2"]
    # Mixed, it can be stored again.
    mixed = old.replace(INDEX.shards[:1])
    assert DataIndex.from_bytes(mixed.to_bytes()) == mixed
    assert mixed.unchecked_shards == 1
    assert mixed.spans()[0].part(5, 7).crc32s == (2**32 - 6, 2**32 - 7)


@given(st.integers(1, 10), st.integers(50, 900))
@settings(max_examples=50)
def test_spans_partition_the_index_within_their_limits(samples, size):
    spans = INDEX.spans(samples, size)
    rows = [(span.shard, row) for span in spans for row in span.rows]
    assert rows == [(s.name, row) for s in INDEX.shards for row in s.rows]
    for span in spans:
        assert len(span.rows) <= samples
        assert len(span.rows) == 1 or span.byte_range.length_bytes <= size
        assert span.samples.last - span.samples.first == len(span.rows) - 1


def feature_stream():
    sink = io.BytesIO()
    FeatureStreamWriter(sink, index_schema()).close(
        source_etag="x", source_bytes=9
    )
    return sink.getvalue()


def _with_rows(*rows):
    return DataIndex((ShardIndex("a.tar", "e", rows),)).to_bytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no arrow",
        INDEX.to_bytes()[:200],
        INDEX.to_bytes().replace(b'"version": 2', b'"version": 7'),
        feature_stream(),
        _with_rows(IndexRow(1, "k", 0, 10, None)),
        _with_rows(IndexRow(0, "k", 0, 0, None)),
        _with_rows(IndexRow(0, "k", 0, 9, 0), IndexRow(1, "l", 5, 9, 0)),
    ],
)
def test_damaged_index_is_refused_by_name(data):
    with pytest.raises(DataIndexError, match="my-index"):
        DataIndex.from_bytes(data, name="my-index")
