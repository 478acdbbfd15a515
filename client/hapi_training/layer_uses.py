"""Measures a forward pass: layers in order of use, and their operations."""

from __future__ import annotations

import sys
from collections.abc import Mapping
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

from hapi_protocol.errors import ClientError

_FLAGS = {
    getattr(torch.Tensor, name).__get__: name
    for name in ("requires_grad", "grad_fn", "is_leaf")
}
"""Getters whose results depend on what is trained."""
_RECURRENT = (torch.ops.aten.mkldnn_rnn_layer, torch.ops.aten._cudnn_rnn)
"""Operators of LSTMs, which torch does not count."""


@dataclass
class Layer:
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


class LayerUses(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        self._layers: list[Layer] = []
        self._repeated: list[str] = []
        self.forward = 0.0
        self.is_forward = True
        self.without_gradient: set[str] = set()
        self.with_gradient: set[str] = set()
        self.used_again: list[tuple[str, Layer]] = []

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
        is_known = name in self.with_gradient | self.without_gradient
        is_enabled = torch.is_grad_enabled()
        (self.with_gradient if is_enabled else self.without_gradient).add(name)
        if is_known:
            self._repeated.append(name)
            return
        layer = self._layers[-1] if self._layers else None
        if layer is None or layer.owner is not owner or layer.operations:
            layer = Layer(owner, [])
            self._layers.append(layer)
        layer.names.append(name)

    def is_trained(self, tensor: torch.Tensor) -> bool:
        """True for a parameter that is trained."""
        return id(tensor) in self._owned

    def _recurrent_operations(self, args: tuple[Any, ...]) -> int:
        """Operations of a layer that multiplies each row by its weights."""
        rows = args[0].numel() // args[0].shape[-1]
        leaves = tree_leaves(args[1:])
        weights = [x for x in leaves if self.is_trained(x) and x.dim() == 2]
        return int(2 * rows * sum(weight.numel() for weight in weights))

    def costly_layers(self) -> list[Layer]:
        """Returns the layers in order of use.

        Parameters without a product, as those of norms, are put to the layer
        before: their gradients need none of a product then.
        """
        layers: list[Layer] = []
        for layer in self._layers:
            if layers and not (layer.operations and layers[-1].operations):
                layers[-1].names += layer.names
                layers[-1].operations += layer.operations
                layers[-1].of_inputs += layer.of_inputs
            else:
                layers.append(layer)
        return [layer for layer in layers if layer.operations]


class FlagReads(TorchFunctionMode):
    """Refuses a forward pass that depends on what is trained.

    Args:
        module: the module.
        uses: knows whether the forward pass has ended.
    """

    def __init__(self, module: torch.nn.Module, uses: LayerUses) -> None:
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
