"""Cuts of a frozen region, and the two sides of each cut.

At a cut exactly one tensor that depends on the samples is live.  The batch is
its first dimension, and its values are float32, bfloat16 or float16.  Other
live tensors do not depend on the samples; the client computes them from the
batch size.  Cut 0 is the input and is not in the list; the last cut is the
whole region.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import fx

from hapi_protocol.errors import UnsupportedError
from hapi_splitter.graph.batch_independence import BatchPosition, Value
from hapi_splitter.graph.batchnorm_folding import (
    Folding,
    fold,
    weights_read,
)
from hapi_splitter.graph.flops import flops_of
from hapi_splitter.graph.index_bounds import id_limits
from hapi_splitter.graph.lowering import arranged, lower
from hapi_splitter.graph.operators import DTYPE_NAMES, FLOATS, operators
from hapi_splitter.graph.program import INPUT, Program
from hapi_splitter.graph.shapes import bind
from hapi_splitter.inputs.sample_format import InputTransform, SampleForm
from hapi_splitter.planner.costs import CutFacts

CUT_NAME = re.compile(r"[A-Za-z0-9_.]{1,200}")

LinearBytes: TypeAlias = tuple[int, int]
"""Bytes that do not depend on the batch, and bytes per sample."""


class CallMemory(NamedTuple):
    """Working memory at one call of a region, including the region's input.

    Args:
        peak: peak bytes while the call runs, without the weights.
        after: bytes of the tensors that are needed after it.
    """

    peak: LinearBytes
    after: LinearBytes


@dataclass(frozen=True, kw_only=True)
class Cut(CutFacts):
    """A position at which a frozen region can be cut.

    Attributes:
        node: id of the live tensor.
        bytes_per_sample: size of the live tensor, unencoded.
    """

    node: int
    bytes_per_sample: int


def find_cuts(
    program: Program, values: Sequence[Value], names: Sequence[str]
) -> tuple[Cut, ...]:
    """Returns all cuts of a program, first to last.

    Args:
        program: a checked program.
        values: results of :func:`hapi_splitter.graph.shapes.infer`.
        names: module path of each call.
    """
    cuts: list[Cut] = []
    flops = _cumulative_flops(program, values)
    for node in _sole_tensors(program, values):
        value = values[node]
        if not cuttable(value):
            continue
        cuts.append(
            Cut(
                index=len(cuts) + 1,
                node=node,
                op=program.call(node).op,
                name=names[node - program.first_call],
                shape=value.shape[1:],
                float32_bytes=4 * math.prod(value.shape[1:]),
                dtype=DTYPE_NAMES[value.dtype],
                bytes_per_sample=value.num_bytes,
                flops=flops[node - program.first_call],
            )
        )
    return tuple(cuts)


def cuttable(value: Value) -> bool:
    """True if a tensor is a batch of floating-point samples."""
    return value.batch == BatchPosition(0) and value.dtype in FLOATS


def _sole_tensors(program: Program, values: Sequence[Value]) -> list[int]:
    """Ids of tensors that are the only live data tensor after their call."""
    last_read = {program.output: program.output + 1}
    for node, call in enumerate(program.calls, program.first_call):
        for read in call.refs():
            last_read[read] = max(last_read.get(read, 0), node)
    dying: dict[int, list[int]] = {}
    for tensor, reader in last_read.items():
        dying.setdefault(reader, []).append(tensor)
    sole: list[int] = []
    live = {INPUT}
    for node in range(program.first_call, program.output + 1):
        if values[node].data and node in last_read:
            live.add(node)
        live.difference_update(dying.get(node, ()))
        if live == {node}:
            sole.append(node)
    return sole


def _cumulative_flops(program: Program, values: Sequence[Value]) -> list[int]:
    """Floating point operations per sample up to each call."""
    known = dict(enumerate(values))
    counts = []
    for node, call in enumerate(program.calls, program.first_call):
        bound = bind(operators()[call.op], call.args, known)
        counts.append(flops_of(call.op, bound, values[node]))
    return list(itertools.accumulate(counts))


class FrozenGraph:
    """The frozen region of a model, which can be cut at each of its cuts.

    Its modules share its weights.  They have no trainable parameters and do
    not change their input.

    Args:
        program: checked program; its last call is the output.
        weights: weights by id, 1 to ``program.num_weights``.
        values: results of :func:`hapi_splitter.graph.shapes.infer`.
        names: module path of each call, for :attr:`Cut.name`.
        transform: from stored bytes to a sample, if the region has one.
        digest: sha256 of the package, hexadecimal.
        folding: folded batch norms of a fast region; else None.

    Attributes:
        cuts: all cuts, first to last.
        measured_memory: working memory of the fast region on a CPU, by the
            id of the call in order of execution; empty if not measured.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[int, torch.Tensor],
        values: Sequence[Value],
        names: Sequence[str],
        transform: InputTransform | None,
        digest: str,
        folding: Folding | None = None,
    ) -> None:
        self.program = program
        self.weights = dict(weights)
        self.values = tuple(values)
        self.names = tuple(names)
        self.transform = transform
        self.digest = digest
        self.cuts = find_cuts(program, values, names)
        self.measured_memory: Mapping[int, CallMemory] = {}
        self._folding = folding

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.values[INPUT].shape[1:]

    @property
    def form(self) -> SampleForm:
        """Shape and dtype of one sample."""
        return SampleForm(self.input_shape, self.values[INPUT].dtype)

    @cached_property
    def id_limits(self) -> torch.Tensor | None:
        """Limits of ids; see :func:`graph.index_bounds.id_limits`."""
        return id_limits(self.program, self.values)

    def examples(self, count: int) -> torch.Tensor:
        """Returns made-up samples ``[count, *input_shape]`` on the CPU.

        They are the same each time.
        """
        return self.form.examples(count, self.id_limits)

    @property
    def num_cuts(self) -> int:
        return len(self.cuts)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all weights; all cuts share them."""
        return sum(weight.nbytes for weight in self._all_weights.values())

    @property
    def is_on_cpu(self) -> bool:
        """True if all weights are on the CPU."""
        weights = self._all_weights.values()
        return all(weight.device.type == "cpu" for weight in weights)

    @property
    def is_fast(self) -> bool:
        """True if batch norms are folded, so that fewer calls run."""
        return self._folding is not None

    @cached_property
    def known(self) -> Mapping[int, Value]:
        """Facts about each tensor by id, with those that folding adds."""
        folded = self._folding.values() if self._folding else {}
        return {**dict(enumerate(self.values)), **folded}

    @property
    def _all_weights(self) -> dict[int, torch.Tensor]:
        folded = self._folding.weights if self._folding else {}
        return {**self.weights, **folded}

    def prefix(self, cut: int, keep: Collection[int] = ()) -> fx.GraphModule:
        """Returns the storage side: ``[B, *input_shape]`` to
        ``[B, *cut.shape]``.

        The module's result may be a view.  In a fast region channels may be
        innermost in memory.  With cut 0 the result is the input itself.

        Args:
            cut: 0 to ``num_cuts``.
            keep: ids of cuts' tensors that must be results of calls of their
                own, so that they can be read while the module runs.

        Raises:
            UnsupportedError: ``cut_out_of_range``.
        """
        return self._range(INPUT, self.node_at(cut), keep)

    def suffix(self, cut: int) -> fx.GraphModule:
        """Returns the client side: ``[B, *cut.shape]`` to the last shape.

        Raises:
            UnsupportedError: ``cut_out_of_range``.
        """
        return self._range(self.node_at(cut), self.program.output)

    def to(
        self, device: torch.device | str, fast: bool = False
    ) -> FrozenGraph:
        """Returns the same region with its weights on ``device``.

        Args:
            device: device of the weights.
            fast: True to fold batch norms into convolutions and to lay out
                weights for the device, as copies.  A region that is fast
                stays fast, and its weights are copied only if they move.
        """
        device = torch.device(device)
        if self._folding is not None:
            return self._arranged(self.weights, self._folding, device)
        if fast:
            folding = fold(self.program, self.weights)
            ends = {cut.node for cut in self.cuts}
            read = weights_read(self.program, folding, ends)
            weights = {node: self.weights[node] for node in read}
            return self._arranged(weights, folding, device, copy=True)
        moved = {
            node: weight.to(device) for node, weight in self.weights.items()
        }
        return self._with(moved, None)

    def node_at(self, cut: int) -> int:
        """Returns the id of the tensor that is live at a cut.

        Raises:
            UnsupportedError: ``cut_out_of_range``.
        """
        if not 0 <= cut <= self.num_cuts:
            raise UnsupportedError(
                "cut_out_of_range",
                f"cut {cut} is not one of 0 to {self.num_cuts}",
                details={"num_cuts": self.num_cuts},
            )
        return self.cuts[cut - 1].node if cut else INPUT

    def program_from(self, start: int, keep: Collection[int] = ()) -> Program:
        """Returns the calls that run from a tensor on, with the same ids.

        Args:
            start: id of a cut's tensor, or of the input.
            keep: as for :meth:`prefix`.
        """
        if self._folding is None:
            return self.program
        return self._folding.applied(self.program, {start, *keep})

    def fused_into(self, node: int) -> int:
        """Returns the call whose result is a cut's tensor if a run passes it.

        It is the cut's own call, or the one into which its convolution was
        folded.
        """
        if self._folding is None:
            return node
        return self._folding.convolutions.get(node, node)

    def _arranged(
        self,
        weights: Mapping[int, torch.Tensor],
        folding: Folding,
        device: torch.device,
        copy: bool = False,
    ) -> FrozenGraph:
        folded = arranged(
            folding.applied(self.program), folding.weights, device
        )
        return self._with(
            arranged(self.program, weights, device, copy),
            replace(folding, weights=folded),
        )

    def _with(
        self, weights: Mapping[int, torch.Tensor], folding: Folding | None
    ) -> FrozenGraph:
        region = FrozenGraph(
            self.program,
            weights,
            self.values,
            self.names,
            self.transform,
            self.digest,
            folding,
        )
        region.measured_memory = self.measured_memory
        return region

    def _range(
        self, start: int, stop: int, keep: Collection[int] = ()
    ) -> fx.GraphModule:
        return lower(
            self.program_from(start, keep),
            self.values,
            self._all_weights,
            start,
            stop,
        )
