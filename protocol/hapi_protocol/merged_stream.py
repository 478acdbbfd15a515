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
from collections.abc import Sequence
from dataclasses import asdict, replace

from hapi_protocol.summary import Summary
from hapi_protocol.tee_stream import bad_stream

SUMMARY_BYTES = 1024
"""Length of a padded summary: it has nine numbers of at most 20 digits, an
ETag and their names, about half."""

_SUMMARY_START = b'{"rows": '


def padded(summary: Summary) -> bytes:
    """The text of a summary, as long as that of any other."""
    text = json.dumps(asdict(summary)).encode()
    assert len(text) <= SUMMARY_BYTES, "it has a few numbers only"
    return text.ljust(SUMMARY_BYTES)


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
        name: sum(getattr(summary, name) for summary in summaries)
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
