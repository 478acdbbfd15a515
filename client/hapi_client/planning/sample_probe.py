"""Reads a few samples of the data set, for the client's measurement."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from hapi_client.data.span_bytes import read_span, span_samples
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.swift.connection import Connection
from hapi_protocol.data_index import MAX_SPAN_SAMPLES, Span
from hapi_protocol.samples import IMAGE, Medium, Sample, SampleError
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.reference_image import reference_image

logger = logging.getLogger(__name__)

# Chosen: if costs of samples vary by their mean, the mean of 16 is known to a
# quarter, and windows correct the rest.  More would stop the training loop for
# longer.
MAX_SAMPLES = 16
"""Number of samples to read."""
# Several places, because neighbours are alike; and several neighbours, which
# are encoded together as in a stream.  When a batch had samples of all places,
# copies of an image compressed one another, and a plan took features for half
# of their size.
SAMPLES_PER_SPAN = 4
"""Samples to read from one place of the data set."""
# 16 samples of 1 MiB; of larger ones, fewer are read.
MAX_SAMPLE_BYTES = 16 * 1024 * 1024
"""Bytes of all samples together."""
# The training loop stops for it: a twentieth of MIN_MEASURED_SECONDS, which a
# job has left at least.
BUDGET_SECONDS = 3.0
"""Time to profile the client's device."""
# The training loop stops for it too.  Cuts are encoded by size, so that only
# the largest are left out, which a plan would hardly take.
ENCODING_SECONDS = 5.0
"""Time after which no further cut's features are encoded."""
TAR_BLOCK_BYTES = 512
"""Size of a tar's header, and unit of its members (POSIX ustar)."""
REFERENCE_SAMPLES = 8
"""Batch size of a worker without a GPU."""


@dataclass(frozen=True)
class ProbeSamples:
    """A few samples as they are stored.

    Attributes:
        members: bytes of images or arrays.
        bytes_each: mean stored size of the data set's samples.
        span_samples: mean number of samples of a span.
        missing_message: error of a sample without image or array.
    """

    members: tuple[bytes, ...]
    bytes_each: float
    span_samples: float = MAX_SPAN_SAMPLES
    missing_message: str = ""


def read_samples(
    connection: Connection,
    spans: Sequence[Span],
    *,
    medium: Medium = IMAGE,
    seconds: float | None = None,
    max_bytes: float = MAX_SAMPLE_BYTES,
) -> ProbeSamples:
    """Reads a few samples of several spans, by Range GETs.

    Neighbours are often alike, so they are taken from several places.

    Args:
        connection: connection to the account.
        spans: spans of the data set.
        medium: how samples are stored.
        seconds: deadline of each read; None for the connection's own.
        max_bytes: bytes to read; at least one sample is read.

    Raises:
        HapiError: if a read fails.
    """
    num_samples = sum(len(span.rows) for span in spans)
    num_bytes = sum(span.byte_range.length_bytes for span in spans)
    max_bytes = min(max_bytes, MAX_SAMPLE_BYTES)
    affordable = max_bytes * num_samples / (num_bytes * SAMPLES_PER_SPAN)
    places = max(
        1, min(MAX_SAMPLES // SAMPLES_PER_SPAN, len(spans), int(affordable))
    )
    samples: list[Sample] = []
    for place in range(places):
        span = spans[(2 * place + 1) * len(spans) // (2 * places)]
        samples += _read_first(
            connection,
            span,
            MAX_SAMPLES // places,
            max_bytes / places,
            seconds,
        )
    members = []
    missing = ""
    for sample in samples:
        try:
            members.append(sample.content(medium))
        except SampleError as error:
            missing = missing or str(error)
    return ProbeSamples(
        tuple(members),
        num_bytes / num_samples,
        num_samples / len(spans),
        missing,
    )


def _read_first(
    connection: Connection,
    span: Span,
    max_samples: int,
    max_bytes: float,
    seconds: float | None,
) -> Sequence[Sample]:
    """Reads the first samples of a span, at least one."""
    rows = [span.rows[0]]
    for row in span.rows[1:max_samples]:
        if row.offset + row.length - rows[0].offset > max_bytes:
            break
        rows.append(row)
    part = span.part(0, len(rows))
    return span_samples(part, read_span(connection, part, seconds=seconds))


def reference_samples(region: FrozenRegion) -> ProbeSamples:
    """Returns generated images or arrays, if there is no data set."""
    if isinstance(region.transform, ArrayTransform):
        arrays = region.device_graph.examples(REFERENCE_SAMPLES)
        made = tuple(map(region.transform.encode, arrays))
    else:
        made = tuple(map(reference_image, range(REFERENCE_SAMPLES)))
    blocks = -(-len(made[0]) // TAR_BLOCK_BYTES)
    stored = (blocks + 3) * TAR_BLOCK_BYTES  # two headers, and a label
    return ProbeSamples(made, stored)
