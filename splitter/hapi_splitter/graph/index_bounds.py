"""Which whole numbers a sample may hold: those that its tables have rows for.

An index that a table lacks is an error on a CPU, of all samples that are
computed together, and ends a GPU's process.  So each place of a sample has a
limit that is checked before: the rows of the smallest table that the number
there is looked up in.  The checks of :mod:`hapi_splitter.graph.shapes` see to
it that indices are numbers of the input, moved about and never changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hapi_splitter.graph.batch_independence import Value
from hapi_splitter.graph.lowering import needed
from hapi_splitter.graph.operators import EMBEDDING
from hapi_splitter.graph.program import INPUT, Program
from hapi_splitter.graph.shapes import run_call


def id_limits(
    program: Program, values: Sequence[Value]
) -> torch.Tensor | None:
    """For each place of a sample, what the number there must be below.

    Args:
        program: a checked program.
        values: of :func:`hapi_splitter.graph.shapes.infer`.

    Returns:
        int64 of a sample's shape, 0 for no limit; None where nothing is
        looked up.
    """
    tables: dict[int, int] = {}
    for call in program.calls:
        if call.op == EMBEDDING:
            table, indices = call.refs()
            rows = values[table].shape[0]
            tables[indices] = min(rows, tables.get(indices, rows))
    if not tables:
        return None
    shape = values[INPUT].shape
    places = torch.arange(values[INPUT].num_elements)
    limits = torch.zeros_like(places)
    # Where in the sample they come from shows when places are moved.
    moved = {INPUT: places.to(torch.int32).view(shape)}
    moves = {n for end in tables for n in needed(program, INPUT, end)}
    for node in sorted(moves):
        moved[node] = run_call(program.call(node), moved, 1)
    for indices, rows in tables.items():
        found = moved[indices].flatten().long()
        others = limits[found]
        limits[found] = torch.where(others == 0, rows, others.clamp(max=rows))
    return limits.view(shape[1:])
