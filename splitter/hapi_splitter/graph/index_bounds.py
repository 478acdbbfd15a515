"""Bounds of the ids in a sample, from the embedding tables that use them.

An index out of range fails the whole batch on a CPU and ends the process on a
GPU.  So every position of a sample has a limit that is checked beforehand: the
number of rows of the smallest table in which its value is looked up.  The
checks of :mod:`hapi_splitter.graph.shapes` guarantee that indices are input
values that were moved but never changed, or within the table by computation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hapi_splitter.graph.batch_independence import Value
from hapi_splitter.graph.integer_bounds import is_within
from hapi_splitter.graph.lowering import needed
from hapi_splitter.graph.operators import EMBEDDING
from hapi_splitter.graph.program import INPUT, Program
from hapi_splitter.graph.shapes import run_call


def id_limits(
    program: Program, values: Sequence[Value]
) -> torch.Tensor | None:
    """Returns the exclusive upper bound of the id at each position.

    Args:
        program: a checked program.
        values: from :func:`hapi_splitter.graph.shapes.infer`.

    Returns:
        int64 of a sample's shape, 0 for no limit; None if the program looks
        up no ids of the input.
    """
    num_rows: dict[int, int] = {}
    for call in program.calls:
        if call.op == EMBEDDING:
            table, indices = call.refs()
            rows = values[table].shape[0]
            if is_within(values[indices], rows):
                continue
            num_rows[indices] = min(rows, num_rows.get(indices, rows))
    if not num_rows:
        return None
    shape = values[INPUT].shape
    positions = torch.arange(values[INPUT].num_elements)
    limits = torch.zeros_like(positions)
    # Running the moves on position numbers shows where indices come from.
    moved = {INPUT: positions.to(torch.int32).view(shape)}
    moves = {n for end in num_rows for n in needed(program, INPUT, end)}
    for node in sorted(moves):
        moved[node] = run_call(program.call(node), moved, 1)
    for indices, rows in num_rows.items():
        sources = moved[indices].flatten().long()
        known = limits[sources]
        limits[sources] = torch.where(known == 0, rows, known.clamp(max=rows))
    return limits.view(shape[1:])
