"""When a micro-batch starts.

Micro-batches have the size of :func:`hapi_splitter.numerics.batch_size`,
unless memory does not suffice (:meth:`.WorkingMemory.reserve`); what is
missing is padded.  So a row's features do not depend on who shares the worker.
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
