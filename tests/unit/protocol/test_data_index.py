"""The index of a data set: round trips, spans, damage."""

import contextlib
import io
import json
import tracemalloc
from dataclasses import replace
from random import Random

import numpy as np
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
    assert INDEX.part(["b.tar"]) == replace(INDEX, shards=INDEX.shards[1:])


def test_empty_shards_stay_in_the_index():
    empty = ShardIndex("aa.tar", "e3", ())
    first, last = INDEX.shards
    index = replace(
        INDEX,
        shards=(first, empty, last),
        labels="json:a.b",
        labels_are_names=True,
    )
    assert DataIndex.from_bytes(index.to_bytes()) == index
    assert index.spans() == INDEX.spans()


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
    mixed = replace(old, shards=(INDEX.shards[0], old.shards[1]))
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


def _without_last_shard():
    """The readable part of an index that was cut off."""
    with pa.ipc.open_stream(INDEX.to_bytes()) as reader:
        batch = reader.read_next_batch()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _with_column(name, values, facts=b'{"version": 1}'):
    """An index of two samples in which one column is another."""
    with pa.ipc.open_stream(
        _with_rows(IndexRow(0, "k", 0, 9, 0), IndexRow(1, "l", 9, 9, 0))
    ) as reader:
        batch = reader.read_next_batch()
    place = batch.schema.get_field_index(name)
    batch = batch.set_column(place, name, values)
    schema = batch.schema.with_metadata({b"hapi.index": facts})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    return sink.getvalue().to_pybytes()


KEYS = pa.array(["k", "l"])
INT64 = pa.array([0, 9], pa.int64())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        _with_column("key", KEYS.cast(pa.large_utf8())),
        _with_column("offset", INT64.cast(pa.int32())),
        _with_column("offset", INT64.cast(pa.date64())),
        _with_column("shard", pa.array(["a.tar"] * 2)),
        _with_column("key", pa.array(["k", None])),
        _with_column("length", pa.array([9, None])),
        _with_column("shard", pa.array(["a.tar", None]).dictionary_encode()),
        _with_column("key", KEYS, b"[" * 50_000),
        _with_column("key", KEYS, b"[1]"),
        _with_column("key", KEYS, b'{"version": 1, "class_names": 5}'),
        b"no arrow",
        INDEX.to_bytes()[:200],
        _without_last_shard(),
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


def test_changed_bits_of_an_index_never_end_the_process():
    random, whole = Random(0), INDEX.to_bytes()
    for _ in range(10_000):
        data = bytearray(whole)
        for _ in range(random.choice((1, 1, 2))):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        with contextlib.suppress(DataIndexError):
            DataIndex.from_bytes(bytes(data))


def stored(columns, count, facts, **options):
    """An index of the schema with any numbers."""
    schema = pa.ipc.open_stream(INDEX.to_bytes()).schema
    metadata = {b"hapi.index": json.dumps({"version": 2, **facts}).encode()}
    zeros = pa.array(np.zeros(count, np.int32))
    one = pa.DictionaryArray.from_arrays(zeros, pa.array(["a.tar"]))
    made = {
        "shard": one,
        "source_etag": one,
        "sample": pa.array(np.arange(count, dtype=np.int32)),
        "key": pa.nulls(count, pa.utf8()).fill_null(""),
        "offset": pa.array(np.arange(count, dtype=np.int64)),
        "length": pa.array(np.ones(count, np.int64)),
        "label": pa.nulls(count, pa.int64()),
        "crc32": pa.nulls(count, pa.uint32()),
        **columns,
    }
    sink = pa.BufferOutputStream()
    schema = schema.with_metadata(metadata)
    with pa.ipc.new_stream(
        sink, schema, options=pa.ipc.IpcWriteOptions(**options)
    ) as writer:
        arrays = [made[name] for name in schema.names]
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    return bytes(sink.getvalue())


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_index_is_refused_before_it_is_unpacked(compression):
    data = stored({}, 3_000_000, {}, compression=compression)
    assert len(data) < 40_000_000
    before = pa.default_memory_pool().bytes_allocated()
    tracemalloc.start()
    with pytest.raises(DataIndexError, match=r"batch [0-9]+ is compressed"):
        DataIndex.from_bytes(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * len(data)
    assert pa.default_memory_pool().bytes_allocated() - before < 1 << 20
    assert DataIndex.from_bytes(stored({}, 3, {})).etags == {"a.tar": "a.tar"}


@pytest.mark.parametrize("name", ["", ".", "..", "a/../b", "./a", "a\0b"])
@pytest.mark.parametrize("is_empty", [False, True])
def test_names_that_a_url_would_change_are_refused(name, is_empty):
    if is_empty:
        data = stored({}, 2, {"empty": {name: "e"}})
    else:
        zeros = pa.array([0, 0], pa.int32())
        names = pa.DictionaryArray.from_arrays(zeros, pa.array([name]))
        data = stored({"shard": names}, 2, {})
    with pytest.raises(DataIndexError, match="a shard has the name"):
        DataIndex.from_bytes(data)


@pytest.mark.parametrize(
    "facts",
    [
        {"empty": []},
        {"empty": 3},
        {"objects": []},
        {"objects": {"a.tar": 3}},
        {"objects": {"a.tar": []}},
        {"class_names": 3},
    ],
)
def test_odd_facts_of_an_index_are_refused(facts):
    data = stored({}, 2, facts)
    try:
        DataIndex.from_bytes(data)
    except DataIndexError:
        return
    assert facts == {"objects": []}  # no names are among them


@pytest.mark.parametrize("length", [2**62, 2**51, 0, -1])
def test_lengths_of_an_index_have_a_limit(length):
    with pytest.raises(DataIndexError, match=r"sample 0 (ends at|is out of)"):
        DataIndex.from_bytes(stored({"length": pa.array([length, 1])}, 2, {}))


def test_long_names_are_kept_once():
    shard = ShardIndex(
        "n" * 10_000,
        "e",
        tuple(IndexRow(i, f"{i}", i, 1, None) for i in range(10_000)),
    )
    data = DataIndex((shard,)).to_bytes()
    tracemalloc.start()
    assert len(DataIndex.from_bytes(data)) == 10_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000
