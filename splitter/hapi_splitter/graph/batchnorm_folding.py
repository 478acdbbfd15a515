"""Folds batch norms into the convolutions before them.

A batch norm with fixed statistics scales and shifts each channel. The weight
and bias of the convolution can do the same and save a pass over its result.
Packages are never folded, because a cut between the two needs the original
convolution. Nor are convolutions of 16 bits folded: their weights would be
rounded once more, and the features would not be the model's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils.fusion import fuse_conv_bn_weights

from hapi_splitter.graph.batch_independence import Value
from hapi_splitter.graph.lowering import BATCH_NORM, needed
from hapi_splitter.graph.operators import HALVES
from hapi_splitter.graph.program import (
    INPUT,
    Argument,
    Call,
    Program,
    Ref,
)

_CONVOLUTIONS = frozenset(f"aten.conv{n}d.default" for n in (1, 2, 3))


@dataclass(frozen=True)
class Folding:
    """Folded convolutions of a program.

    Attributes:
        convolutions: batch norm's tensor id by the convolution's tensor id;
            nothing else reads the latter.
        calls: folded call by the batch norm's tensor id.
        weights: folded weights; their ids are negative, which programs do not
            use.
    """

    convolutions: Mapping[int, int]
    calls: Mapping[int, Call]
    weights: Mapping[int, torch.Tensor]

    def applied(
        self, program: Program, unfolded: Collection[int] = ()
    ) -> Program:
        """Returns the program with folded calls; tensor ids do not change.

        Args:
            program: the program that was folded.
            unfolded: convolutions whose own tensors are needed.
        """
        calls = list(program.calls)
        for convolution, node in self.convolutions.items():
            if convolution not in unfolded:
                calls[node - program.first_call] = self.calls[node]
        return replace(program, calls=tuple(calls))

    def values(self) -> dict[int, Value]:
        """Returns shapes and dtypes of the folded weights by id."""
        return {
            node: Value(tuple(weight.shape), weight.dtype, None, False)
            for node, weight in self.weights.items()
        }


def fold(program: Program, weights: Mapping[int, torch.Tensor]) -> Folding:
    """Folds each batch norm that is a convolution's only reader.

    Batch norms with computed statistics or weights are not folded, nor those
    after convolutions of 16 bits.  Convolutions that share a weight are
    folded if their batch norms are the same, and share the folded weight:
    folding takes at most as much memory as the weights themselves.

    Args:
        program: a checked program.
        weights: by id; not modified.
    """
    convolutions: dict[int, int] = {}
    calls: dict[int, Call] = {}
    folded: dict[int, torch.Tensor] = {}
    for shared, pairs in _pairs_by_weight(program).items():
        sources = {_sources(program, *pair) for pair in pairs}
        if weights[shared].dtype in HALVES or len(sources) > 1:
            continue
        weight, bias = -len(folded) - 1, -len(folded) - 2
        before, norm = map(program.call, pairs[0])
        folded[weight], folded[bias] = _fold_weights(before, norm, weights)
        for first, second in pairs:
            call = program.call(first)
            image, _weight, _bias, *rest = call.args
            convolutions[first] = second
            calls[second] = replace(
                call, args=(image, Ref(weight), Ref(bias), *rest)
            )
    return Folding(convolutions, calls, folded)


def _pairs_by_weight(program: Program) -> dict[int, list[tuple[int, int]]]:
    """Groups :func:`_pairs` by the weight of the convolution."""
    pairs: dict[int, list[tuple[int, int]]] = {}
    for first, second in _pairs(program):
        weight = program.call(first).refs()[1]
        pairs.setdefault(weight, []).append((first, second))
    return pairs


def _sources(program: Program, first: int, second: int) -> tuple[Any, ...]:
    """Returns all that the folded weight and bias depend on."""
    convolution, norm = program.call(first), program.call(second)
    return (*convolution.args[1:3], *norm.args[1:5], norm.args[6])


def _pairs(program: Program) -> Iterator[tuple[int, int]]:
    """Yields the ids of each convolution and batch norm that can be folded."""
    readers: dict[int, list[int]] = {}
    for node, call in enumerate(program.calls, program.first_call):
        for read in call.refs():
            readers.setdefault(read, []).append(node)
    for node in needed(program, INPUT, program.output):
        call = program.call(node)
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


def _fold_weights(
    convolution: Call, norm: Call, weights: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weight and bias, computed in float64."""

    def in_float64(argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return weights[argument.node].double()
        return None

    weight, bias = map(in_float64, convolution.args[1:3])
    scale, shift, mean, variance = map(in_float64, norm.args[1:5])
    eps: Any = norm.args[6]
    fused = fuse_conv_bn_weights(
        weight, bias, mean, variance, eps, scale, shift
    )
    weight, bias = (tensor.detach().float() for tensor in fused)
    return weight, bias


def weights_read(
    program: Program, folding: Folding, ends: Collection[int]
) -> set[int]:
    """Returns ids of the program's weights that segments of it read.

    Args:
        program: the program that was folded.
        folding: its folding.
        ends: tensors at which a segment may begin or end.
    """
    read: set[int] = set()
    applied = folding.applied(program, ends)
    for node, call in enumerate(applied.calls, program.first_call):
        if node not in folding.convolutions or node in ends:
            read.update(call.refs())
    return {node for node in read if 0 < node < program.first_call}
