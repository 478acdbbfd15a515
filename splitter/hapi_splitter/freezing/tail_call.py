"""Runs a model from its freeze point on.

Modules that end before the freeze point answer with stand-ins for the length
of one call, and at the freeze point the features enter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils import _pytree as pytree

from hapi_protocol.errors import cannot_freeze
from hapi_splitter.freezing.frozen_attributes import FrozenAttributes
from hapi_splitter.freezing.module_answers import HOOKS, answered
from hapi_splitter.freezing.region import unpacked
from hapi_splitter.freezing.replay import Replay, StepMemory
from hapi_splitter.freezing.stand_ins import (
    Entry,
    ModuleResult,
    SkippedStep,
)
from hapi_splitter.freezing.structures import unflatten
from hapi_splitter.freezing.tensor_positions import TensorPosition

_GLOBAL_HOOKS = (
    module_hooks._global_forward_hooks,
    module_hooks._global_forward_pre_hooks,
)
_CHECKPOINT = "torch.utils.checkpoint"
_OWN_FRAMES = ("hapi_splitter.", "torch.nn.modules.", "torch._dynamo.")


@dataclass(frozen=True)
class TailPlan:
    """A model's forward after the freeze point, as plain values.

    Args:
        positions: positions of the tensors that are sent; the last is the
            freeze point.
        entries: where these tensors enter the tail.
        steps: that are not computed, in order.
        samples: the model's own input, tensors as
            :class:`~hapi_splitter.freezing.stand_ins.StandIn`.
        samples_spec: structure of the input, ``(args, kwargs)``.
        run_modules: modules before the freeze point that run nevertheless,
            on stand-ins or on what does not depend on the samples.
        open_modules: modules whose forward contains the freeze point.
        run_parameters: frozen parameters that the code before the freeze
            point reads nevertheless.
        frozen: names of the parameters and buffers that are not in the tail.
        watched: those that have to stay what they are.
        random_module: a frozen module that draws random numbers in training;
            "" without one.
    """

    positions: tuple[TensorPosition, ...]
    entries: tuple[Entry, ...]
    steps: tuple[SkippedStep, ...]
    samples: tuple[Any, ...]
    samples_spec: pytree.TreeSpec
    open_modules: tuple[str, ...]
    run_modules: tuple[str, ...]
    run_parameters: tuple[str, ...]
    frozen: frozenset[str]
    watched: tuple[str, ...]
    random_module: str = ""

    @property
    def replaced_modules(self) -> list[str]:
        """Modules that are not run."""
        replaced = [s for s in self.steps if isinstance(s, ModuleResult)]
        return list(dict.fromkeys(step.module for step in replaced))


class TailRunner:
    """Runs one model from its freeze point on.

    Args:
        model: the user's model.
        plan: its forward after the freeze point.
        memory: what calls remember.
        at_freeze_point: called when the features enter.
        attributes: attributes of frozen modules, which have to be the same
            when they are called; None if the caller has none yet.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: TailPlan,
        memory: StepMemory,
        at_freeze_point: Callable[[], None] | None = None,
        attributes: FrozenAttributes | None = None,
    ) -> None:
        self._model = model
        self._plan = plan
        self._memory = memory
        self._at_freeze_point = at_freeze_point
        self._attributes = attributes
        self._before: list[Any] | None = None
        self._following()
        find = model.get_submodule
        self._replaced = {name: find(name) for name in plan.replaced_modules}
        self._frozen_modules = frozen_modules(model, plan)
        self._parameters = [
            model.get_parameter(name) for name in plan.run_parameters
        ]

    def run(self, features: torch.Tensor) -> Any:
        """Returns the model's result.

        Args:
            features: ``[B, *shape]``.

        Raises:
            FreezeError: ``cannot_freeze`` if the model did not run the module
                at the freeze point, or does something before it that it did
                not do when it was split.
        """
        following = self._following()
        if following is not None:
            self._answering()
            if self._at_freeze_point is not None:
                self._at_freeze_point()
            for module in following:
                features = module(features)
            return features
        with ExitStack() as stack:
            restore = stack.enter_context(self._eval_mode())
            replay = Replay(
                self._plan.steps,
                self._plan.entries,
                unpacked(features, self._plan.positions),
                self._memory,
                lambda: self._enter(restore),
                self._answering,
            )
            stack.callback(replay.release)
            stack.enter_context(answered(self._replaced, replay.module_result))
            inputs = replay.inputs(self._plan.samples)
            args, kwargs = unflatten(inputs, self._plan.samples_spec)
            try:
                result = self._model(*args, **kwargs)
            except Exception as error:
                if replay.failure in (None, error):
                    raise
                raise replay.failure from error  # in another one
        if replay.failure is not None:
            raise replay.failure  # the model's code has caught it
        if not replay.has_entered:
            last = self._plan.positions[-1]
            raise cannot_freeze(
                f"this forward of {type(self._model).__name__} did not run "
                f"{last.module!r}, where the frozen part ends, so that the "
                "features have no effect; freeze an earlier module",
            )
        return result

    def _following(self) -> list[nn.Module] | None:
        """Returns the modules after the freeze point if nothing else runs.

        None unless they are in ``nn.Sequential``s without code of their own.

        Raises:
            FreezeError: ``cannot_freeze`` if the frozen ones are others.
        """
        (*others, position), following = self._plan.positions, []
        if others or position.operations or any(map(len, _GLOBAL_HOOKS)):
            return None
        name, first, before = position.module, int(position.is_end), []
        while name:
            name, _, child = name.rpartition(".")
            parent = self._model.get_submodule(name)
            if type(parent) is not nn.Sequential or "forward" in vars(parent):
                return None
            if any(vars(parent)[hooks] for hooks in HOOKS):
                return None
            names, modules = [*parent._modules], [*parent]
            count = names.index(child) + first
            before += [*names[:count], *modules[:count]]
            following += modules[count:]
            first = 1
        # The model itself does not run, which would notice it.
        if self._before is None:
            self._before = before
        if self._before != before:
            raise cannot_freeze(
                "layers before the freeze point have been replaced, added or "
                "removed after the split; split the model again",
            )
        return following

    def _answering(self, name: str = "") -> None:
        """Checks the attributes of a frozen module, or of all."""
        if self._attributes is None or torch.compiler.is_compiling():
            return
        if name:
            self._attributes.check_module(name)
        else:
            self._attributes.check_all()

    def _enter(self, restore_modes: Callable[[], None]) -> None:
        restore_modes()
        position = self._plan.positions[-1]
        if _is_repeated(position):
            raise cannot_freeze(
                "gradient checkpointing would repeat the frozen "
                f"module {position.module!r} in the backward pass; "
                "switch it off where the frozen part ends",
            )
        if self._at_freeze_point is not None:
            self._at_freeze_point()

    @contextmanager
    def _eval_mode(self) -> Iterator[Callable[[], None]]:
        """Sets what is frozen to eval mode, as in the frozen region.

        Yields:
            A function that restores the modes, for the freeze point.
        """
        trained = [m for m in self._frozen_modules if m.training]
        read = [tensor for tensor in self._parameters if tensor.requires_grad]

        def restore() -> None:
            for module in trained:
                module.__dict__["training"] = True

        try:
            for module in trained:
                module.__dict__["training"] = False
            for tensor in read:
                tensor.requires_grad = False
            yield restore
        finally:
            restore()
            for tensor in read:
                tensor.requires_grad = True


def frozen_modules(model: nn.Module, plan: TailPlan) -> list[nn.Module]:
    """Returns the modules before the freeze point, which are in eval mode.

    Of those that are not run, the outermost ones.
    """
    modules = [model.get_submodule(name) for name in plan.replaced_modules]
    for name in plan.run_modules:
        modules += model.get_submodule(name).modules()
    return modules


def _is_repeated(position: TensorPosition) -> bool:
    """Returns True if gradient checkpointing will run the freeze point again.

    It does not if the module that ends there is checkpointed by itself:
    nothing in it needs a gradient.
    """
    if torch.compiler.is_compiling():
        return False  # compiled code repeats nothing outside itself
    frame, inside = (
        sys._getframe(1),
        position.is_end and not position.operations,
    )
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_globals.get("__name__", "")
        if name == _CHECKPOINT:
            return not inside
        inside &= name.startswith(_OWN_FRAMES)
    return False
