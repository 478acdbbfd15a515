"""Compares objects with their ETag, and samples with their index.

A read of a range never reaches the end of the object, so that neither Swift
nor the caller can compare it with the ETag.  The index therefore has a CRC-32
of each sample.  It finds damage by disks and software, not a forger.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from hapi_protocol.errors import HapiError, UnavailableError, UnsupportedError
from hapi_protocol.samples import Sample

RETRY_SECONDS = 1.0
"""Soon, since another replica is read.  Chosen, not measured: Swift's proxy
picks replicas at random by default."""
_MD5 = re.compile("[0-9a-f]{32}")


def check_samples(
    samples: Iterable[Sample], crc32s: Sequence[int], name: str
) -> Iterator[Sample]:
    """Yields samples whose bytes are those of the index.

    Args:
        samples: samples as they are read from the range.
        crc32s: CRC-32 of each sample in the range, by the index; empty if
            the index has none, and nothing is compared.
        name: the shard's name, for errors.

    Raises:
        UnavailableError: ``source_damaged``, before the first sample that
            differs.  Another replica may be whole.
        UnsupportedError: as ``samples``, if nothing is compared.
    """
    if not crc32s:
        yield from samples
        return
    expected = iter(crc32s)
    try:
        for sample in samples:
            if sample.crc32 != next(expected, None):
                raise damaged_error(
                    name,
                    f"sample {sample.index} ({sample.key!r}) has the CRC-32 "
                    f"{sample.crc32:08x}, which is not that of the index",
                )
            yield sample
    except UnsupportedError as error:
        if error.code != "damaged_shard":
            raise
        raise damaged_error(name, error.message) from error
    if missing := len(list(expected)):
        raise damaged_error(name, f"{missing} samples are missing")


def etag_md5(etag: str, *, is_manifest: bool) -> str | None:
    """The MD5 of an object's bytes, if its ETag is that.

    Args:
        etag: the bare ETag.
        is_manifest: True for a large object, whose ETag is made of those of
            its segments.
    """
    return etag if _MD5.fullmatch(etag) and not is_manifest else None


def check_md5(name: str, actual: str, expected: str) -> None:
    """Compares the MD5 of an object's bytes with its ETag.

    Raises:
        UnavailableError: ``source_damaged``.
    """
    if actual != expected:
        reason = f"its bytes have the MD5 {actual}, and its ETag is {expected}"
        raise damaged_error(name, reason)


def damaged_error(name: str, reason: str) -> HapiError:
    """The error for an object whose bytes are not those that were stored."""
    return UnavailableError(
        "source_damaged",
        f"{name} is damaged: {reason}; if repeated reads of other replicas "
        "do not help, upload the object again, or have the operator restore "
        "it",
        object_name=name,
        retry_after=RETRY_SECONDS,
    )
