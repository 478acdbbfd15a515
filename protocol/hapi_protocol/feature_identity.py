"""Identity of computed features: their ETag, and their key in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hapi_protocol.headers import ByteRange, SampleRange, format_crc32s


def feature_etag(
    *,
    source_etag: str,
    model_digest: str,
    cut: int,
    transform: str,
    encoding: str,
    samples: SampleRange | None,
    numerics_tag: str,
    span_samples: int = 0,
) -> str:
    """The weak ETag of a feature stream (RFC 9110, 8.8.3).

    It is weak because streams with equal rows may differ in their batches
    and timings.
    """
    parts: tuple[str, ...] = (
        source_etag,
        model_digest,
        str(cut),
        transform,
        encoding,
        str(samples or ""),
        numerics_tag,
    )
    if span_samples:
        parts += (str(span_samples),)
    # With length prefixes, different tuples never join to the same string.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return f'W/"{hashlib.sha256(text.encode()).hexdigest()}"'


def cache_key(
    etag: str, byte_range: ByteRange | None, crc32s: Sequence[int] = ()
) -> str:
    """The key of a feature cache entry among those of one source object.

    Args:
        etag: the feature ETag, see :func:`feature_etag`.
        byte_range: the bytes of the source that are read; None for all.
        crc32s: checksums that the samples were compared with; features of
            bytes that nobody has checked have other keys.

    Returns:
        64 hexadecimal digits.
    """
    text = f"{etag} {byte_range or ''}"
    if crc32s:
        text += f" {format_crc32s(crc32s)}"
    return hashlib.sha256(text.encode()).hexdigest()
