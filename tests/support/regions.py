"""Frozen regions built from a list of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.graph.program import Call, Program
from hapi_splitter.graph.shapes import infer
from hapi_splitter.inputs.sample_format import SampleForm


def region_of(
    sample: tuple[int, ...],
    calls: Sequence[Call],
    weights: Mapping[int, torch.Tensor] | None = None,
) -> FrozenGraph:
    """Returns a region of calls; the weights have ids from 1."""
    weights = weights or {}
    program = Program(len(weights), tuple(calls))
    values = infer(program, weights, SampleForm(sample))
    names = [f"call{number}" for number in range(len(calls))]
    return FrozenGraph(program, weights, values, names, None, "")
