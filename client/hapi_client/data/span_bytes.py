"""The stored bytes of a span: a range of a shard, or objects one by one."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from hapi_client.swift.connection import Connection
from hapi_protocol.data_index import Span
from hapi_protocol.headers import ByteRange
from hapi_protocol.sample_checks import check_samples
from hapi_protocol.samples import Sample
from hapi_protocol.shards import iter_samples


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
        options: options of :meth:`Connection.get_range`.

    Raises:
        HapiError: as :meth:`Connection.get_range`.
    """
    whole = span.byte_range
    left = whole.length_bytes
    if max_bytes is not None:
        left = max(1, min(left, int(max_bytes)))
    if not span.is_group:
        part = ByteRange(whole.first, whole.first + left - 1)
        return connection.get_range(
            span.container, span.shard, part, if_match=span.etag, **options
        )
    data = bytearray()
    for row in span.rows:
        # Whole objects, because these are compared with their ETag.
        data += connection.get_object(
            span.container, row.key, if_match=row.etag, **options
        )
        if len(data) >= left:
            break
    return bytes(data[:left])


def span_samples(span: Span, data: bytes) -> Sequence[Sample]:
    """The samples of a span, from all its bytes.

    Raises:
        UnavailableError: ``source_damaged``: they are not those of the index.
        UnsupportedError: they are no tar members.
    """
    first = span.rows[0]
    if not span.is_group:
        read = iter_samples(
            io.BytesIO(data),
            name=span.path,
            first_index=first.sample,
            first_offset=first.offset,
        )
        return list(check_samples(read, span.crc32s, span.path))
    samples = []
    for row in span.rows:
        start = row.offset - first.offset
        extension = row.key.rpartition("/")[2].partition(".")[2]
        content = data[start : start + row.length]
        samples.append(
            Sample(
                row.sample,
                row.key,
                row.offset,
                row.length,
                {extension: content},
            )
        )
    return samples
