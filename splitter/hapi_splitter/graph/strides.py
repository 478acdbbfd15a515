"""In which order the tensors of a region lie in memory, before it runs.

A kernel that is given images or matrices as it likes them copies nothing;
others are copied first. torch's ``meta`` device knows strides as it knows
shapes, but not of every operator those that its CPU kernels choose. Tensors
whose order is not sure are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TypeAlias

import torch

from hapi_splitter.graph import batch_independence as by
from hapi_splitter.graph.batch_independence import Value
from hapi_splitter.graph.lowering import BATCH_NORM, LINEAR
from hapi_splitter.graph.memory_format import CONVOLUTION
from hapi_splitter.graph.operators import operators
from hapi_splitter.graph.program import INPUT, Call, Program
from hapi_splitter.graph.shapes import run_call

Laid: TypeAlias = Mapping[int, torch.Tensor]
"""Tensors on the ``meta`` device, by id, for :data:`BATCH` samples."""

BATCH = 2
ATTENTION = "aten.scaled_dot_product_attention.default"
_ORDERED_BY_KERNEL = frozenset(
    {
        CONVOLUTION,
        BATCH_NORM,
        "aten.conv_transpose2d.input",
        "aten.pixel_shuffle.default",
        "aten.roll.default",
    }
)
"""Of images whose rows do not lie one after the other these yield another
order than ``meta`` says."""


def laid_out(
    program: Program,
    known: Mapping[int, Value],
    weights: Mapping[int, torch.Tensor],
    channels_last: Set[int],
) -> Laid:
    """The tensors whose order is sure, of a program that runs on a CPU.

    Args:
        program: whose input has the usual order.
        known: of every tensor.
        weights: by id; only shapes, dtypes and strides are read.
        channels_last: ids of what is sure to lie so.
    """
    found = {
        node: torch.empty_strided(
            weight.shape, weight.stride(), dtype=weight.dtype, device="meta"
        )
        for node, weight in weights.items()
    }
    found[INPUT] = _usual(known[INPUT])
    for node, call in enumerate(program.calls, program.first_call):
        if node in channels_last:
            found[node] = _usual(known[node], torch.channels_last)
            continue
        laid = _yielded(call, known[node], found)
        if laid is not None:
            found[node] = laid
    return found


def _usual(
    value: Value, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    shape = list(value.shape)
    if value.batch is not None:
        shape[value.batch.dim] *= BATCH
    return torch.empty(
        shape, dtype=value.dtype, device="meta", memory_format=memory_format
    )


def _yielded(call: Call, value: Value, found: Laid) -> torch.Tensor | None:
    if call.op == LINEAR:
        # It is given rows in one piece.
        return _usual(value)
    read = [found[node] for node in call.refs() if node in found]
    if len(read) < len(call.refs()):
        return None
    if call.op == ATTENTION:
        return _attended(read, value)
    if call.op in _ORDERED_BY_KERNEL and not all(map(is_row_major, read)):
        return None
    if operators()[call.op].rule is by.elementwise and not _agree(read):
        return None
    return run_call(call, found, BATCH)


def is_row_major(tensor: torch.Tensor) -> bool:
    """Whether it has exactly the strides of a new tensor."""
    return (
        tensor.stride()
        == torch.empty_like(
            tensor, memory_format=torch.contiguous_format
        ).stride()
    )


def _agree(read: Sequence[torch.Tensor]) -> bool:
    """Whether it does not matter which of them is overwritten."""
    largest = max(read, key=torch.Tensor.numel)
    return all(
        tensor.stride() == largest.stride()
        for tensor in read
        if tensor.shape == largest.shape
    )


def _attended(
    read: Sequence[torch.Tensor], value: Value
) -> torch.Tensor | None:
    query, key, values, *mask = read
    if not attends_by_tiles(query, key, values, *mask):
        return None
    if is_row_major(query):
        return _usual(value)
    if is_row_major(query.transpose(1, 2)):
        batch, heads, rows, columns = query.shape
        return query.new_empty(batch, rows, heads, columns).transpose(1, 2)
    return None


def attends_by_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> bool:
    """Whether torch's attention on a CPU never holds a matrix of scores.

    As ``use_flash_attention_cpp`` of torch's ``sdp_utils_cpp.cpp`` decides,
    for masks less often.

    Args:
        query: ``[..., queries, width]``; its strides count.
        key: ``[..., keys, width]``.
        value: ``[..., keys, width of a result]``.
        mask: of scores.
    """
    operands = (query, key, value)
    return (
        # Named for one device, it is asked for all.
        torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and all(operand.ndim == 4 for operand in operands)
        and len({operand.shape[:2] for operand in operands}) == 1
        and len({operand.shape[-1] for operand in operands}) == 1
        and all(operand.stride(-1) == 1 for operand in operands)
        and all(operand.numel() for operand in operands)
        and (mask is None or mask.shape == (query.shape[2], key.shape[2]))
    )
