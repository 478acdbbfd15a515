"""When a micro-batch starts, and how large it is.

Micro-batches of a model have the same size, unless memory does not suffice
(:meth:`.WorkingMemory.reserve`); what is missing is padded.  A row's features
then have the same bits whatever else is in its batch and wherever it lies
(torch picks kernels by the shape), so that they do not depend on who shares
the worker.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_LINGER_SECONDS = 0.1
"""Time that samples wait for others to fill a micro-batch, while a client is
slow."""


@dataclass(frozen=True)
class Backlog:
    """Samples that wait for a forward pass.

    Attributes:
        ready: decoded (or failed to), at the heads of their streams.
        pending: read and not yet decoded, or decoded before one that is not.
        quiet: no stream will bring another sample by itself: each has
            ended, or waits for room.
        waited_seconds: since the oldest ready sample became so.
    """

    ready: int
    pending: int
    quiet: bool
    waited_seconds: float


def num_passes(
    backlog: Backlog,
    size: int,
    *,
    linger_seconds: float = DEFAULT_LINGER_SECONDS,
) -> int:
    """Number of micro-batches of ``size`` that should start now.

    Full ones do.  One that is not full starts when nothing is being decoded
    that could fill it, and either nothing more will come or the oldest sample
    has waited for long.
    """
    full, rest = divmod(backlog.ready, size)
    if not rest or backlog.pending:
        return full
    if backlog.quiet or backlog.waited_seconds >= linger_seconds:
        return full + 1
    return full


def batch_size(largest: int, num_samples: int | None) -> int:
    """Size of the micro-batches of a request, by itself alone.

    Args:
        largest: that suits device and model.
        num_samples: samples of the request, where it is known.

    Returns:
        ``largest``, or the next power of two where fewer samples come.
    """
    if num_samples is None or num_samples >= largest:
        return largest
    return min(largest, 1 << max(num_samples - 1, 0).bit_length())
