"""Streams of several jobs, merged into one feature stream.

The rows of a job with ``request_objects`` come in frames of the tee stream
(:mod:`hapi_protocol.tee_stream`), each whole:

1. ``BOTH`` with the schema and a batch of zero rows, then one ``BOTH`` for
   each row, and one with the end of the Arrow stream;
2. ``CLIENT`` with timings, between them;
3. ``CACHE``, which is dropped, and behind it ``CLIENT`` with the summary,
   whose text is padded with spaces: another summary fits into its place;
4. ``END``.

So streams of one schema are merged without reading Arrow.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace

from hapi_protocol.errors import InternalError
from hapi_protocol.summary import Summary
from hapi_protocol.tee_stream import KINDS

SUMMARY_BYTES = 1024
"""Length of a padded summary."""

_HEADER = struct.Struct(">cI")
_SUMMARY_START = b'{"rows": '


def padded(summary: Summary) -> bytes:
    """The text of a summary, as long as that of any other."""
    text = json.dumps(asdict(summary)).encode()
    assert len(text) <= SUMMARY_BYTES, "it has a few numbers only"
    return text.ljust(SUMMARY_BYTES)


def whole_frames(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yields kind and data of each frame of a tee stream.

    Raises:
        InternalError: it is not a tee stream, or ends within a frame.
    """
    waiting = bytearray()
    for chunk in chunks:
        waiting += chunk
        while len(waiting) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(waiting)
            if kind not in KINDS:
                raise bad_stream(f"a frame of kind {kind!r}")
            end = _HEADER.size + length
            if len(waiting) < end:
                break
            yield kind, bytes(waiting[_HEADER.size : end])
            del waiting[:end]
    if waiting:
        raise bad_stream("it ends within a frame")


def merge_summaries(messages: Sequence[bytes]) -> bytes:
    """The message with the sum of summaries.

    Args:
        messages: Arrow messages, each with a padded summary; at least one.

    Returns:
        The first message, with the sums; the load is that of its worker.

    Raises:
        InternalError: a message has no such summary.
    """
    summaries = []
    for message in messages:
        start = message.find(_SUMMARY_START)
        text = message[start : start + SUMMARY_BYTES]
        if start < 0 or len(text) != SUMMARY_BYTES:
            raise bad_stream("a message without a padded summary")
        try:
            summaries.append(Summary.from_json(text))
        except ValueError as error:
            raise bad_stream(f"its summary: {error}") from error
    sums = {
        name: sum(getattr(each, name) for each in summaries)
        for name in (
            "rows",
            "errors",
            "source_bytes",
            "saturated",
            "cpu_seconds",
        )
    }
    first = messages[0]
    start = first.find(_SUMMARY_START)
    merged = padded(replace(summaries[0], **sums))
    return first[:start] + merged + first[start + SUMMARY_BYTES :]


def bad_stream(reason: str) -> InternalError:
    """The error for a stream that cannot be merged."""
    return InternalError("internal", f"the worker's tee stream: {reason}")
