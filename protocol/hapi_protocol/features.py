"""The feature stream: one Arrow IPC stream of rows in shard order.

Columns ``index: int32``, ``key: utf8``, ``label: int64?``, ``meta: utf8?``,
``error: utf8?`` and ``features: fixed_shape_tensor?``, null exactly where
``error`` is set.  With uint8 features there are ``scale`` and ``zero``, of
float32 lists of fixed size, one value for each group of the sample.  Buffers
are compressed as the encoding says.  An index stream has ``offset: int64`` and
``length: int64`` in the place of ``features``.  Each batch carries this
request's seconds per stage in its ``custom_metadata``, or a batch of zero rows
behind it does, in a stream that is being kept.  The last message is a batch of
zero rows with the summary; a stream without it is truncated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hapi_protocol.encodings import Encoding, num_groups
from hapi_protocol.errors import TruncatedStreamError
from hapi_protocol.split import BOTH, CLIENT, KEPT
from hapi_protocol.summary import Load, Summary, check_amount
from hapi_protocol.versions import API_VERSION

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
    AttributeError,
    OverflowError,
)
"""What reading a cut-off or damaged stream may raise."""

CLOCK_STAGES = (
    "queue",
    "read",
    "decode",
    "forward",
    "encode",
    "send_blocked",
)
"""Stages whose seconds of the clock a batch may report."""
STAGES = (*CLOCK_STAGES, "forward_cpu", "decode_cpu", "encode_cpu")
"""All whose seconds it may report; ``_cpu``: core-seconds."""

_SCALES = ("scale", "zero")
_ARRAYS = ("features", *_SCALES)

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
class FeatureBatch:
    """Rows as read; all arrays are the reader's own copies.

    Attributes:
        rows: all rows of the batch, in shard order; none where it only
            tells timings.
        features: ``[good rows, *shape]`` in the wire dtype, for the rows
            without an error, in order; None in an index stream.
        timings: seconds per stage of this request.
        scale: ``[good rows, groups]`` float32; None unless quantised.
        zero: as ``scale``.
    """

    rows: tuple[Row, ...]
    features: npt.NDArray[Any] | None
    timings: Mapping[str, float]
    scale: npt.NDArray[np.float32] | None = None
    zero: npt.NDArray[np.float32] | None = None

    @property
    def good_rows(self) -> list[Row]:
        return [row for row in self.rows if row.error is None]


def feature_schema(shape: Sequence[int], encoding: str) -> pa.Schema:
    """Schema of a stream of features.

    Args:
        shape: of one sample's features, without the batch dimension.
        encoding: one of :data:`hapi_protocol.encodings.ENCODINGS`.

    Raises:
        AnnotationError: ``unknown_encoding``.
    """
    parsed = Encoding.parse(encoding)
    value_type = pa.from_numpy_dtype(np.dtype(parsed.wire_dtype))
    tensor = pa.fixed_shape_tensor(value_type, list(shape))
    fields = [*_ROW_FIELDS, pa.field("features", tensor)]
    if parsed.is_quantised:
        groups = pa.list_(pa.float32(), num_groups(shape))
        fields += [pa.field(name, groups) for name in _SCALES]
    return pa.schema(fields, metadata=_stream_metadata(encoding=str(parsed)))


def index_schema() -> pa.Schema:
    """Schema of a stream of index rows, without features."""
    return pa.schema(
        [*_ROW_FIELDS, *_PLACE_FIELDS], metadata=_stream_metadata()
    )


def _stream_metadata(**facts: str) -> dict[bytes, bytes]:
    return {
        METADATA_STREAM: json.dumps({"version": API_VERSION, **facts}).encode()
    }


def _write_options(schema: pa.Schema) -> pa.ipc.IpcWriteOptions:
    """With the compression that the schema's own metadata names."""
    facts = json.loads(schema.metadata[METADATA_STREAM])
    compression = Encoding.parse(facts.get("encoding", "float32")).compression
    # In the calling thread, whose processor time is measured.
    return pa.ipc.IpcWriteOptions(
        compression=None if compression == "none" else compression,
        use_threads=False,
    )


class FeatureStreamWriter:
    """Writes one feature stream, or one index stream, to a binary sink.

    Args:
        sink: anything with ``write(bytes-like)``; each call gives whole
            Arrow messages' pieces, never empty.
        schema: of :func:`feature_schema` or :func:`index_schema`.
        mark: called with the kind (:mod:`hapi_protocol.split`) of what is
            written next; then the rows are told apart from what is true of
            this one request.
    """

    def __init__(
        self,
        sink: Any,
        schema: pa.Schema,
        mark: Callable[[bytes], None] | None = None,
    ) -> None:
        self._schema = schema
        self._mark = mark
        self._has_features = "features" in schema.names
        self._has_scales = "scale" in schema.names
        self._writer = pa.ipc.new_stream(
            _Sink(sink), schema, options=_write_options(schema)
        )
        self.num_rows = 0
        self.num_errors = 0

    def write(
        self,
        rows: Sequence[Row],
        features: npt.NDArray[Any] | None = None,
        timings: Mapping[str, float] | None = None,
        *,
        scale: npt.NDArray[np.float32] | None = None,
        zero: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Writes one batch.

        Args:
            rows: in shard order, errors included; at least one.
            features: ``[rows without error, *shape]`` in the wire dtype,
                C-contiguous; None in an index stream.
            timings: seconds per stage.
            scale: ``[rows without error, groups]`` float32, for quantised
                features.
            zero: as ``scale``.

        Raises:
            ValueError: when rows and features do not go together.
        """
        columns = _row_columns(rows)
        if self._has_features:
            columns.append(self._feature_column(rows, features))
            if self._has_scales:
                columns += [
                    self._list_column(name, rows, values)
                    for name, values in zip(
                        _SCALES, (scale, zero), strict=True
                    )
                ]
        else:
            columns += [
                pa.array([row.offset for row in rows], pa.int64()),
                pa.array([row.length for row in rows], pa.int64()),
            ]
        batch = pa.record_batch(columns, schema=self._schema)
        told = _json_metadata(METADATA_TIMINGS, timings)
        if self._mark is None:
            self._writer.write_batch(batch, custom_metadata=told)
        else:
            self._mark(BOTH)
            self._writer.write_batch(batch)
            if told:
                self._mark(CLIENT)
                self._writer.write_batch(self._empty, custom_metadata=told)
        self.num_rows += len(rows)
        self.num_errors += sum(row.error is not None for row in rows)

    def close(
        self,
        *,
        source_etag: str,
        source_bytes: int,
        saturated: int = 0,
        cpu_seconds: float = 0.0,
        load: Load | None = None,
    ) -> Summary:
        """Writes the closing batch and the end of the stream.

        Args: as the attributes of :class:`Summary`.
        """
        summary = Summary(
            rows=self.num_rows,
            errors=self.num_errors,
            source_etag=source_etag,
            source_bytes=source_bytes,
            saturated=saturated,
            cpu_seconds=cpu_seconds,
            load=load,
        )
        if self._mark is not None:
            self._mark(KEPT)
            self._write_summary(replace(summary, cpu_seconds=0.0, load=None))
            self._mark(CLIENT)
        self._write_summary(summary)
        if self._mark is not None:
            self._mark(BOTH)
        self._writer.close()
        return summary

    def _write_summary(self, summary: Summary) -> None:
        self._writer.write_batch(
            self._empty,
            custom_metadata=_json_metadata(METADATA_SUMMARY, asdict(summary)),
        )

    @cached_property
    def _empty(self) -> pa.RecordBatch:
        return pa.record_batch(
            [pa.array([], field.type) for field in _storage(self._schema)],
            schema=_storage_schema(self._schema),
        ).cast(self._schema)

    def _feature_column(
        self, rows: Sequence[Row], features: npt.NDArray[Any] | None
    ) -> pa.ExtensionArray:
        tensor = self._schema.field("features").type
        storage = _lists("features", rows, features, tensor, tensor.shape)
        return pa.ExtensionArray.from_storage(tensor, storage)

    def _list_column(
        self, name: str, rows: Sequence[Row], values: npt.NDArray[Any] | None
    ) -> pa.FixedSizeListArray:
        kind = self._schema.field(name).type
        return _lists(name, rows, values, kind, (kind.list_size,))


def _lists(
    name: str,
    rows: Sequence[Row],
    values: npt.NDArray[Any] | None,
    kind: pa.DataType,
    shape: Sequence[int],
) -> pa.FixedSizeListArray:
    """A column of lists, null exactly where a row has an error."""
    good = np.array([row.error is None for row in rows])
    num_good = int(good.sum())
    wanted = (num_good, *shape)
    dtype = kind.value_type.to_pandas_dtype()
    if values is None:
        values = np.empty(wanted if num_good == 0 else (0,), dtype)
    if values.shape != wanted or values.dtype != dtype:
        raise ValueError(
            f"{name} of shape {values.shape} and {values.dtype}; these rows "
            f"need {wanted} and {np.dtype(dtype)}"
        )
    width = math.prod(shape)
    flat = np.ascontiguousarray(values).reshape(num_good, width)
    if num_good != len(rows):
        spread = np.zeros((len(rows), width), dtype)
        spread[good] = flat
        flat = spread
    return pa.FixedSizeListArray.from_arrays(
        pa.array(flat.reshape(-1)),
        width,
        mask=None if num_good == len(rows) else pa.array(~good),
    )


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
            options = pa.ipc.IpcReadOptions(use_threads=False)
            with pa.ipc.open_stream(self._stream, options=options) as reader:
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
                self.summary = Summary.from_json(facts[METADATA_SUMMARY])
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
        if name not in _ARRAYS
    }
    rows = tuple(
        Row(**dict(zip(columns, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    )
    features = scale = zero = None
    if "features" in batch.schema.names:
        column = batch.column("features")
        features = _read_lists(column.storage, column.type.shape)
    if "scale" in batch.schema.names:
        scale, zero = (
            _read_lists(column, (column.type.list_size,))
            for column in (batch.column(name) for name in _SCALES)
        )
    return FeatureBatch(
        rows=rows,
        features=features,
        timings=_read_timings(timings),
        scale=scale,
        zero=zero,
    )


def _read_timings(text: bytes | None) -> dict[str, float]:
    timings = dict(json.loads(text)) if text else {}
    for stage, seconds in timings.items():
        check_amount(seconds, stage)
    return timings


def _read_lists(column: Any, shape: Sequence[int]) -> npt.NDArray[Any]:
    # Copied: a tail's in-place ReLU would write into Arrow's memory.
    good = column.drop_null()
    flat: npt.NDArray[Any] = np.array(
        good.flatten().to_numpy(zero_copy_only=False), copy=True
    )
    return flat.reshape((len(good), *shape))
