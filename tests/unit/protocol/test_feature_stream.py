"""The feature stream: round trips, truncation, damage."""

import contextlib
import io
import json
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from hapi_protocol.encodings import COMPRESSIONS, DTYPES, ENCODINGS, Encoding
from hapi_protocol.errors import TruncatedStreamError
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


def stream_of(encoding="float32", *, close=True):
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
def test_rows_features_scales_and_summary_survive_the_stream(encoding):
    data = stream_of(encoding)
    reader = read_features(data)
    first, second = list(reader)
    assert list(first.rows) == ROWS
    assert [row.key for row in first.rows if not row.error] == ["a", "b", "d"]
    assert first.features.dtype == Encoding.parse(encoding).wire_dtype
    np.testing.assert_array_equal(first.features, VALUES)
    assert first.timings == {"read": 0.5}
    assert second.features.shape == (0, 2, 3)
    assert reader.summary.rows == 5
    assert reader.summary.errors == 2
    assert reader.summary.saturated == 1
    if encoding.startswith("uint8"):
        np.testing.assert_array_equal(first.scale, SCALES)
        np.testing.assert_array_equal(first.zero, ZEROS)
        assert second.scale.shape == second.zero.shape == (0, 1)
    else:
        assert (first.scale, first.zero) == (None, None)
        assert "scale" not in reader.schema.names
    first.features[:] = 1  # a writable copy
    assert next(iter(read_features(data))).features.min() == 0


def test_scale_and_zero_are_null_exactly_in_rows_with_an_error():
    with pa.ipc.open_stream(stream_of("uint8;zstd")) as stream:
        batch = stream.read_next_batch()
    for name in ("features", "scale", "zero"):
        nulls = batch.column(name).is_null().to_pylist()
        assert nulls == [False, False, True, False]
    # Each channel has its own.
    schema = feature_schema((5, 6, 6), "uint8;lz4")
    groups = pa.list_(pa.float32(), 5)
    assert schema.field("scale").type == schema.field("zero").type == groups


@pytest.mark.parametrize("encoding", ["float32", "float16"])
def test_uncompressed_stream_has_the_six_columns_of_version_1(encoding):
    with pa.ipc.open_stream(stream_of(encoding)) as stream:
        batch = stream.read_next_batch()
        facts = json.loads(stream.schema.metadata[b"hapi.stream"])
    assert facts == {"version": 1, "encoding": encoding}
    columns = ["index", "key", "label", "meta", "error", "features"]
    assert batch.schema.names == columns
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


@pytest.mark.parametrize("encoding", ["float32", "uint8;zstd", "uint8;lz4"])
def test_stream_cut_anywhere_before_its_closing_batch_is_truncated(encoding):
    data = stream_of(encoding)
    closing = len(stream_of(encoding, close=False))
    for length in range(0, closing, 7):
        with pytest.raises(TruncatedStreamError):
            list(read_features(data[:length]))
    with pytest.raises(TruncatedStreamError, match="after 5 rows"):
        list(read_features(data[:closing]))
    with pytest.raises(TruncatedStreamError, match="has 6 rows"):
        list(read_features(data.replace(b'"rows": 5', b'"rows": 6')))


@pytest.mark.parametrize("encoding", ["float32", "uint8", "uint8;zstd"])
def test_changed_bits_of_a_stream_never_end_the_process(encoding):
    random, whole = Random(0), stream_of(encoding)
    for _ in range(3_000):
        data = bytearray(whole)
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        with contextlib.suppress(TruncatedStreamError):
            list(read_features(bytes(data)))


def test_features_that_do_not_match_their_rows_are_refused():
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


def test_index_stream_has_offsets_and_no_features():
    writer = FeatureStreamWriter(sink := io.BytesIO(), index_schema())
    row = Row(0, "a", 3, offset=512, length=1024)
    writer.write([row])
    writer.close(source_etag="x", source_bytes=1)
    (batch,) = list(read_features(sink.getvalue()))
    assert batch.rows == (row,)
    assert batch.features is None
