"""Images with their channels innermost in memory, as CPUs convolve fastest.

torch calls it ``channels_last``. A convolution whose weight lies so reads
and yields images so, and oneDNN need not rearrange them before and after
each one; most other kernels keep the order that they find.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from hapi_splitter.graph import batch_independence as by
from hapi_splitter.graph.batch_independence import Value
from hapi_splitter.graph.lowering import BATCH_NORM
from hapi_splitter.graph.operators import VIEWS, operators
from hapi_splitter.graph.program import Call, Program

CONVOLUTION = "aten.conv2d.default"
POOLS = frozenset(
    {
        "aten.max_pool2d.default",
        "aten.avg_pool2d.default",
        "aten.adaptive_avg_pool2d.default",
    }
)


def arranged(
    program: Program,
    weights: Mapping[int, torch.Tensor],
    device: torch.device,
    copy: bool = False,
) -> dict[int, torch.Tensor]:
    """Weights on a device, as its convolutions run fastest.

    On a CPU those of two-dimensional convolutions have their channels
    last; all others, and all on other devices, the usual order.

    Args:
        program: whose calls read them.
        weights: by id; left as they are.
        device: that computes.
        copy: also those that are there, in that order, already.
    """
    last = set()
    if device.type == "cpu":
        convolutions = [c for c in program.calls if c.op == CONVOLUTION]
        last = {call.refs()[1] for call in convolutions}
    formats = (torch.contiguous_format, torch.channels_last)
    return {
        node: weight.to(device, memory_format=formats[node in last], copy=copy)
        for node, weight in weights.items()
    }


def has_channels_last(weight: torch.Tensor) -> bool:
    """Whether a convolution with this weight works on such images.

    One number for each channel is in either order, which torch takes for
    the usual one.
    """
    return (
        weight.ndim == 4
        and weight[0].numel() > 1
        and weight.stride(1) == 1
        and weight.stride(3) == weight.shape[1]
    )


def images_with_channels_last(
    program: Program, known: Mapping[int, Value], weights: set[int]
) -> frozenset[int]:
    """Ids of tensors that are sure to have their channels last, on a CPU.

    Args:
        program: whose input has the usual order.
        known: of every tensor.
        weights: ids of those that have their channels last.

    Returns:
        Those, and of what the program's calls yield.
    """
    found = set(weights)
    for node, call in enumerate(program.calls, program.first_call):
        keeps = _keeps_order(call)
        if keeps is not None and keeps(call, known, found):
            found.add(node)
    return frozenset(found)


_Keeps = Callable[[Call, Mapping[int, Value], set[int]], bool]


def _keeps_order(call: Call) -> _Keeps | None:
    if call.op in _KEEPING:
        return _KEEPING[call.op]
    rule = operators()[call.op].rule
    if rule is by.elementwise and call.op not in VIEWS:
        return _elementwise
    return None


def _convolution(
    call: Call, known: Mapping[int, Value], found: set[int]
) -> bool:
    image, weight = call.refs()[:2]
    return image in found or weight in found


def _first(call: Call, known: Mapping[int, Value], found: set[int]) -> bool:
    return call.refs()[0] in found


def _all(call: Call, known: Mapping[int, Value], found: set[int]) -> bool:
    return found.issuperset(call.refs())


def _elementwise(
    call: Call, known: Mapping[int, Value], found: set[int]
) -> bool:
    """Where nothing but numbers for whole channels has another order."""
    others = [read for read in call.refs() if read not in found]
    return len(others) < len(call.refs()) and all(
        math.prod(known[read].shape[-2:]) == 1 for read in others
    )


_KEEPING: Mapping[str, _Keeps] = MappingProxyType(
    {
        CONVOLUTION: _convolution,
        BATCH_NORM: _first,
        "aten.cat.default": _all,
        **dict.fromkeys(POOLS, _first),
    }
)
