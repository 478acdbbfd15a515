"""Schema of the feature stream: an Arrow IPC stream of rows in shard order.

Columns ``index: int32``, ``key: utf8``, ``label: int64?``, ``meta: utf8?``,
``error: utf8?`` and ``features: fixed_shape_tensor?``, which is null exactly
if ``error`` is set.  uint8 features have ``scale`` and ``zero``: float32 lists
of fixed size, one value per group of the sample.  Buffers are compressed as
the encoding says.  An index stream has ``offset: int64``, ``length: int64``,
``cls: utf8?`` and ``crc32: uint32`` instead of ``features``.  Each batch has
this request's seconds per stage in its ``custom_metadata``; in a stream that
is being cached, a batch of zero rows after it has them.  The last message is a
batch of zero rows with the summary; a stream without it is truncated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hapi_protocol.encodings import Encoding, num_groups
from hapi_protocol.versions import API_VERSION

CLOCK_STAGES = (
    "queue",
    "read",
    "decode",
    "forward",
    "encode",
    "send_blocked",
)
"""Stages whose wall seconds a batch may report."""

METADATA_TIMINGS = b"hapi.timings"
METADATA_SUMMARY = b"hapi.summary"
METADATA_STREAM = b"hapi.stream"
STAGES = (*CLOCK_STAGES, "forward_cpu", "decode_cpu", "encode_cpu")
"""All stages whose seconds a batch may report; ``_cpu``: core-seconds."""

SCALES = ("scale", "zero")
ARRAYS = ("features", *SCALES)

_ROW_FIELDS = (
    pa.field("index", pa.int32(), nullable=False),
    pa.field("key", pa.utf8(), nullable=False),
    pa.field("label", pa.int64()),
    pa.field("meta", pa.utf8()),
    pa.field("error", pa.utf8()),
)
_OFFSET_FIELDS = (
    pa.field("offset", pa.int64(), nullable=False),
    pa.field("length", pa.int64(), nullable=False),
    pa.field("cls", pa.utf8()),
    pa.field("crc32", pa.uint32(), nullable=False),
)


@dataclass(frozen=True)
class Row:
    """One sample's row, without its features.

    Attributes:
        index: zero-based position in the shard.
        key: the sample's key.
        label: integer label, if it has one.
        meta: the sample's JSON metadata, if it has any.
        error: error of a sample that fails the same way each time (an
            undecodable image, a per-sample limit).  A failure that a retry
            may cure aborts the stream instead.  In an index stream: the
            sample has several images.
        offset: first byte in the shard; index streams only.
        length: length in bytes; index streams only.
        cls: text of the ``.cls`` member, if it has one; index streams only.
        crc32: see :class:`hapi_protocol.samples.Sample`; index streams only.
    """

    index: int
    key: str
    label: int | None = None
    meta: str | None = None
    error: str | None = None
    offset: int = 0
    length: int = 0
    cls: str | None = None
    crc32: int = 0


@dataclass(frozen=True)
class FeatureBatch:
    """One batch of a stream; its arrays are copies.

    Attributes:
        rows: all rows of the batch, in shard order; empty if the batch only
            reports timings.
        features: ``[good rows, *shape]`` in the wire dtype, for the rows
            without an error, in order; None in an index stream.
        timings: seconds per stage of this request.
        scale: ``[good rows, groups]`` float32; None unless quantised.
        zero: ``[good rows, groups]`` float32; None unless quantised.
    """

    rows: tuple[Row, ...]
    features: npt.NDArray[Any] | None
    timings: Mapping[str, float]
    scale: npt.NDArray[np.float32] | None = None
    zero: npt.NDArray[np.float32] | None = None


def feature_schema(shape: Sequence[int], encoding: str) -> pa.Schema:
    """Schema of a stream of features.

    Args:
        shape: shape of one sample's features, without the batch dimension.
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
        fields += [pa.field(name, groups) for name in SCALES]
    return pa.schema(fields, metadata=_stream_metadata(encoding=str(parsed)))


def index_schema() -> pa.Schema:
    """Schema of a stream of index rows, without features."""
    return pa.schema(
        [*_ROW_FIELDS, *_OFFSET_FIELDS], metadata=_stream_metadata()
    )


def _stream_metadata(**facts: str) -> dict[bytes, bytes]:
    return {
        METADATA_STREAM: json.dumps({"version": API_VERSION, **facts}).encode()
    }
