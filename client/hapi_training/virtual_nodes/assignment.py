"""Virtual nodes of each worker.  No I/O, no torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, pairwise, permutations

from hapi_training.virtual_nodes.reduction_tree import (
    node_order,
    whole_subtrees,
)

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


def balanced_counts(
    num_nodes: int, seconds: Sequence[float], tolerance: float = 1.0
) -> list[int]:
    """Numbers of nodes with which the slowest rank ends earliest.

    Each next node goes to the rank that would end first with it, which is
    optimal for nodes of equal work.  Each rank has one node at least.

    Args:
        num_nodes: number of nodes, at least that of the ranks.
        seconds: seconds of one node on each rank.
        tolerance: a node may move then, if the slowest rank takes at most
            this factor longer, for fewer subtrees: each is exchanged.  With
            5 and 3 nodes an exchange took 1.4 times as long as with 6 and 2.
    """
    counts = [1] * len(seconds)
    ends = [(2 * cost, rank) for rank, cost in enumerate(seconds)]
    heapq.heapify(ends)
    for _ in range(num_nodes - len(seconds)):
        end, rank = ends[0]
        counts[rank] += 1
        heapq.heapreplace(ends, (end + seconds[rank], rank))
    choices = [counts]
    for giver, taker in permutations(range(len(counts)), 2):
        if counts[giver] > 1:
            choices.append(list(counts))
            choices[-1][giver] -= 1
            choices[-1][taker] += 1
    limit = tolerance * step_seconds(counts, seconds)
    return min(
        (c for c in choices if step_seconds(c, seconds) <= limit),
        key=lambda c: (_num_subtrees(num_nodes, c), step_seconds(c, seconds)),
    )


def _num_subtrees(num_nodes: int, counts: Sequence[int]) -> int:
    return sum(
        len(whole_subtrees(nodes, num_nodes))
        for nodes in divided(num_nodes, counts)
    )


def step_seconds(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds of the slowest rank in a step."""
    return max(
        count * cost for count, cost in zip(counts, seconds, strict=True)
    )
