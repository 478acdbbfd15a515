"""Partial backward passes: virtual nodes train only the last layers.

After SPB (arXiv 2111.10672), in which each worker computes gradients of the
last layers only, from a depth on that changes with the step.  Here the nodes
do, so that the result does not depend on the workers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hapi_client.option_checks import check_integer
from hapi_protocol.errors import ClientError
from hapi_training.freeze_schedule import depth, segment_starts
from hapi_training.layer_uses import FlagReads, LayerUses

logger = logging.getLogger(__name__)

# Measured: a head of two layers with 8 million gained 1.06 of 1.23, the tail
# of a ResNet-18 with 500 million as much as it could (benchmarks/partial.py).
MIN_OPERATIONS = 1e8
"""Floating-point operations of a node below which a warning says so."""


@dataclass(frozen=True)
class PartialBackward:
    """Lets each virtual node train only the last layers of the module.

    ::

        nodes = VirtualNodes(tail, 8, partial=PartialBackward(4))

    The parameters are divided into segments, in the order in which the
    module uses them, so that a backward pass takes as many operations in
    each.  A node trains the last segments, from a depth on that changes with
    each step, and neither computes nor keeps what the others would need.  The
    gradient of a segment is the mean over the nodes that train it: fewer
    samples, none of them preferred.  It takes fewer seconds a step, and
    more steps.

    Args:
        segments: number of segments, at least 2; it divides the number of
            virtual nodes.
        warmup_steps: first steps of the run, in which all nodes train all
            layers.  The first step of a run always is such a step, as the
            layers are measured in it.

    Raises:
        ClientError: ``bad_configuration`` naming the value.
    """

    segments: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_integer("segments", self.segments, 2)
        check_integer("warmup_steps", self.warmup_steps, 0)

    def check_nodes(self, num_nodes: int) -> None:
        """Refuses numbers of nodes that segments do not divide."""
        if num_nodes % self.segments:
            least = -(-num_nodes // self.segments) * self.segments
            raise ClientError(
                "bad_configuration",
                f"{self.segments} segments do not divide {num_nodes} virtual "
                "nodes, so that some nodes would train a segment less often; "
                f"give {least} virtual nodes, or other segments",
            )


class Segments:
    """The segments of a module, and the depth of each node.

    Args:
        module: the module.
        partial: number of segments, and warm-up; None for a single segment.
        num_nodes: number of virtual nodes.

    Attributes:
        count: number of segments.
        table: segment of each parameter that is trained, by name, in the
            order of the module; empty until a step has measured the layers.
        measured: the same numbers, when a node of this step has measured
            them.  The first worker's become the table.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        partial: PartialBackward | None,
        num_nodes: int,
    ) -> None:
        self.count = 1
        self._warmup_steps = 0
        if partial is not None:
            partial.check_nodes(num_nodes)
            self.count = partial.segments
            self._warmup_steps = partial.warmup_steps
        self._module = module
        self._num_nodes = num_nodes
        self.table: dict[str, int] = {}
        self.measured: list[int] = []
        self._is_measured = False
        self._uses: LayerUses | None = None

    @property
    def is_unknown(self) -> bool:
        """True in a step that measures the layers."""
        return self.count > 1 and not self.table

    def facts(self) -> dict[str, Any]:
        """Numbers that the bits of a run depend on, fit for JSON."""
        return {"segments": self.count, "warmup_steps": self._warmup_steps}

    def begin_step(self) -> None:
        """Forgets the segments if other parameters are trained now."""
        names = [*_trained(self._module)]
        if names != [*self.table]:
            self.table = {}
        self.measured = [0] * len(names)
        self._is_measured = False

    def depth(self, step: int, node: int) -> int:
        """Returns the first segment that a node trains in a step."""
        if not self.table or step < self._warmup_steps:
            return 0
        return depth(step, node, self._num_nodes, self.count)

    def of_parameters(self) -> list[int]:
        """Returns the segment of each parameter."""
        return [*self.table.values()] or [0] * len(self.measured)

    def use_measured(self) -> None:
        """Makes what was measured in this step the table."""
        if self.is_unknown:
            names = _trained(self._module)
            self.table = dict(zip(names, self.measured, strict=True))

    @contextmanager
    def node(self, step: int, node: int) -> Iterator[None]:
        """Lets autograd see only the layers that a node trains.

        Raises:
            ClientError: ``bad_configuration`` for a module whose backward
                pass cannot be cut.
        """
        if self.is_unknown:
            if self._is_measured:
                yield
                return
            named = _trained(self._module)
            self._uses = uses = LayerUses(self._module, named)
            with FlagReads(self._module, uses), uses:
                yield
            self._uses = None
            self._measure(uses, named)
            self._is_measured = True
            return
        first = self.depth(step, node)
        frozen = [
            self._module.get_parameter(name)
            for name, segment in self.table.items()
            if segment < first
        ]
        # Frozen layers of nn.Transformer would compute other bits.
        is_fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(is_fast and not frozen)
        # Until behind the backward pass, in which layers may be computed
        # again (activation checkpointing).
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(is_fast)
            for parameter in frozen:
                parameter.requires_grad_(True)

    def end_forward(self) -> None:
        """Notes that a backward pass begins, which uses parameters again."""
        if self._uses is not None:
            self._uses.is_forward = False

    def _measure(
        self, uses: LayerUses, named: Mapping[str, torch.nn.Parameter]
    ) -> None:
        for name in uses.without_gradient - uses.with_gradient:
            if named[name].grad is not None:
                raise ClientError(
                    "bad_configuration",
                    f"the layer of {name!r} is computed under no_grad first, "
                    "and again in the backward pass, which partial backward "
                    "passes cannot cut; give "
                    "torch.utils.checkpoint(…, use_reentrant=False)",
                )
        layers = uses.costly_layers()
        if len(layers) < self.count:
            raise ClientError(
                "bad_configuration",
                f"the module has {len(layers)} layers whose backward pass "
                f"takes matrix operations, fewer than {self.count} segments; "
                "give fewer segments, or leave out partial=, by which a head "
                "alone gains nothing",
            )
        costs = [layer.operations for layer in layers]
        starts = segment_starts(costs, self.count)
        segment_of = {
            name: sum(start <= number for start in starts) - 1
            for number, layer in enumerate(layers)
            for name in layer.names
        }
        # One that is not used now may be used later, and is always trained.
        last = self.count - 1
        self.measured = [segment_of.get(name, last) for name in named]
        kept = sum(
            sum(costs[start:]) - layers[start].of_inputs for start in starts
        ) / len(starts)
        whole = uses.forward + sum(costs)
        if whole < MIN_OPERATIONS:
            logger.warning(
                "partial backward passes gain little here: the passes of a "
                "virtual node take %.3g million operations, less than what "
                "is around them; leave out partial=, or train more layers",
                whole / 1e6,
            )
        logger.info(
            "segments begin with the layers %s; highest speed-up %.2f",
            [layers[start].names[0] for start in starts],
            whole / (uses.forward + kept),
        )
        again = {
            name: (segment_of[name], segment_of[layer.names[0]])
            for name, layer in uses.used_again
            if segment_of[name] != segment_of[layer.names[0]]
        }
        if again:
            name, segments = next(iter(again.items()))
            logger.warning(
                "%d parameters are used in two segments, such as %r in %d and "
                "%d; they are trained with the first, as with the later one "
                "each backward pass would run down to their first use",
                len(again),
                name,
                *segments,
            )


def _trained(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
