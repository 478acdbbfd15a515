"""The stored bytes of a span: a range of a shard, or objects one by one."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from hapi_client.swift.connection import Connection
from hapi_protocol.data_index import Span
from hapi_protocol.headers import ByteRange
from hapi_protocol.shards import Sample, iter_samples


def read_span(
    connection: Connection,
    span: Span,
    *,
    max_bytes: float | None = None,
    **options: Any,
) -> bytes:
    """Reads a span.

    Args:
        connection: connection to the account.
        span: the span.
        max_bytes: bytes to read from its beginning, at least one; None for
            all.
        options: of :meth:`Connection.get_range`.

    Raises:
        HapiError: as :meth:`Connection.get_range`.
    """
    pieces = []
    left = span.byte_range.length_bytes
    if max_bytes is not None:
        left = max(1, min(left, int(max_bytes)))
    for name, etag, whole in _parts(span):
        length = min(left, whole.length_bytes)
        pieces.append(
            connection.get_range(
                span.container,
                name,
                ByteRange(whole.first, whole.first + length - 1),
                if_match=etag,
                **options,
            )
        )
        left -= length
        if not left:
            break
    return b"".join(pieces)


def _parts(span: Span) -> list[tuple[str, str, ByteRange]]:
    if not span.is_group:
        return [(span.shard, span.etag, span.byte_range)]
    return [
        (row.key, str(row.etag), ByteRange(0, row.length - 1))
        for row in span.rows
    ]


def span_samples(span: Span, data: bytes) -> Sequence[Sample]:
    """The samples of a span, from all its bytes.

    Raises:
        UnsupportedError: they are no tar members.
    """
    first = span.rows[0]
    if not span.is_group:
        return list(
            iter_samples(
                io.BytesIO(data),
                name=span.path,
                first_index=first.sample,
                first_offset=first.offset,
            )
        )
    samples = []
    for row in span.rows:
        start = row.offset - first.offset
        extension = row.key.rpartition("/")[2].partition(".")[2]
        samples.append(
            Sample(
                row.sample,
                row.key,
                row.offset,
                row.length,
                {extension: data[start : start + row.length]},
            )
        )
    return samples
