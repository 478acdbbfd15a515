"""How much memory a prefix needs, from recomputed shapes alone.

Every call is one step: the tensors live there, its result and the
workspace of its kernel. A step needs ``constant + batch * per_sample``
bytes; the peak is the largest step plus the parameters. Views cost nothing,
what may be a copy counts as one, buffers are reused exactly as
:mod:`hapi_splitter.graph.lowering` does.

A sixty-fourth and a quarter of a MiB are added for what allocators round up
to and for scratch memory: benchmarks/memory.py found at most 0.3 % and 0.5
MiB more than without. Not counted is what a GPU's libraries take beside this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.encodings import encoder_step
from hapi_splitter.graph.buffer_reuse import BufferReuse
from hapi_splitter.graph.lowering import needed
from hapi_splitter.graph.program import INPUT
from hapi_splitter.profiling.kernel_workspace import (
    Site,
    Step,
    added,
    allocates,
    need,
    without,
    workspace,
)

_ROUNDED_UP = 64
"""The part of a step that is added to it."""
_SCRATCH_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Needs:
    """What a prefix needs, for any batch.

    Args:
        parameter_bytes: of the whole region.
        steps: those that can be the largest for some batch.
    """

    parameter_bytes: int
    steps: tuple[Step, ...]

    def peak_bytes(self, batch: int) -> int:
        """Bytes for a batch, its input and the parameters included."""
        return self.parameter_bytes + max(
            constant + batch * per_sample
            for constant, per_sample in self.steps
        )

    def batch_for(self, available_bytes: int, maximum: int) -> int:
        """The largest batch up to ``maximum`` that fits, 0 if none does."""
        free = available_bytes - self.parameter_bytes
        batch = maximum
        for constant, per_sample in self.steps:
            if free < constant:
                return 0
            if per_sample:
                batch = min(batch, (free - constant) // per_sample)
        return max(batch, 0)


def needs_of(
    frozen: FrozenGraph, cut: int, encoding: str | None = None
) -> Needs:
    """What ``frozen.prefix(cut)`` needs, and the encoding of its result.

    Args:
        frozen: the region.
        cut: 0 to ``num_cuts``.
        encoding: that is made of the features on the same device; None for
            the prefix alone.

    Raises:
        AnnotationError: ``unknown_encoding``.
        UnsupportedError: ``cut_out_of_range``.
    """
    every = list(steps(frozen, cut))
    if encoding is not None:
        shape = frozen.cuts[cut - 1].shape if cut else frozen.input_shape
        every.append(added(every[-1], encoder_step(shape, encoding)))
    kept: list[Step] = []
    for step in sorted(set(every), reverse=True):
        # The constants fall, so a step counts only if it grows faster.
        if not kept or step[1] > kept[-1][1]:
            kept.append(step)
    return Needs(frozen.parameter_bytes, tuple(kept))


def peak_bytes(frozen: FrozenGraph, cut: int, batch: int) -> int:
    """:meth:`Needs.peak_bytes` of one prefix.

    Raises:
        UnsupportedError: ``cut_out_of_range``.
    """
    return needs_of(frozen, cut).peak_bytes(batch)


def batch_for(
    frozen: FrozenGraph, cut: int, available_bytes: int, maximum: int
) -> int:
    """:meth:`Needs.batch_for` of one prefix.

    Raises:
        UnsupportedError: ``cut_out_of_range``.
    """
    return needs_of(frozen, cut).batch_for(available_bytes, maximum)


def largest_sample_bytes(frozen: FrozenGraph) -> int:
    """Of a sample's part of a tensor: the input, or what a call computes."""
    return max(need(value)[1] for value in frozen.values)


def steps(frozen: FrozenGraph, cut: int) -> Iterator[Step]:
    """The needs of the input alone, of each call of a prefix, and of what
    is left at its end, the input included."""
    for constant, per_sample in _steps(frozen, frozen.node_at(cut)):
        yield (
            constant + constant // _ROUNDED_UP + _SCRATCH_BYTES,
            per_sample + per_sample // _ROUNDED_UP,
        )


def _steps(frozen: FrozenGraph, stop: int) -> Iterator[Step]:
    program, values = frozen.stretch(INPUT), frozen.values
    nodes = needed(program, INPUT, stop)
    reuse = BufferReuse(program, values, nodes, INPUT, stop)
    live = {INPUT}
    total = need(values[INPUT])
    yield total
    for node in nodes:
        site = Site.of(frozen, program.call(node), values[node])
        in_place = reuse.target(node) is not None
        if allocates(site) and not in_place:
            live.add(node)
            total = added(total, need(values[node]))
        yield added(total, workspace(site))
        for dead in reuse.released_by(node):
            if dead in live:
                live.remove(dead)
                total = without(total, need(values[dead]))
        if in_place:
            live.add(node)
            total = added(total, need(values[node]))
    yield total
