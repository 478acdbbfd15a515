"""Runs a model from its freeze point on.

Modules that end before the freeze point answer with stand-ins for the length
of one call, and at the freeze point the features enter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.places import Act, Place, watch
from hapi_splitter.freezing.region import unpacked
from hapi_splitter.freezing.stand_ins import StandIn, TensorForm
from hapi_splitter.freezing.structures import unflatten

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_CHECKPOINT = "torch.utils.checkpoint"


@dataclass(frozen=True)
class TailPlan:
    """A model's forward after the freeze point, as plain values.

    Args:
        places: where features enter; the last is the freeze point.
        stand_ins: results of the modules that are replaced.
        samples: forms of the model's own input.
        samples_spec: structure of the input, ``(args, kwargs)``.
        open_modules: modules whose forward contains the freeze point.
        run_modules: modules before the freeze point that run nevertheless.
        run_parameters: frozen parameters that the code before the freeze
            point reads nevertheless.
        frozen: names of the parameters and buffers that are not in the tail.
        filling: value of stand-ins.
    """

    places: tuple[Place, ...]
    stand_ins: tuple[StandIn, ...]
    samples: tuple[TensorForm, ...]
    samples_spec: pytree.TreeSpec
    open_modules: tuple[str, ...]
    run_modules: tuple[str, ...]
    run_parameters: tuple[str, ...]
    frozen: frozenset[str]
    filling: float = float("nan")


class TailRunner:
    """Runs one model from its freeze point on.

    Args:
        model: the user's model.
        plan: its forward after the freeze point.
        at_freeze_point: called when the features enter.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: TailPlan,
        at_freeze_point: Callable[[], None] | None = None,
    ) -> None:
        self._model = model
        self._plan = plan
        self._at_freeze_point = at_freeze_point
        find = model.get_submodule
        self._replaced = [(find(s.module), s) for s in plan.stand_ins]
        self._open = modules_before(model, plan)
        self._parameters = [
            model.get_parameter(name) for name in plan.run_parameters
        ]
        self._filled: tuple[Any, dict[str, Sequence[Any]]] = None, {}

    def run(self, features: torch.Tensor) -> Any:
        """Returns the model's result.

        Args:
            features: ``[B, *shape]``.

        Raises:
            FreezeError: ``cannot_freeze`` if the model did not run the module
                at the freeze point.
        """
        following = self._following()
        if following is not None:
            if self._at_freeze_point is not None:
                self._at_freeze_point()
            for module in following:
                features = module(features)
            return features
        batch, device = features.shape[0], features.device
        filled = [
            form.filled(self._plan.filling, batch, device)
            for form in self._plan.samples
        ]
        args, kwargs = unflatten(filled, self._plan.samples_spec)
        entered: list[Place] = []
        with ExitStack() as stack:
            stack.enter_context(self._replaced_modules(batch, device))
            restore = stack.enter_context(self._eval_mode())
            for place, part in zip(
                self._plan.places,
                unpacked(features, self._plan.places),
                strict=True,
            ):
                act = self._enter(place, part, entered, restore)
                watch(self._model, place, act, stack)
            result = self._model(*args, **kwargs)
        last = self._plan.places[-1]
        if last not in entered:
            raise FreezeError(
                "cannot_freeze",
                f"this forward of {type(self._model).__name__} did not run "
                f"{last.module!r}, where the frozen part ends, so that the "
                "features have no effect; freeze an earlier module",
            )
        return result

    def _following(self) -> list[nn.Module] | None:
        """Returns the modules after the freeze point if nothing else runs.

        None unless they are in ``nn.Sequential``s without code of their own.
        """
        (*others, place), found = self._plan.places, []
        if others or place.operations:
            return None
        name, first = place.module, int(place.is_end)
        while name:
            name, _, child = name.rpartition(".")
            parent = self._model.get_submodule(name)
            if type(parent) is not nn.Sequential or "forward" in vars(parent):
                return None
            if any(vars(parent)[hooks] for hooks in _HOOKS):
                return None
            place_in_parent = list(parent._modules).index(child)
            found += list(parent)[place_in_parent + first :]
            first = 1
        return found

    def _enter(
        self,
        place: Place,
        features: torch.Tensor,
        entered: list[Place],
        restore_modes: Callable[[], None],
    ) -> Act:
        def enter(_: torch.Tensor) -> torch.Tensor:
            entered.append(place)
            if place == self._plan.places[-1]:
                restore_modes()
                if _is_repeated(place):
                    raise FreezeError(
                        "cannot_freeze",
                        "gradient checkpointing would repeat the frozen "
                        f"module {place.module!r} in the backward pass; "
                        "switch it off where the frozen part ends",
                    )
                if self._at_freeze_point is not None:
                    self._at_freeze_point()
            return features

        return enter

    @contextmanager
    def _replaced_modules(
        self, batch: int, device: torch.device
    ) -> Iterator[None]:
        """Makes modules answer with stand-ins, without their hooks."""
        changed: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for module, stand_in in self._replaced:
                attributes = module.__dict__
                for name in _HOOKS:
                    if attributes[name]:
                        changed.append((attributes, name, attributes[name]))
                        attributes[name] = type(attributes[name])()
                before = attributes.get("forward")
                changed.append((attributes, "forward", before))
                attributes["forward"] = self._answer(stand_in, batch, device)
            yield
        finally:
            for attributes, name, before in reversed(changed):
                if before is None:
                    del attributes[name]
                else:
                    attributes[name] = before

    def _answer(
        self, stand_in: StandIn, batch: int, device: torch.device
    ) -> Callable[..., Any]:
        key = batch, device
        if self._filled[0] != key:
            self._filled = key, {}
        results = self._filled[1].get(stand_in.module)
        if results is None:
            results = [
                stand_in.result(call, self._plan.filling, batch, device)
                for call in range(len(stand_in.specs))
            ]
            if not stand_in.is_mutable:
                self._filled[1][stand_in.module] = results
        if len(results) == 1:
            (result,) = results
            return lambda *args, **kwargs: result
        calls, last = iter(results), results[-1]
        return lambda *args, **kwargs: next(calls, last)

    @contextmanager
    def _eval_mode(self) -> Iterator[Callable[[], None]]:
        """Sets what runs before the freeze point to eval mode.

        Yields:
            A function that restores the modes, for the freeze point.
        """
        modules = [*self._open, *(module for module, _ in self._replaced)]
        trained = [each for each in modules if each.training]
        read = [each for each in self._parameters if each.requires_grad]

        def restore() -> None:
            for module in trained:
                module.__dict__["training"] = True

        try:
            for module in trained:
                module.__dict__["training"] = False
            for parameter in read:
                parameter.requires_grad = False
            yield restore
        finally:
            restore()
            for parameter in read:
                parameter.requires_grad = True


def modules_before(model: nn.Module, plan: TailPlan) -> list[nn.Module]:
    """Returns modules that run, in eval mode, before the freeze point."""
    modules = [model.get_submodule(name) for name in plan.open_modules]
    for name in plan.run_modules:
        modules += model.get_submodule(name).modules()
    return modules


def _is_repeated(place: Place) -> bool:
    """Returns True if gradient checkpointing will run the freeze point again.

    It does not if the module that ends there is checkpointed by itself:
    nothing in it needs a gradient.
    """
    if torch.compiler.is_compiling():
        return False  # compiled code repeats nothing outside itself
    frame, inside = sys._getframe(1), place.is_end and not place.operations
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_globals.get("__name__", "")
        if name == _CHECKPOINT:
            return not inside
        inside &= name.startswith(("hapi_splitter.", "torch.nn.modules."))
    return False
