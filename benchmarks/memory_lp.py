"""HAPI's own rule for batch sizes, for comparison and never for work (pure).

The storage-side batch size adaptation of HAPI (Guirguis, Petrescu et al.,
arXiv 2210.08650, the part on batch adaptation), as the public prototype's
logs of December 2021 show it.  For the requests r that wait for one GPU it
solves, with ``s`` bytes of activations for each sample, a linear program:

    maximise    sum of s_r * b_r                    (memory in use)
    subject to  sum of s_r * b_r <= free memory
                b_min <= b_r <= the batch that r asked for

and cuts the solution off to whole samples.  Its goal is memory in use, not
samples per second: it buys nothing beyond the batch at which the device is
busy.  And since its objective is its constraint, every solution that uses all
memory is as good as another; a simplex ends at a vertex, where all but one
request have either all they asked for or the least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_BATCH = 25
MARGIN = 512.0
"""MB that the prototype keeps free."""
COPIES_OF_WEIGHTS = 2
"""As often the prototype counts what a request needs whatever its batch."""


@dataclass(frozen=True)
class Request:
    """One that waits for the GPU.

    Attributes:
        per_sample: memory of activations, above 0, for each sample.
        fixed: memory of weights, in the same unit.
        wanted: samples; no fewer than the least batch count.
    """

    per_sample: float
    fixed: float
    wanted: int


def batch_sizes(
    requests: Sequence[Request],
    memory: float,
    *,
    allocated: float = 0.0,
    margin: float = MARGIN,
    least: int = MIN_BATCH,
    copies: int = COPIES_OF_WEIGHTS,
) -> list[int]:
    """Samples at a time for each request, 0 for those that must wait.

    The vertex is that of filling up in the order of the requests, which is
    the one in the prototype's logs.  Where not even the least batches fit,
    the last requests are put off.

    Args:
        requests: in the order in which they came.
        memory: of the GPU, in the unit of the requests (the prototype: MB).
        allocated: to requests that run already.
        margin: kept free.
        least: samples of a batch.
        copies: of the fixed memory.

    Raises:
        ValueError: a request that wants fewer than the least, or whose
            samples need no memory.
    """
    for request in requests:
        _check(request, least)
    for count in range(len(requests), 0, -1):
        found = _filled(
            requests[:count], memory - allocated - margin, least, copies
        )
        if found is not None:
            return [*found, *[0] * (len(requests) - count)]
    return [0] * len(requests)


def _check(request: Request, least: int) -> None:
    if request.wanted < least:
        raise ValueError(
            f"{request} wants {request.wanted} samples; {least} or more"
        )
    if request.per_sample <= 0:
        raise ValueError(
            f"{request} needs {request.per_sample} for a sample; above 0"
        )


def _filled(
    requests: Sequence[Request], free: float, least: int, copies: int
) -> list[int] | None:
    left = free - sum(
        copies * each.fixed + least * each.per_sample for each in requests
    )
    if left < 0:
        return None
    batches = []
    for each in requests:
        more = min(left / each.per_sample, each.wanted - least)
        left -= more * each.per_sample
        batches.append(math.floor(least + more))
    return batches
