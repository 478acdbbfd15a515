"""What the client measures before it plans: a few real samples, its device.

At most :data:`MAX_SAMPLES` samples are read and decoded; features of the
cuts worth it are written and read as they would travel, in each encoding.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.swift.connection import Connection
from hapi_protocol.data_index import MAX_SPAN_SAMPLES, Span
from hapi_protocol.headers import ByteRange
from hapi_protocol.shards import IMAGE, Medium, Sample, iter_samples
from hapi_splitter.inputs.array_transform import encode_npy
from hapi_splitter.inputs.reference_image import reference_image

logger = logging.getLogger(__name__)

MAX_SAMPLES = 16
SAMPLES_PER_SPAN = 4
"""Read from one place of the data set, as far as there are several."""
MAX_SAMPLE_BYTES = 16 * 1024 * 1024
"""Of all samples together; large ones are fewer."""
BUDGET_SECONDS = 3.0
"""Of the pass through the client's own device."""
ENCODING_SECONDS = 5.0
"""Of the cuts' encodings; no other cut begins later."""
TAR_BLOCK_BYTES = 512
REFERENCE_SAMPLES = 8
"""As many as a worker without a GPU sends in a batch."""


@dataclass(frozen=True)
class ProbeSamples:
    """A few samples as they are stored.

    Attributes:
        members: the images or arrays of those that have one.
        missing_message: error of a sample without such a member.
        bytes_each: in the shards, of the average sample of the data set.
        span_samples: that one request brings, on average.
    """

    members: tuple[bytes, ...]
    bytes_each: float
    span_samples: float = MAX_SPAN_SAMPLES
    missing_message: str = ""


def read_samples(
    connection: Connection,
    container: str,
    spans: Sequence[Span],
    *,
    medium: Medium = IMAGE,
    seconds: float | None = None,
    max_bytes: float = MAX_SAMPLE_BYTES,
) -> ProbeSamples:
    """Reads a few samples from all over the data set, by Range GETs.

    Images differ, and neighbours are often alike: so a few come from each
    of several spans. How many bytes the average sample has is known of all,
    from the index.

    Args:
        connection: to the account.
        container: of the shards.
        spans: of the data set.
        medium: how samples are stored.
        seconds: for each read; None for the connection's own limit.
        most_bytes: to read, but one sample in any case.

    Raises:
        HapiError: of a read.
    """
    num_samples = sum(len(span.rows) for span in spans)
    num_bytes = sum(span.byte_range.length_bytes for span in spans)
    max_bytes = min(max_bytes, MAX_SAMPLE_BYTES)
    worth = max_bytes * num_samples / (num_bytes * SAMPLES_PER_SPAN)
    places = max(
        1, min(MAX_SAMPLES // SAMPLES_PER_SPAN, len(spans), int(worth))
    )
    found: list[Sample] = []
    for place in range(places):
        span = spans[(2 * place + 1) * len(spans) // (2 * places)]
        found += _read_some(
            connection,
            container,
            span,
            MAX_SAMPLES // places,
            max_bytes / places,
            seconds,
        )
    members = [sample.member(medium) for sample in found]
    lacks = [
        sample.missing_message(medium)
        for sample, data in zip(found, members, strict=True)
        if data is None
    ]
    return ProbeSamples(
        tuple(data for data in members if data is not None),
        num_bytes / num_samples,
        num_samples / len(spans),
        *lacks[:1],
    )


def _read_some(
    connection: Connection,
    container: str,
    span: Span,
    max_samples: int,
    max_bytes: float,
    seconds: float | None,
) -> Iterator[Sample]:
    """The first samples of a span, at least one."""
    rows = [span.rows[0]]
    for row in span.rows[1:max_samples]:
        if row.offset + row.length - rows[0].offset > max_bytes:
            break
        rows.append(row)
    part = ByteRange(rows[0].offset, rows[-1].offset + rows[-1].length - 1)
    data = connection.get_range(
        container, span.shard, part, if_match=span.etag, seconds=seconds
    )
    return iter_samples(
        io.BytesIO(data),
        name=f"{container}/{span.shard}",
        first_index=rows[0].sample,
        first_offset=rows[0].offset,
    )


def reference_samples(region: FrozenRegion) -> ProbeSamples:
    """Samples made here, where there is no data set to measure.

    Pictures, or arrays of random numbers.
    """
    if region.transform.medium is IMAGE:
        made = tuple(map(reference_image, range(REFERENCE_SAMPLES)))
    else:
        arrays = region.device_graph.examples(REFERENCE_SAMPLES)
        made = tuple(map(encode_npy, arrays.numpy()))
    blocks = -(-len(made[0]) // TAR_BLOCK_BYTES)
    stored = (blocks + 3) * TAR_BLOCK_BYTES  # two headers, and a label
    return ProbeSamples(made, stored)
