"""Puts weights into the memory format that CPUs convolve fastest.

That is torch's ``channels_last``: the channels of a pixel are next to one
another. A convolution with such a weight reads and writes such images, and
oneDNN need not rearrange them before and after each call; most other kernels
keep the format of their input.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hapi_splitter.graph.program import Program

_CONVOLUTION = "aten.conv2d.default"


def arranged(
    program: Program,
    weights: Mapping[int, torch.Tensor],
    device: torch.device,
    copy: bool = False,
) -> dict[int, torch.Tensor]:
    """Returns the weights on a device, in its fastest memory format.

    Weights of two-dimensional convolutions are ``channels_last`` on a CPU.
    All others, and all weights on other devices, are contiguous.

    Args:
        program: its calls read the weights.
        weights: by id; they are not changed.
        device: the device that computes.
        copy: whether weights that need no conversion are copied, too.
    """
    last = set()
    if device.type == "cpu":
        convolutions = [c for c in program.calls if c.op == _CONVOLUTION]
        last = {call.refs()[1] for call in convolutions}
    formats = (torch.contiguous_format, torch.channels_last)
    return {
        node: weight.to(device, memory_format=formats[node in last], copy=copy)
        for node, weight in weights.items()
    }
