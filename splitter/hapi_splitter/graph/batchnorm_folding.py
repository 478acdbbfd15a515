"""Batch norms that are folded into the convolutions before them.

A batch norm with fixed statistics scales and shifts each channel, which the
weight and the bias of a convolution can do as well: a whole pass over its
result is saved. Packages know nothing of it, since a cut may lie between
the two: there the convolution is needed as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils.fusion import fuse_conv_bn_weights

from hapi_splitter.graph.batch_independence import Value
from hapi_splitter.graph.lowering import BATCH_NORM
from hapi_splitter.graph.program import Argument, Call, Program, Ref

_CONVOLUTIONS = frozenset({"aten.conv1d.default", "aten.conv2d.default"})


@dataclass(frozen=True)
class Folding:
    """What takes the place of convolutions and their batch norms.

    Attributes:
        convolutions: id of each batch norm's tensor by that of the
            convolution's, which is read by nothing else.
        calls: by id of the batch norm's tensor, the one call that yields it.
        weights: that these calls read, under ids below 0, which no
            program has.
    """

    convolutions: Mapping[int, int]
    calls: Mapping[int, Call]
    weights: Mapping[int, torch.Tensor]

    def applied(
        self, program: Program, apart: Collection[int] = ()
    ) -> Program:
        """The program with these calls, its tensors under the same ids.

        Args:
            program: that was folded.
            apart: convolutions whose tensors are needed as they were.
        """
        calls = list(program.calls)
        for convolution, node in self.convolutions.items():
            if convolution not in apart:
                calls[node - program.first_call] = self.calls[node]
        return replace(program, calls=tuple(calls))

    def values(self) -> dict[int, Value]:
        """What is known of the weights."""
        return {
            node: Value(tuple(weight.shape), weight.dtype, None, False)
            for node, weight in self.weights.items()
        }


def fold(program: Program, weights: Mapping[int, torch.Tensor]) -> Folding:
    """Folds each batch norm that alone reads a convolution's tensor.

    Those whose numbers are computed by the program stay as they are.

    Args:
        program: a checked program.
        weights: by id; left as they are.
    """
    convolutions: dict[int, int] = {}
    calls: dict[int, Call] = {}
    folded: dict[int, torch.Tensor] = {}
    for first, second in _pairs(program):
        before, norm = program.call(first), program.call(second)
        image, _weight, _bias, *rest = before.args
        weight, bias = -len(folded) - 1, -len(folded) - 2
        folded[weight], folded[bias] = _fused(before, norm, weights)
        convolutions[first] = second
        calls[second] = Call(before.op, (image, Ref(weight), Ref(bias), *rest))
    return Folding(convolutions, calls, folded)


def _pairs(program: Program) -> Iterator[tuple[int, int]]:
    """Ids of convolutions and of the batch norms that are folded."""
    readers: dict[int, list[int]] = {}
    for node, call in enumerate(program.calls, program.first_call):
        for read in call.refs():
            readers.setdefault(read, []).append(node)
    for node, call in enumerate(program.calls, program.first_call):
        if call.op != BATCH_NORM:
            continue
        image, *others = call.refs()
        if image < program.first_call or readers[image] != [node]:
            continue
        before = program.call(image)
        if before.op in _CONVOLUTIONS and _are_weights(
            program, (*before.refs()[1:], *others)
        ):
            yield image, node


def _are_weights(program: Program, nodes: Sequence[int]) -> bool:
    return all(0 < node < program.first_call for node in nodes)


def _fused(
    convolution: Call, norm: Call, weights: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias, computed in float64."""

    def exact(argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return weights[argument.node].double()
        return None

    weight, bias = map(exact, convolution.args[1:3])
    scale, shift, mean, variance = map(exact, norm.args[1:5])
    eps: Any = norm.args[6]
    fused = fuse_conv_bn_weights(
        weight, bias, mean, variance, eps, scale, shift
    )
    weight, bias = (tensor.detach().float() for tensor in fused)
    return weight, bias


def kept(
    program: Program, folding: Folding, ends: Collection[int]
) -> set[int]:
    """Ids of the weights that stretches between some tensors read.

    Args:
        program: that was folded.
        folding: of it.
        ends: tensors at which a stretch may begin or end.
    """
    read: set[int] = set()
    applied = folding.applied(program, ends)
    for node, call in enumerate(applied.calls, program.first_call):
        if node not in folding.convolutions or node in ends:
            read.update(call.refs())
    return {node for node in read if 0 < node < program.first_call}
