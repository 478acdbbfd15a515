"""Reads feature streams (Arrow IPC) and checks them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hapi_protocol.errors import TruncatedStreamError
from hapi_protocol.feature_stream import (
    ARRAYS,
    METADATA_SUMMARY,
    METADATA_TIMINGS,
    SCALES,
    FeatureBatch,
    Row,
)
from hapi_protocol.json_messages import read_amount
from hapi_protocol.summary import Summary

_BROKEN = (
    pa.ArrowException,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Exceptions that reading a truncated or damaged stream may raise."""


class FeatureStreamReader:
    """Iterates over the batches of a stream.

    Args:
        stream: bytes, or a binary file.

    Attributes:
        summary: the stream's summary; set when the iteration has ended.
        schema: the stream's schema; set when the iteration has started.
        num_rows: number of rows read so far.

    Raises:
        TruncatedStreamError: while iterating, if the stream ends without its
            closing batch or is not a feature stream.
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
            raise self._truncated(f"its summary has {self.summary.rows} rows")

    def _batches(self, reader: Any) -> Iterator[FeatureBatch]:
        while self.summary is None:
            try:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                return
            # Changed bytes would end the process, and changed offsets would be
            # followed out of the buffers.
            batch.validate(full=True)
            facts = dict(metadata or {})
            if METADATA_SUMMARY in facts:
                self.summary = Summary.from_json(facts[METADATA_SUMMARY])
                return
            self.num_rows += batch.num_rows
            yield _read_batch(batch, facts.get(METADATA_TIMINGS))

    def _truncated(self, reason: str) -> TruncatedStreamError:
        return TruncatedStreamError(
            "truncated",
            f"the feature stream broke off after {self.num_rows} rows: "
            f"{reason}",
            details={"rows": self.num_rows},
        )


def read_features(stream: Any) -> FeatureStreamReader:
    """Returns a :class:`FeatureStreamReader` of ``stream``."""
    return FeatureStreamReader(stream)


def _read_batch(batch: Any, timings: bytes | None) -> FeatureBatch:
    columns = {
        name: batch.column(name).to_pylist()
        for name in batch.schema.names
        if name not in ARRAYS
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
            for column in (batch.column(name) for name in SCALES)
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
    return {stage: read_amount(value) for stage, value in timings.items()}


def _read_lists(column: Any, shape: Sequence[int]) -> npt.NDArray[Any]:
    # A copy, because a tail's in-place ReLU would write into Arrow's memory.
    good = column.drop_null()
    flat: npt.NDArray[Any] = np.array(
        good.flatten().to_numpy(zero_copy_only=False), copy=True
    )
    return flat.reshape((len(good), *shape))
