"""Types of loading one span: source, task, loaded span."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hapi_client.metrics.events import SpanEvent
from hapi_client.swift.retry import Backoff
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import Span
from hapi_protocol.errors import ClientError

logger = logging.getLogger(__name__)

RAW_QUEUE = "raw"
PUSHDOWN_QUEUE = "pushdown"
CACHE_QUEUE = "cached"
"""Features that Swift has cached, and samples that this host has stored: reads
that wait for no worker."""
READ_QUEUES = (RAW_QUEUE, PUSHDOWN_QUEUE, CACHE_QUEUE)


@dataclass(frozen=True)
class LoadedSpan:
    """Samples of a span, decoded or computed up to a cut.

    Attributes:
        span: the span.
        cut: cut of ``features``; 0 for inputs of the model.
        features: ``[good samples, *shape]`` on the CPU, in order.
        failures: error messages by row, of samples that cannot be decoded.
        costs: time and traffic of loading.
    """

    span: Span
    cut: int
    features: torch.Tensor
    failures: Mapping[int, str] = field(default_factory=dict)
    costs: SpanEvent = field(default_factory=SpanEvent)


@dataclass(frozen=True)
class SpanTask:
    """A span to load on a certain route.

    Attributes:
        read_queue: one of :data:`READ_QUEUES`.  Each has its own threads,
            so that reads that wait for the worker do not delay raw reads.
        cost_bytes: maximum memory of the loaded span.
        load: loads the span; called in a thread of the queue.
    """

    read_queue: str
    cost_bytes: int
    load: Callable[[CancelScope], LoadedSpan]


class SpanSource(Protocol):
    """Chooses how spans are loaded; called by several threads."""

    def concurrency_limit(self, read_queue: str) -> int:
        """Returns the maximum number of spans being read in a queue."""
        ...

    def task(
        self,
        span: Span,
        has_room: Callable[[str], bool],
        samples_left: int,
    ) -> SpanTask | None:
        """Returns the task of loading the next span.

        Args:
            span: the next span.
            has_room: returns True if a read queue has a free thread.
            samples_left: samples of the epoch that the loop has not used,
                this span's included: the client may still have to compute
                layers after the cut for those that have arrived.

        Returns:
            None to wait until a read queue has room.
        """
        ...


@dataclass(frozen=True)
class SpanLimits:
    """Time limits of loading one span.

    Attributes:
        seconds: deadline of an attempt, decoding included.
        backoff: number of attempts, and pauses between them.
        retry_seconds: time for which a raw read is tried again while Swift
            does not answer, however many attempts that takes.
    """

    # A span of 64 photographs (7 MB) takes as long on 0.5 Mbit/s.
    seconds: float = 120.0
    backoff: Backoff = field(default_factory=Backoff)
    retry_seconds: float = 0.0


def check_keys(span: Span, arrived: Sequence[tuple[int, str]]) -> None:
    """Checks that the samples that arrived are those of the index.

    Raises:
        ClientError: ``keys_changed`` naming shard and first difference.
    """
    expected = [(row.sample, row.key) for row in span.rows]
    if list(arrived) == expected:
        return
    for (index, key), got in zip(expected, [*arrived, None], strict=False):
        if got != (index, key):
            break
    raise ClientError(
        "keys_changed",
        f"shard {span.shard}: sample {index} is {key!r} by the index, but "
        f"{got!r} arrived; run 'hapi index' on the data set",
        object_name=span.shard,
    )
