"""Loading one span: raw bytes decoded here, or features from the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hapi_client.metrics.window_metrics import SpanMetrics
from hapi_client.swift.retry import Backoff
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import Span
from hapi_protocol.errors import ClientError

logger = logging.getLogger(__name__)

RAW_QUEUE = "raw"
PUSHDOWN_QUEUE = "pushdown"
CACHE_QUEUE = "cached"
READ_QUEUES = (RAW_QUEUE, PUSHDOWN_QUEUE, CACHE_QUEUE)


@dataclass(frozen=True)
class LoadedSpan:
    """A span's samples as they arrived.

    Attributes:
        span: which one.
        cut: where in the frozen region ``features`` stand; 0 for
            samples as the model takes them.
        features: ``[good samples, *shape]`` on the CPU, in order.
        failures: row number to message, for the samples that cannot be
            had however often they are asked for.
        report: what loading it took.
    """

    span: Span
    cut: int
    features: torch.Tensor
    failures: Mapping[int, str] = field(default_factory=dict)
    report: SpanMetrics = field(default_factory=SpanMetrics)


@dataclass(frozen=True)
class SpanTask:
    """One span to load, and the way it goes.

    Attributes:
        lane: one of :data:`READ_QUEUES`, each with threads of its own: what
            waits for the store must not hold up plain reads.
        cost_bytes: memory that the loaded span may take, at most.
        load: called in a thread of the lane.
    """

    read_queue: str
    cost_bytes: int
    load: Callable[[CancelScope], LoadedSpan]


class SpanSource(Protocol):
    """Says how spans are loaded; called by several threads."""

    def concurrency_limit(self, read_queue: str) -> int:
        """Spans that may be under way in a lane, at most."""
        ...

    def task(
        self,
        span: Span,
        has_room: Callable[[str], bool],
        samples_left: int,
    ) -> SpanTask | None:
        """How to load a span.

        Args:
            span: the next one.
            has_room: whether a lane has a free thread.
            samples_left: of the epoch, this span's included, and those of
                spans that have come and wait for the loop: layers behind
                the cut are still to be computed for these.

        Returns:
            None to wait until a lane has room.
        """
        ...


@dataclass(frozen=True)
class SpanLimits:
    """Of one span.

    Attributes:
        seconds: for one try, the decoding included.
        backoff: of tries that broke off.
    """

    seconds: float = 120.0
    backoff: Backoff = field(default_factory=Backoff)


def check_keys(span: Span, found: Sequence[tuple[int, str]]) -> None:
    """Compares the samples that came with those of the index.

    Raises:
        ClientError: ``keys_changed`` naming shard and first difference.
    """
    expected = [(row.sample, row.key) for row in span.rows]
    if list(found) == expected:
        return
    for (index, key), got in zip(expected, [*found, None], strict=False):
        if got != (index, key):
            break
    raise ClientError(
        "keys_changed",
        f"shard {span.shard}: the index says sample {index} is {key!r}, "
        f"and {got!r} came; run 'hapi index' on the data set",
        object_name=span.shard,
    )
