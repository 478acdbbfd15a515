"""When a job's next micro-batch starts, and how large it is."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_DEPTH = 2
"""Micro-batches of one job on their way at a time: one on the device, one
ready behind it."""
DEFAULT_LINGER_SECONDS = 0.02


@dataclass(frozen=True)
class Backlog:
    """A job's decoded samples that wait, in shard order.

    Attributes:
        ready: samples at the head that are decoded (or failed to).
        pending: samples behind them that are still being decoded.
        limit: most samples a micro-batch may have.
        flying: micro-batches started and not yet finished.
        ended: no further sample will come.
        blocked: the reader waits for room in the buffer.
        waited_seconds: since the oldest waiting sample became ready.
    """

    ready: int
    pending: int
    limit: int
    flying: int
    ended: bool
    blocked: bool
    waited_seconds: float


def next_batch_size(
    backlog: Backlog,
    *,
    depth: int = DEFAULT_DEPTH,
    linger_seconds: float = DEFAULT_LINGER_SECONDS,
) -> int:
    """How many samples to start now; 0 to wait.

    A full batch starts as soon as there is room.  A smaller one starts when
    nothing more can join it, or when the device has nothing of this job and
    a quarter is there or the oldest sample has waited long enough: the
    device then works while the next samples are decoded.
    """
    if backlog.flying >= depth or backlog.ready == 0:
        return 0
    size = min(backlog.ready, backlog.limit)
    if size == backlog.limit:
        return size
    if backlog.pending == 0 and (backlog.ended or backlog.blocked):
        return size
    if backlog.flying == 0 and (
        4 * size >= backlog.limit or backlog.waited_seconds >= linger_seconds
    ):
        return size
    return 0
