"""The stored bytes of a span: a range of a shard, or objects one by one."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from typing import Any

from hapi_client.swift.connection import Connection
from hapi_protocol.data_index import Span
from hapi_protocol.headers import ByteRange
from hapi_protocol.sample_checks import check_samples, damaged_error
from hapi_protocol.shards import Sample, iter_samples

_MD5 = re.compile("[0-9a-f]{32}")


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
        _check_md5(f"{span.container}/{row.key}", content, str(row.etag))
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


def _check_md5(name: str, data: bytes, etag: str) -> None:
    """Compares an object with its ETag, which is no MD5 of a large object.

    Swift compares whole objects too, but only its log and its quarantine
    show the result.

    Raises:
        UnavailableError: ``source_damaged``.
    """
    if _MD5.fullmatch(etag):
        found = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if found != etag:
            raise damaged_error(name, f"its MD5 is {found}, not {etag}")
