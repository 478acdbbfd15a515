"""The trainable part of a model after the freeze point.

The user's own forward runs. Modules that end before the freeze point answer
with stand-ins, and the freeze point with the features, so that every statement
after it is the user's own: gradients that are off, autocast, hooks, random
numbers, attributes and modes. Up to the freeze point, the model's code has to
do what it did when the model was split
(:mod:`hapi_splitter.freezing.replay`).
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, no_type_check

import torch
from torch import nn

from hapi_splitter.freezing.frozen_attributes import FrozenAttributes
from hapi_splitter.freezing.frozen_weights import FrozenWeights
from hapi_splitter.freezing.model_checks import SplitWarning, device_of
from hapi_splitter.freezing.region import sent_shape
from hapi_splitter.freezing.replay import StepMemory
from hapi_splitter.freezing.tail_call import TailPlan, TailRunner
from hapi_splitter.graph.operators import HALVES


class Tail(nn.Module):
    """A model after its freeze point.

    Its parameters, buffers and submodules are the model's own under the same
    names, without those that only the frozen region uses. An optimiser or a
    ``state_dict`` of the model includes what is trained here.

    Args:
        model: the user's model.
        plan: its forward after the freeze point.
        memory: what the calls that checked the plan have remembered.
    """

    def __init__(
        self, model: nn.Module, plan: TailPlan, memory: StepMemory
    ) -> None:
        super().__init__()
        self._whole = (model,)  # in a tuple it is no submodule
        attributes = FrozenAttributes(
            model, plan.replaced_modules, memory.accepted
        )
        self.frozen_attributes = attributes
        self._runner = TailRunner(model, plan, memory, attributes=attributes)
        self._lock = threading.RLock()
        self._plan = plan
        self._memory = memory
        self._shape = sent_shape(plan.positions)
        replaced = frozenset(plan.replaced_modules)
        self._autocast = autocast_dtype(device_of(model))
        self._is_cast = self._autocast is not None
        self.frozen_weights = FrozenWeights(model, plan.watched)
        _share(self, model, "", plan.frozen, replaced)
        self.training = model.training

    def forward(self, features: torch.Tensor) -> Any:
        """Computes the model's output from features ``[B, *shape]``.

        Raises:
            FreezeError: ``cannot_freeze`` if the model did not run the module
                at the freeze point, or did something else before it than when
                it was split, or if frozen weights or attributes have changed.
            TypeError: if ``features`` is no tensor.
            ValueError: if it has another shape, or was written to.
        """
        with self._lock:
            if torch.compiler.is_compiling():
                return self._runner.run(self._unshared(features))
            self._check_features(features)
            self.frozen_weights.check()
            self.frozen_attributes.check()
            self._check_autocast(features.device)
            given = self._unshared(self._cast(features))
            version = None if given.is_inference() else given._version
            try:
                return self._runner.run(given)
            finally:
                if version is not None and given._version != version:
                    self._memory.writes_features = True
                    if given is features:
                        vars(_whole(features))["_hapi_written"] = True

    def _cast(self, features: torch.Tensor) -> torch.Tensor:
        """Returns features in the tail's dtype if only the frozen part had
        autocast."""
        is_half = features.dtype in HALVES and self._is_cast
        if is_half and autocast_dtype(features.device) is None:
            own = next(self.parameters(), features).dtype
            return features.to(own)
        return features

    def _unshared(self, features: torch.Tensor) -> torch.Tensor:
        """Returns a copy if the model's forward writes to it, so that the
        caller can give it again."""
        return features.clone() if self._memory.writes_features else features

    def _check_features(self, features: Any) -> None:
        shape = self._shape
        if not isinstance(features, torch.Tensor):
            raise TypeError(
                "the tail takes a tensor of features, of shape "
                f"{['B', *shape]}, not a {type(features).__name__}"
            )
        if features.shape[1:] != shape:
            raise ValueError(
                f"the tail takes features of shape {['B', *shape]}, not "
                f"{[*features.shape]}; they are what a split's frozen part "
                "computes from samples"
            )
        if hasattr(_whole(features), "_hapi_written"):
            raise ValueError(
                "the model's forward has written to these features in an "
                "earlier call, so that they are no longer what the frozen "
                "part has computed; load or compute them again, from now on "
                "the tail works on a copy"
            )

    def _check_autocast(self, device: torch.device) -> None:
        """Warns once if autocast is on, but was not on in the split."""
        dtype = autocast_dtype(device)
        if dtype in (None, self._autocast):
            return
        self._autocast = dtype
        warnings.warn(
            f"autocast to {dtype} is on around the tail, but it was not when "
            "the model was split, so that the frozen layers compute in their "
            "own dtype; call split_model with precision='bfloat16', or in the "
            "same autocast, to have them compute as in the whole model",
            SplitWarning,
            stacklevel=3,
        )

    def train(self, mode: bool = True) -> Tail:
        """Calls the model's ``train``; frozen modules keep their modes.

        Their own ``train`` is not called: it may merge weights, as LoRA's.
        """
        (model,) = self._whole
        frozen = [
            model.get_submodule(name) for name in self._plan.replaced_modules
        ]
        try:
            for module in frozen:
                module.__dict__["train"] = partial(_unchanged, module)
            model.train(mode)
        finally:
            for module in frozen:
                module.__dict__.pop("train", None)
        self.training = mode
        return self

    @no_type_check  # torch's method is untyped
    def _apply(self, fn: Any, recurse: bool = True) -> Tail:
        """Converts also what runs before the freeze point."""
        super()._apply(fn, recurse)
        for name in (*self._plan.open_modules, *self._plan.run_modules):
            module = self._whole[0].get_submodule(name)
            nn.Module._apply(module, fn, recurse=False)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tail:
        """Copies the tail; the copy shares the frozen parameters."""
        (model,) = self._whole
        for name, tensor in (
            *model.named_parameters(),
            *model.named_buffers(),
        ):
            if name in self._plan.frozen:
                memo[id(tensor)] = tensor
        return Tail(copy.deepcopy(model, memo), self._plan, self._memory)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tail, (*self._whole, self._plan, self._memory)


def whole_model(tail: nn.Module) -> nn.Module:
    """Returns the model of a tail; a module that is none is returned."""
    return tail._whole[0] if isinstance(tail, Tail) else tail


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype of autocast on a device; None if it is off."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor of which another one is a part, or itself."""
    return tensor if tensor._base is None else tensor._base


def _unchanged(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


class _Remaining(MutableMapping[str, Any]):
    """A module's parameters, buffers or modules without the frozen ones."""

    def __init__(
        self,
        entries: MutableMapping[str, Any],
        hidden: Collection[str],
        replaced: Mapping[str, nn.Module],
    ) -> None:
        self._entries = entries
        self._hidden = hidden
        self._replaced = replaced

    def __getitem__(self, name: str) -> Any:
        if name in self._hidden:
            raise KeyError(name)
        if name in self._replaced:
            return self._replaced[name]
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._entries if name not in self._hidden)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def copy(self) -> dict[str, Any]:
        return dict(self)


def _share(
    part: nn.Module,
    module: nn.Module,
    path: str,
    frozen: frozenset[str],
    replaced: frozenset[str],
) -> None:
    """Makes ``part`` show a module's entries without the frozen ones."""
    prefix = f"{path}." if path else ""
    hidden, partly = set(), {}
    for name, child in module.named_children():
        tensors = {
            f"{prefix}{name}.{key}"
            for named in (child.named_parameters, child.named_buffers)
            for key, _ in named(remove_duplicate=False)
        }
        if prefix + name in replaced or (tensors and tensors <= frozen):
            hidden.add(name)
        elif tensors & frozen:
            partly[name] = nn.Module()
            _share(partly[name], child, prefix + name, frozen, replaced)
    own = {name[len(prefix) :] for name in frozen if name.startswith(prefix)}
    entries = module.__dict__
    part.__dict__["_parameters"] = _Remaining(entries["_parameters"], own, {})
    part.__dict__["_buffers"] = _Remaining(entries["_buffers"], own, {})
    part.__dict__["_modules"] = _Remaining(entries["_modules"], hidden, partly)
    part._non_persistent_buffers_set = module._non_persistent_buffers_set
