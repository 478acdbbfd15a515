"""Virtual nodes of each worker.  No I/O, no torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, pairwise

from hapi_training.virtual_nodes.reduction_tree import node_order

Assignment = tuple[tuple[int, ...], ...]
"""Nodes of each rank, in the order of the reduction tree."""


def even(num_nodes: int, num_ranks: int) -> Assignment:
    """Gives each rank as many nodes, or one more."""
    each, rest = divmod(num_nodes, num_ranks)
    return divided(
        num_nodes, [each + (rank < rest) for rank in range(num_ranks)]
    )


def divided(num_nodes: int, counts: Sequence[int]) -> Assignment:
    """Gives each rank a number of consecutive nodes of the tree."""
    order = node_order(num_nodes)
    bounds = pairwise(accumulate(counts, initial=0))
    return tuple(order[start:end] for start, end in bounds)


def balanced_counts(num_nodes: int, seconds: Sequence[float]) -> list[int]:
    """Numbers of nodes with which the slowest rank ends earliest.

    Each next node goes to the rank that would end first with it, which is
    optimal for nodes of equal work.  Each rank has one node at least.

    Args:
        num_nodes: number of nodes, at least that of the ranks.
        seconds: seconds of one node on each rank.
    """
    counts = [1] * len(seconds)
    ends = [(2 * cost, rank) for rank, cost in enumerate(seconds)]
    heapq.heapify(ends)
    for _ in range(num_nodes - len(seconds)):
        end, rank = ends[0]
        counts[rank] += 1
        heapq.heapreplace(ends, (end + seconds[rank], rank))
    return counts


def step_seconds(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds of the slowest rank in a step."""
    return max(
        count * cost for count, cost in zip(counts, seconds, strict=True)
    )
