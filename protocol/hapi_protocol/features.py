"""The feature stream: one Arrow IPC stream of rows in shard order.

Columns ``index: int32``, ``key: utf8``, ``label: int64?``, ``meta: utf8?``,
``error: utf8?`` and ``features: fixed_shape_tensor?``, null exactly where
``error`` is set.  An index stream has ``offset: int64`` and
``length: int64`` in the place of ``features``.  Each batch carries this
request's seconds per stage in its ``custom_metadata``.  The last message is a
batch of zero rows with the summary; a stream without it is truncated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hapi_protocol.errors import TruncatedStreamError
from hapi_protocol.messages import API_VERSION

METADATA_TIMINGS = b"hapi.timings"
METADATA_SUMMARY = b"hapi.summary"
METADATA_STREAM = b"hapi.stream"

_BROKEN = (
    pa.ArrowException,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
)
"""What reading a cut-off or damaged stream may raise."""

STAGES = (
    "queue",
    "read",
    "decode",
    "forward",
    "encode",
    "send_blocked",
)
"""Stages whose seconds a batch may report."""

WIRE_DTYPES: Mapping[str, type[np.generic]] = MappingProxyType(
    {"float32": np.float32, "float16": np.float16}
)
"""NumPy dtype in which each encoding travels."""

_ROW_FIELDS = (
    pa.field("index", pa.int32(), nullable=False),
    pa.field("key", pa.utf8(), nullable=False),
    pa.field("label", pa.int64()),
    pa.field("meta", pa.utf8()),
    pa.field("error", pa.utf8()),
)
_PLACE_FIELDS = (
    pa.field("offset", pa.int64(), nullable=False),
    pa.field("length", pa.int64(), nullable=False),
)


@dataclass(frozen=True)
class Row:
    """One sample's row, without its features.

    ``error`` is set for samples that fail the same way each time (an
    undecodable image, a per-sample limit); what might succeed when
    repeated aborts the stream instead.  ``offset`` and ``length`` are
    used by index streams only.
    """

    index: int
    key: str
    label: int | None = None
    meta: str | None = None
    error: str | None = None
    offset: int = 0
    length: int = 0


@dataclass(frozen=True)
class Summary:
    """What the closing zero-row batch says of the whole stream.

    Attributes:
        rows: all rows, those with an error included.
        errors: rows with an error.
        source_etag: ETag of the object that was read.
        source_bytes: bytes of it that were read.
        saturated: features clipped to the encoding's largest value.
    """

    rows: int
    errors: int
    source_etag: str
    source_bytes: int
    saturated: int = 0


@dataclass(frozen=True)
class FeatureBatch:
    """Rows as read; all arrays are the reader's own copies.

    Attributes:
        rows: all rows of the batch, in shard order.
        features: ``[good rows, *shape]`` in the wire dtype, for the rows
            without an error, in order; None in an index stream.
        timings: seconds per stage of this request.
    """

    rows: tuple[Row, ...]
    features: npt.NDArray[Any] | None
    timings: Mapping[str, float]

    @property
    def good_rows(self) -> list[Row]:
        return [row for row in self.rows if row.error is None]


def feature_schema(shape: Sequence[int], encoding: str) -> pa.Schema:
    """Schema of a stream of features.

    Args:
        shape: of one sample's features, without the batch dimension.
        encoding: a key of :data:`WIRE_DTYPES`.
    """
    value_type = pa.from_numpy_dtype(WIRE_DTYPES[encoding])
    tensor = pa.fixed_shape_tensor(value_type, list(shape))
    return pa.schema(
        [*_ROW_FIELDS, pa.field("features", tensor)],
        metadata=_stream_metadata(encoding=encoding),
    )


def index_schema() -> pa.Schema:
    """Schema of a stream of index rows, without features."""
    return pa.schema(
        [*_ROW_FIELDS, *_PLACE_FIELDS], metadata=_stream_metadata()
    )


def _stream_metadata(**facts: str) -> dict[bytes, bytes]:
    return {
        METADATA_STREAM: json.dumps({"version": API_VERSION, **facts}).encode()
    }


class FeatureStreamWriter:
    """Writes one feature stream, or one index stream, to a binary sink.

    Args:
        sink: anything with ``write(bytes-like)``; each call gives whole
            Arrow messages' pieces, never empty.
        schema: of :func:`feature_schema` or :func:`index_schema`.
    """

    def __init__(self, sink: Any, schema: pa.Schema) -> None:
        self._schema = schema
        self._has_features = "features" in schema.names
        self._writer = pa.ipc.new_stream(_Sink(sink), schema)
        self.num_rows = 0
        self.num_errors = 0

    def write(
        self,
        rows: Sequence[Row],
        features: npt.NDArray[Any] | None = None,
        timings: Mapping[str, float] | None = None,
    ) -> None:
        """Writes one batch.

        Args:
            rows: in shard order, errors included; at least one.
            features: ``[rows without error, *shape]`` in the wire dtype,
                C-contiguous; None in an index stream.
            timings: seconds per stage.

        Raises:
            ValueError: when rows and features do not go together.
        """
        columns = _row_columns(rows)
        if self._has_features:
            columns.append(self._feature_column(rows, features))
        else:
            columns += [
                pa.array([row.offset for row in rows], pa.int64()),
                pa.array([row.length for row in rows], pa.int64()),
            ]
        batch = pa.record_batch(columns, schema=self._schema)
        self._writer.write_batch(
            batch, custom_metadata=_json_metadata(METADATA_TIMINGS, timings)
        )
        self.num_rows += len(rows)
        self.num_errors += sum(row.error is not None for row in rows)

    def close(
        self, *, source_etag: str, source_bytes: int, saturated: int = 0
    ) -> Summary:
        """Writes the closing batch and the end of the stream."""
        summary = Summary(
            rows=self.num_rows,
            errors=self.num_errors,
            source_etag=source_etag,
            source_bytes=source_bytes,
            saturated=saturated,
        )
        empty = pa.record_batch(
            [pa.array([], field.type) for field in _storage(self._schema)],
            schema=_storage_schema(self._schema),
        ).cast(self._schema)
        self._writer.write_batch(
            empty,
            custom_metadata=_json_metadata(METADATA_SUMMARY, vars(summary)),
        )
        self._writer.close()
        return summary

    def _feature_column(
        self, rows: Sequence[Row], features: npt.NDArray[Any] | None
    ) -> pa.ExtensionArray:
        tensor = self._schema.field("features").type
        good = np.array([row.error is None for row in rows])
        num_good = int(good.sum())
        shape = (num_good, *tensor.shape)
        if features is None:
            features = np.empty(shape, tensor.value_type.to_pandas_dtype())
        if features.shape != shape:
            raise ValueError(
                f"features of shape {features.shape}; these rows need {shape}"
            )
        width = math.prod(tensor.shape)
        values = pa.array(np.ascontiguousarray(features).reshape(-1))
        if num_good != len(rows):
            spread = np.zeros((len(rows), width), features.dtype)
            spread[good] = features.reshape(num_good, width)
            values = pa.array(spread.reshape(-1))
        storage = pa.FixedSizeListArray.from_arrays(
            values, width, mask=None if num_good == len(rows) else _mask(good)
        )
        return pa.ExtensionArray.from_storage(tensor, storage)


def _mask(good: npt.NDArray[np.bool_]) -> pa.Array:
    return pa.array(~good)


def _storage(schema: pa.Schema) -> list[pa.Field]:
    return [
        field.with_type(field.type.storage_type)
        if isinstance(field.type, pa.BaseExtensionType)
        else field
        for field in schema
    ]


def _storage_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema(_storage(schema), metadata=schema.metadata)


def _row_columns(rows: Sequence[Row]) -> list[pa.Array]:
    return [
        pa.array([row.index for row in rows], pa.int32()),
        pa.array([row.key for row in rows], pa.utf8()),
        pa.array([row.label for row in rows], pa.int64()),
        pa.array([row.meta for row in rows], pa.utf8()),
        pa.array([row.error for row in rows], pa.utf8()),
    ]


def _json_metadata(key: bytes, value: Any) -> dict[bytes, bytes] | None:
    return None if value is None else {key: json.dumps(value).encode()}


class _Sink:
    """The part of a file that Arrow's writer needs."""

    closed = False

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self._position = 0

    def write(self, data: Any) -> int:
        piece = bytes(data)
        if piece:
            self._sink.write(piece)
            self._position += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """Arrow calls it; pieces are handed on at once."""

    def close(self) -> None:
        """Arrow calls it; the sink belongs to the caller."""


class FeatureStreamReader:
    """Iterates over the batches of a stream; then ``summary`` is set.

    Args:
        stream: bytes, or a binary file.

    Raises:
        TruncatedStreamError: while iterating, when the stream ends
            without its closing batch or is not such a stream.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.summary: Summary | None = None
        self.schema: pa.Schema | None = None
        self.num_rows = 0

    def __iter__(self) -> Iterator[FeatureBatch]:
        try:
            with pa.ipc.open_stream(self._stream) as reader:
                self.schema = reader.schema
                yield from self._batches(reader)
        except _BROKEN as error:
            raise self._truncated(str(error)) from error
        if self.summary is None:
            raise self._truncated("it ended without its closing batch")
        if self.summary.rows != self.num_rows:
            raise self._truncated(
                f"it says {self.summary.rows} rows and had {self.num_rows}"
            )

    def _batches(self, reader: Any) -> Iterator[FeatureBatch]:
        while self.summary is None:
            try:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                return
            facts = dict(metadata or {})
            if METADATA_SUMMARY in facts:
                self.summary = Summary(**json.loads(facts[METADATA_SUMMARY]))
                return
            self.num_rows += batch.num_rows
            yield _read_batch(batch, facts.get(METADATA_TIMINGS))

    def _truncated(self, why: str) -> TruncatedStreamError:
        return TruncatedStreamError(
            "truncated",
            f"the feature stream broke off after {self.num_rows} rows: {why}",
            details={"rows": self.num_rows},
        )


def read_features(stream: Any) -> FeatureStreamReader:
    """A reader over ``stream``; see :class:`FeatureStreamReader`."""
    return FeatureStreamReader(stream)


def _read_batch(batch: Any, timings: bytes | None) -> FeatureBatch:
    columns = {
        name: batch.column(name).to_pylist()
        for name in batch.schema.names
        if name != "features"
    }
    rows = tuple(
        Row(**dict(zip(columns, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    )
    features = None
    if "features" in batch.schema.names:
        features = _read_tensor(batch.column("features"))
    return FeatureBatch(
        rows=rows,
        features=features,
        timings=json.loads(timings) if timings else {},
    )


def _read_tensor(column: Any) -> npt.NDArray[Any]:
    # Copied: a tail's in-place ReLU would write into Arrow's memory.
    shape = tuple(column.type.shape)
    values = column.drop_null().storage.flatten()
    flat: npt.NDArray[Any] = np.array(
        values.to_numpy(zero_copy_only=False), copy=True
    )
    return flat.reshape((-1, *shape))
