"""The feature stream and the index: round trips, truncation, damage."""

from __future__ import annotations

import io
import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapi_protocol.data_index import DataIndex, IndexRow, ShardIndex
from hapi_protocol.encodings import COMPRESSIONS, DTYPES, ENCODINGS, Encoding
from hapi_protocol.errors import DataIndexError, TruncatedStreamError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.feature_stream import Row, feature_schema, index_schema
from hapi_protocol.feature_writer import FeatureStreamWriter

ROWS = [
    Row(0, "a", 1),
    Row(1, "b", None, "m"),
    Row(2, "c", error="bad"),
    Row(3, "d", 2),
]


VALUES = np.arange(18).reshape(3, 2, 3)
SCALES = np.array([[0.5], [1], [2]], np.float32)
ZEROS = np.array([[-1], [np.nan], [7]], np.float32)


def stream_of(encoding: str = "float32", *, close: bool = True) -> bytes:
    sink = io.BytesIO()
    writer = FeatureStreamWriter(sink, feature_schema((2, 3), encoding))
    parsed = Encoding.parse(encoding)
    scales = {"scale": SCALES, "zero": ZEROS} if parsed.is_quantised else {}
    features = VALUES.astype(parsed.wire_dtype)
    writer.write(ROWS, features, {"read": 0.5}, **scales)
    writer.write([Row(4, "e", error="worse")])
    if close:
        writer.close(source_etag="x", source_bytes=9, saturated=1)
    return sink.getvalue()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rows_features_and_summary_survive_the_stream(encoding):
    reader = read_features(stream_of(encoding))
    first, second = list(reader)
    assert list(first.rows) == ROWS
    assert [row.key for row in first.good_rows] == ["a", "b", "d"]
    assert first.features.dtype == Encoding.parse(encoding).wire_dtype
    np.testing.assert_array_equal(first.features, VALUES)
    assert first.timings == {"read": 0.5}
    assert second.features.shape == (0, 2, 3)
    assert reader.summary.rows == 5
    assert reader.summary.errors == 2
    assert reader.summary.saturated == 1


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_only_quantised_features_have_scale_and_zero(encoding):
    reader = read_features(stream_of(encoding))
    first, second = list(reader)
    if not encoding.startswith("uint8"):
        assert (first.scale, first.zero) == (None, None)
        assert "scale" not in reader.schema.names
        return
    np.testing.assert_array_equal(first.scale, SCALES)
    np.testing.assert_array_equal(first.zero, ZEROS)
    assert second.scale.shape == second.zero.shape == (0, 1)


def test_scale_and_zero_are_null_exactly_in_rows_with_an_error():
    with pa.ipc.open_stream(stream_of("uint8;zstd")) as stream:
        batch = stream.read_next_batch()
    for name in ("features", "scale", "zero"):
        nulls = batch.column(name).is_null().to_pylist()
        assert nulls == [False, False, True, False]


def test_channels_have_scales_of_their_own():
    schema = feature_schema((5, 6, 6), "uint8;lz4")
    groups = pa.list_(pa.float32(), 5)
    assert schema.field("scale").type == schema.field("zero").type == groups


@pytest.mark.parametrize("encoding", ["float32", "float16"])
def test_stream_without_compression_is_what_it_has_always_been(encoding):
    """A client of before knows six columns, and reads them by name."""
    with pa.ipc.open_stream(stream_of(encoding)) as stream:
        batch = stream.read_next_batch()
        facts = json.loads(stream.schema.metadata[b"hapi.stream"])
    assert facts == {"version": 1, "encoding": encoding}
    assert batch.schema.names == [
        "index",
        "key",
        "label",
        "meta",
        "error",
        "features",
    ]
    tensor = pa.fixed_shape_tensor(
        pa.from_numpy_dtype(np.dtype(encoding)), [2, 3]
    )
    assert batch.schema.field("features").type == tensor
    values = batch.column("features").drop_null().storage.flatten()
    np.testing.assert_array_equal(values.to_numpy(False), VALUES.flatten())


@pytest.mark.parametrize("dtype", DTYPES)
def test_compressed_buffers_are_smaller(dtype):
    sizes = {}
    for compression in COMPRESSIONS:
        encoding = str(Encoding(dtype, compression))
        sink = io.BytesIO()
        writer = FeatureStreamWriter(sink, feature_schema((4096,), encoding))
        zeros = np.zeros((1, 4096), Encoding.parse(encoding).wire_dtype)
        scale = np.ones((1, 1), np.float32)
        writer.write([Row(0, "a")], zeros, scale=scale, zero=scale)
        writer.close(source_etag="x", source_bytes=9)
        (batch,) = list(read_features(sink.getvalue()))
        np.testing.assert_array_equal(batch.features, zeros)
        sizes[compression] = len(sink.getvalue())
    assert max(sizes["lz4"], sizes["zstd"]) < sizes["none"] - 3000


def test_features_read_are_writable_copies():
    data = stream_of()
    (first, _) = list(read_features(data))
    first.features[:] = -1
    (again, _) = list(read_features(data))
    assert again.features.min() == 0


def test_stream_without_closing_batch_is_truncated():
    with pytest.raises(TruncatedStreamError, match="after 5 rows"):
        list(read_features(stream_of(close=False)))


@pytest.mark.parametrize("encoding", ["float32", "uint8;zstd", "uint8;lz4"])
def test_stream_cut_anywhere_before_its_closing_batch_is_truncated(encoding):
    data = stream_of(encoding)
    closing = len(stream_of(encoding, close=False))
    for length in range(0, closing, 7):
        with pytest.raises(TruncatedStreamError):
            list(read_features(data[:length]))


def test_lying_summary_is_truncation():
    data = stream_of().replace(b'"rows": 5', b'"rows": 6')
    with pytest.raises(TruncatedStreamError, match="has 6 rows"):
        list(read_features(data))


def test_features_that_do_not_go_with_their_rows_are_refused():
    writer = FeatureStreamWriter(io.BytesIO(), feature_schema((2,), "float32"))
    with pytest.raises(ValueError, match="need"):
        writer.write(ROWS, np.zeros((4, 2), np.float32))
    with pytest.raises(ValueError, match="float64; these rows need"):
        writer.write(ROWS, np.zeros((3, 2)))
    with pytest.raises(ValueError, match="need"):
        writer.write(ROWS)


@pytest.mark.parametrize(
    "scales",
    [
        {},
        {"scale": SCALES},
        {"scale": SCALES[:2], "zero": ZEROS},
        {"scale": SCALES, "zero": ZEROS.astype(np.float64)},
    ],
)
def test_quantised_features_without_their_scales_are_refused(scales):
    writer = FeatureStreamWriter(io.BytesIO(), feature_schema((2,), "uint8"))
    with pytest.raises(ValueError, match=r"^(scale|zero) has shape"):
        writer.write(ROWS, np.zeros((3, 2), np.uint8), **scales)


def test_index_stream_has_places_and_no_features():
    sink = io.BytesIO()
    writer = FeatureStreamWriter(sink, index_schema())
    row = Row(0, "a", 3, offset=512, length=1024)
    writer.write([row])
    writer.close(source_etag="x", source_bytes=1)
    (batch,) = list(read_features(sink.getvalue()))
    assert batch.rows == (row,)
    assert batch.features is None


INDEX = DataIndex(
    (
        ShardIndex(
            "a.tar",
            "e1",
            tuple(IndexRow(i, f"k{i}", i * 100, 100, i) for i in range(7)),
        ),
        ShardIndex("b.tar", "e2", (IndexRow(0, "k", 0, 5000, None),)),
    ),
    ("cat", "dog"),
)


def test_index_survives_its_own_bytes():
    assert DataIndex.from_bytes(INDEX.to_bytes()) == INDEX
    assert len(INDEX) == 8
    assert INDEX.etags == {"a.tar": "e1", "b.tar": "e2"}


@given(st.integers(1, 10), st.integers(50, 900))
@settings(max_examples=50)
def test_spans_partition_the_index_within_their_bounds(samples, size):
    spans = INDEX.spans(samples, size)
    rows = [(span.shard, row) for span in spans for row in span.rows]
    assert rows == [(s.name, row) for s in INDEX.shards for row in s.rows]
    for span in spans:
        assert len(span.rows) <= samples
        assert len(span.rows) == 1 or span.byte_range.length_bytes <= size
        assert span.samples.last - span.samples.first == len(span.rows) - 1


def test_replace_puts_a_new_version_in_the_old_ones_place():
    new = ShardIndex("a.tar", "e9", (IndexRow(0, "z", 0, 9, 1),))
    assert INDEX.replace([new]).shards == (new, INDEX.shards[1])


def _with_rows(*rows: IndexRow) -> bytes:
    return DataIndex((ShardIndex("a.tar", "e", rows),)).to_bytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no arrow",
        INDEX.to_bytes()[:200],
        INDEX.to_bytes().replace(b'"version": 1', b'"version": 7'),
        stream_of(),
        _with_rows(IndexRow(1, "k", 0, 10, None)),
        _with_rows(IndexRow(0, "k", 0, 0, None)),
        _with_rows(IndexRow(0, "k", 0, 9, 0), IndexRow(1, "l", 5, 9, 0)),
    ],
)
def test_damaged_index_is_refused_by_name(data):
    with pytest.raises(DataIndexError, match="my-index"):
        DataIndex.from_bytes(data, name="my-index")
