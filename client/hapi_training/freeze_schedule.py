"""The layers that each virtual node trains in a step.  No I/O, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def depth_order(num_segments: int) -> list[int]:
    """Returns depths such that any two opposite ones have equal sums.

    As 0, 1, 3, 2 for 4 segments.
    """
    half = -(-num_segments // 2)
    return [
        *range(half),
        *(num_segments - 1 - i for i in range(num_segments - half)),
    ]


def depth(step: int, node: int, num_nodes: int, num_segments: int) -> int:
    """Returns the first segment that a node trains in a step.

    In each step as many nodes have each depth, and in each ``num_segments``
    steps a node has each depth once.  Blocks of ``num_nodes / num_segments``
    nodes have one depth, and opposite blocks equal sums of depths, so that
    two or four workers have equal work wherever numbers allow: as ``node +
    step`` would not, where two workers had all even and all odd depths.

    Args:
        step: number of the step in the run.
        node: number of the node.
        num_nodes: number of nodes, a multiple of that of segments.
        num_segments: number of segments.
    """
    block = node // (num_nodes // num_segments)
    return depth_order(num_segments)[(block + step) % num_segments]


def segment_starts(costs: Sequence[float], num_segments: int) -> list[int]:
    """Divides layers into consecutive segments of costs as equal as possible.

    Those with the least sum of squares.

    Args:
        costs: cost of each layer, above 0; as many as segments, or more.
        num_segments: number of segments.

    Returns:
        The first layer of each segment.
    """
    before = list(accumulate(costs, initial=0.0))
    ends = range(len(before))
    # For each number of layers, the best division of them and its sum.
    best: list[tuple[float, list[int]] | None] = [
        (0.0, []),
        *[None] * len(costs),
    ]
    for _ in range(num_segments):
        best = [
            min(
                (
                    (
                        earlier[0] + (before[end] - before[start]) ** 2,
                        [*earlier[1], start],
                    )
                    for start in range(end)
                    if (earlier := best[start]) is not None
                ),
                default=None,
            )
            for end in ends
        ]
    assert best[-1] is not None, "there are as many layers as segments"
    return best[-1][1]
