"""Partial backward passes: virtual nodes train only the last layers.

After SPB (arXiv 2111.10672), in which each worker computes gradients of the
last layers only, from a depth on that changes with the step.  Here the nodes
do, so that the result does not depend on the workers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hapi_client.option_checks import check_integer
from hapi_protocol.errors import ClientError
from hapi_training.freeze_schedule import depth, segment_starts

logger = logging.getLogger(__name__)

# Measured: a head of two layers with 8 million gained 1.06 of 1.23, the tail
# of a ResNet-18 with 500 million as much as it could (benchmarks/partial.py).
MIN_OPERATIONS = 1e8
"""Floating-point operations of a node below which a warning says so."""


_FLAGS = {
    getattr(torch.Tensor, name).__get__: name
    for name in ("requires_grad", "grad_fn", "is_leaf")
}
"""Getters whose results depend on what is trained."""
_RECURRENT = (torch.ops.aten.mkldnn_rnn_layer, torch.ops.aten._cudnn_rnn)
"""Operators of LSTMs, which torch does not count."""


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
        self._uses: _LayerUses | None = None

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
            self._uses = uses = _LayerUses(self._module, named)
            with _FlagReads(self._module, uses), uses:
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
        self, uses: _LayerUses, named: Mapping[str, torch.nn.Parameter]
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


@dataclass
class _Layer:
    """Parameters of one module that are used one after another.

    Attributes:
        owner: the module.
        names: names of the parameters.
        operations: floating-point operations of the backward pass.
        of_inputs: those for the gradient of its inputs, which the first of
            the trained layers does not need.
    """

    owner: torch.nn.Module
    names: list[str]
    operations: float = 0.0
    of_inputs: float = 0.0


class _LayerUses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the order in which a forward pass uses parameters, and its cost.

    Args:
        module: the module.
        named: its parameters that are trained.

    Attributes:
        forward: floating-point operations of the forward pass.
        is_forward: False from the backward pass on.
        without_gradient: names of parameters that are used under no_grad.
        with_gradient: those that are used otherwise.
        used_again: names of parameters that are used again, each with the
            layer in which they are.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        named: Mapping[str, torch.nn.Parameter],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        owners = {
            id(parameter): owner
            for owner in reversed([*module.modules()])
            for parameter in owner.parameters(recurse=False)
        }
        for owner in module.modules():
            if is_parametrized(owner):
                # As that of weight_norm, which is no layer of its own.
                originals = owner.get_submodule("parametrizations")
                owners |= {id(p): owner for p in originals.parameters()}
        self._owned = {
            id(parameter): (name, owners[id(parameter)])
            for name, parameter in named.items()
        }
        self._layers: list[_Layer] = []
        self._known: set[str] = set()
        self._repeated: list[str] = []
        self.forward = 0.0
        self.is_forward = True
        self.without_gradient: set[str] = set()
        self.with_gradient: set[str] = set()
        self.used_again: list[tuple[str, _Layer]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.is_forward:
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self._owned:
                    self._note_use(*self._owned[id(leaf)])
            operations = 0
            count = flop_registry.get(func._overloadpacket)
            if count is not None:
                operations = count(*args, **kwargs, out_val=result)
            elif func._overloadpacket in _RECURRENT:
                operations = self._recurrent_operations(args)
            if operations:
                self.forward += operations
                # A product takes another for the gradient of each factor;
                # vectors are what is added to it.
                factors = [
                    value
                    for value in args
                    if isinstance(value, torch.Tensor)
                    and value.requires_grad
                    and value.dim() > 1
                ]
                if self._layers:
                    layer = self._layers[-1]
                    if not layer.operations and len(factors) > 1:
                        layer.of_inputs = operations
                    layer.operations += operations * len(factors)
                    self.used_again += [(n, layer) for n in self._repeated]
                self._repeated = []
        return result

    def _note_use(self, name: str, owner: torch.nn.Module) -> None:
        is_enabled = torch.is_grad_enabled()
        (self.with_gradient if is_enabled else self.without_gradient).add(name)
        layer = self._layers[-1] if self._layers else None
        if name in self._known:
            self._repeated.append(name)
            return
        if layer is None or layer.owner is not owner or layer.operations:
            layer = _Layer(owner, [])
            self._layers.append(layer)
        layer.names.append(name)
        self._known.add(name)

    def is_trained(self, tensor: torch.Tensor) -> bool:
        """True for a parameter that is trained."""
        return id(tensor) in self._owned

    def _recurrent_operations(self, args: tuple[Any, ...]) -> int:
        """Operations of a layer that multiplies each row by its weights."""
        rows = args[0].numel() // args[0].shape[-1]
        leaves = tree_leaves(args[1:])
        weights = [x for x in leaves if self.is_trained(x) and x.dim() == 2]
        return int(2 * rows * sum(weight.numel() for weight in weights))

    def costly_layers(self) -> list[_Layer]:
        """Returns the layers in order of use.

        Parameters without a product, as those of norms, are put to the layer
        before: their gradients need none of a product then.
        """
        layers: list[_Layer] = []
        for layer in self._layers:
            if layers and not (layer.operations and layers[-1].operations):
                layers[-1].names += layer.names
                layers[-1].operations += layer.operations
                layers[-1].of_inputs += layer.of_inputs
            else:
                layers.append(layer)
        return [layer for layer in layers if layer.operations]


class _FlagReads(TorchFunctionMode):
    """Refuses a forward pass that depends on what is trained.

    Args:
        module: the module.
        uses: knows whether the forward pass has ended.
    """

    def __init__(self, module: torch.nn.Module, uses: _LayerUses) -> None:
        super().__init__()
        self._uses = uses
        self._modules = {id(part) for part in module.modules()}
        # Modules that compute now.
        self._inside: list[torch.nn.Module] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> Any:
        def begin(module: torch.nn.Module, _: Any) -> None:
            if id(module) in self._modules:
                self._inside.append(module)

        def end(module: torch.nn.Module, *_: Any) -> None:
            if module in self._inside:
                self._inside.remove(module)

        self._hooks = [
            register_module_forward_pre_hook(begin),
            register_module_forward_hook(end, always_call=True),
        ]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (
            func in _FLAGS
            and self._inside
            and self._uses.is_forward
            and (args[0].grad_fn or self._uses.is_trained(args[0]))
        ):
            reader = sys._getframe(1).f_globals.get("__name__", "")
            # torch's own modules compute the same in all cases.
            if not reader.startswith("torch."):
                raise ClientError(
                    "bad_configuration",
                    f"the forward pass of {type(self._inside[-1]).__name__} "
                    f"reads {_FLAGS[func]} of a tensor, which partial "
                    "backward passes change, so that it may compute something "
                    "else; leave out partial=, or this condition",
                )
        return func(*args, **(kwargs or {}))
