"""Writes feature streams and index streams (Arrow IPC)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hapi_protocol.encodings import Encoding
from hapi_protocol.feature_stream import (
    ARRAYS,
    METADATA_STREAM,
    METADATA_SUMMARY,
    METADATA_TIMINGS,
    Row,
)
from hapi_protocol.merged_stream import padded
from hapi_protocol.summary import Summary, WorkerLoad
from hapi_protocol.tee_stream import BOTH, CACHE, CLIENT


def _write_options(schema: pa.Schema) -> pa.ipc.IpcWriteOptions:
    """Arrow options with the compression named in the schema's metadata."""
    facts = json.loads(schema.metadata[METADATA_STREAM])
    compression = Encoding.parse(facts.get("encoding", "float32")).compression
    # No Arrow threads: the CPU time of the calling thread is measured.
    return pa.ipc.IpcWriteOptions(
        compression=None if compression == "none" else compression,
        use_threads=False,
    )


class FeatureStreamWriter:
    """Writes one feature stream, or one index stream, to a binary sink.

    Args:
        sink: anything with ``write(bytes-like)``; it never gets empty data.
        schema: result of :func:`feature_schema` or :func:`index_schema`.
        mark: called with the kind (:mod:`hapi_protocol.tee_stream`) of the
            bytes written next.  It separates rows, which may be cached, from
            facts about this one request.
        is_merged: the schema comes alone and summaries are padded, as
            :mod:`hapi_protocol.merged_stream` needs it.
    """

    def __init__(
        self,
        sink: Any,
        schema: pa.Schema,
        mark: Callable[[bytes], None] | None = None,
        *,
        is_merged: bool = False,
    ) -> None:
        self._schema = schema
        self._is_merged = is_merged
        self._mark = mark
        self._writer = pa.ipc.new_stream(
            _Sink(sink), schema, options=_write_options(schema)
        )
        self.num_rows = 0
        self.num_errors = 0
        if is_merged:
            # Arrow writes the schema with the first batch.
            self._writer.write_batch(self._empty)

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
            rows: at least one, in shard order, including rows with errors.
            features: ``[rows without error, *shape]`` in the wire dtype,
                C-contiguous; None in an index stream.
            timings: seconds per stage.
            scale: ``[rows without error, groups]`` float32, for quantised
                features.
            zero: ``[rows without error, groups]`` float32, for quantised
                features.

        Raises:
            ValueError: rows and features do not match.
        """
        arrays = {"features": features, "scale": scale, "zero": zero}
        batch = self._batch(rows, arrays)
        metadata = _json_metadata(METADATA_TIMINGS, timings)
        if self._mark is None:
            self._writer.write_batch(batch, custom_metadata=metadata)
        else:
            self._mark(BOTH)
            self._writer.write_batch(batch)
            if metadata:
                self._mark(CLIENT)
                self._writer.write_batch(self._empty, custom_metadata=metadata)
        self.num_rows += len(rows)
        self.num_errors += sum(row.error is not None for row in rows)

    def close(
        self,
        *,
        source_etag: str,
        source_bytes: int,
        saturated: int = 0,
        cpu_seconds: float = 0.0,
        load: WorkerLoad | None = None,
    ) -> Summary:
        """Writes the closing batch and the end of the stream.

        Args:
            source_etag: see :class:`Summary` for this and all others.
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
            self._mark(CACHE)
            self._write_summary(replace(summary, cpu_seconds=0.0, load=None))
            self._mark(CLIENT)
        self._write_summary(summary)
        if self._mark is not None:
            self._mark(BOTH)
        self._writer.close()
        return summary

    def _write_summary(self, summary: Summary) -> None:
        metadata = (
            {METADATA_SUMMARY: padded(summary)}
            if self._is_merged
            else _json_metadata(METADATA_SUMMARY, asdict(summary))
        )
        self._writer.write_batch(self._empty, custom_metadata=metadata)

    def _batch(
        self,
        rows: Sequence[Row],
        arrays: Mapping[str, npt.NDArray[Any] | None],
    ) -> pa.RecordBatch:
        columns = [
            self._array_column(field, rows, arrays[field.name])
            if field.name in arrays
            else pa.array([getattr(r, field.name) for r in rows], field.type)
            for field in self._schema
        ]
        return pa.record_batch(columns, schema=self._schema)

    @cached_property
    def _empty(self) -> pa.RecordBatch:
        return self._batch((), dict.fromkeys(ARRAYS))

    @staticmethod
    def _array_column(
        field: pa.Field, rows: Sequence[Row], values: npt.NDArray[Any] | None
    ) -> pa.Array:
        kind = field.type
        if not isinstance(kind, pa.BaseExtensionType):
            return _lists(field.name, rows, values, kind, (kind.list_size,))
        storage = _lists(field.name, rows, values, kind, kind.shape)
        return pa.ExtensionArray.from_storage(kind, storage)


def _lists(
    name: str,
    rows: Sequence[Row],
    values: npt.NDArray[Any] | None,
    kind: pa.DataType,
    shape: Sequence[int],
) -> pa.FixedSizeListArray:
    """A column of lists; null exactly for rows with an error."""
    good = np.array([row.error is None for row in rows])
    num_good = int(good.sum())
    expected = (num_good, *shape)
    # Not to_pandas_dtype, for which pyarrow before 26 imports pandas.
    dtype = pa.array([], kind.value_type).to_numpy(zero_copy_only=False).dtype
    if values is None:
        values = np.empty(expected if num_good == 0 else (0,), dtype)
    if values.shape != expected or values.dtype != dtype:
        raise ValueError(
            f"{name} has shape {values.shape} and type {values.dtype}; these "
            f"rows need {expected} and {dtype}"
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
        """Does nothing: data is never buffered."""

    def close(self) -> None:
        """Does nothing: the sink belongs to the caller."""
