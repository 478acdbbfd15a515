"""Runs a model from its freeze point on.

Modules that end before the freeze point answer with stand-ins for the length
of one call, and the freeze point with the features.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.model_run import OperationWatch
from hapi_splitter.freezing.stand_ins import StandIn, TensorForm
from hapi_splitter.graph.program import Affine

_CALL_ATTRIBUTES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_CHECKPOINT = "torch.utils.checkpoint"


@dataclass(frozen=True)
class Source:
    """A place of the model at which features enter.

    Args:
        module: dotted name; "" is the model.
        call: number of its call in the forward.
        is_end: True for its results, False for its arguments.
        index: position among the flattened values.
        form: of the tensor.
        operations: 0, or the features are the result of so many operations
            after that begin or end.
    """

    module: str
    call: int
    is_end: bool
    index: int
    form: TensorForm
    operations: int = 0


@dataclass(frozen=True)
class TailPlan:
    """A model's forward after the freeze point, as plain values.

    Args:
        sources: places at which features enter; the last is the freeze point.
        stand_ins: modules that are replaced.
        samples: forms of the model's own input.
        samples_spec: structure of the input, ``(args, kwargs)``.
        open_modules: modules whose forward contains the freeze point.
        run_modules: modules before the freeze point that run nevertheless.
        run_parameters: frozen parameters that the code before the freeze
            point reads nevertheless.
        frozen: names of the parameters and buffers that are not in the tail.
        filling: value of stand-ins.
    """

    sources: tuple[Source, ...]
    stand_ins: tuple[StandIn, ...]
    samples: tuple[TensorForm, ...]
    samples_spec: pytree.TreeSpec
    open_modules: tuple[str, ...]
    run_modules: tuple[str, ...]
    run_parameters: tuple[str, ...]
    frozen: frozenset[str]
    filling: float = float("nan")


class TailCall:
    """One forward of a model from the freeze point on.

    Args:
        model: the user's model.
        plan: its forward after the freeze point.
        features: ``[B, *shape]``.
        at_freeze_point: called when the features enter.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: TailPlan,
        features: torch.Tensor,
        at_freeze_point: Callable[[], None] | None = None,
    ) -> None:
        self._model = model
        self._plan = plan
        self._at_freeze_point = at_freeze_point
        self._features = dict(
            zip(plan.sources, unpacked(plan, features), strict=True)
        )
        self._batch, self._device = features.shape[0], features.device
        self._watch = OperationWatch(self._replace_result)
        self._modes: list[nn.Module] = []
        self._is_reached = False

    def run(self) -> Any:
        """Returns the model's result.

        Raises:
            FreezeError: ``cannot_freeze`` if the model did not run the module
                at the freeze point.
        """
        with ExitStack() as stack:
            stack.callback(self._restore_modes)
            self._install(stack)
            args, kwargs = pytree.tree_unflatten(
                self._with_features("", 0, False, self._plan.samples),
                self._plan.samples_spec,
            )
            last = self._plan.sources[-1]
            if last.operations:
                stack.enter_context(self._watch)
            result = self._model(*args, **kwargs)
        if not self._is_reached:
            raise FreezeError(
                "cannot_freeze",
                f"this forward of {type(self._model).__name__} did not run "
                f"{last.module!r}, where the frozen part ends, so that the "
                "features have no effect; freeze an earlier module",
            )
        return result

    def _install(self, stack: ExitStack) -> None:
        for stand_in in self._plan.stand_ins:
            module = self._model.get_submodule(stand_in.module)
            _replace(module, "forward", self._answer(stand_in), stack)
            for name in _CALL_ATTRIBUTES:
                if getattr(module, name):
                    _replace(module, name, OrderedDict(), stack)
            self._set_eval(module)
        for name in self._plan.open_modules:
            self._set_eval(self._model.get_submodule(name))
        for name in self._plan.run_parameters:
            parameter = self._model.get_parameter(name)
            if parameter.requires_grad:
                stack.callback(parameter.requires_grad_)
                parameter.requires_grad_(False)
        for source in self._plan.sources:
            if not source.is_end and source.module:
                module = self._model.get_submodule(source.module)
                handle = module.register_forward_pre_hook(
                    self._argument_hook(source),
                    prepend=True,
                    with_kwargs=True,
                )
                stack.callback(handle.remove)

    def _set_eval(self, module: nn.Module) -> None:
        if module.training:
            self._modes.append(module)
            module.training = False

    def _restore_modes(self) -> None:
        for module in self._modes:
            module.training = True

    def _answer(self, stand_in: StandIn) -> Callable[..., Any]:
        calls = iter(range(len(stand_in.values)))
        last = len(stand_in.values) - 1

        def answer(*args: Any, **kwargs: Any) -> Any:
            call = next(calls, last)
            values = self._with_features(
                stand_in.module,
                call,
                True,
                stand_in.values[call],
                stand_in.is_written,
            )
            return pytree.tree_unflatten(values, stand_in.specs[call])

        return answer

    def _argument_hook(self, source: Source) -> Callable[..., Any]:
        calls = iter(range(source.call + 1))

        def replace(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if next(calls, None) != source.call:
                return None
            if source.operations:
                self._watch.start(source.operations)
                return None
            values, spec = pytree.tree_flatten((args, kwargs))
            values[source.index] = self._features[source]
            self._reach(source)
            return pytree.tree_unflatten(values, spec)

        return replace

    def _with_features(
        self,
        module: str,
        call: int,
        is_end: bool,
        values: Sequence[Any],
        is_written: bool = False,
    ) -> list[Any]:
        """Returns stand-ins, and features where they enter."""
        found = [
            self._filled(value, is_written)
            if isinstance(value, TensorForm)
            else value.at(self._batch)
            if isinstance(value, Affine)
            else value
            for value in values
        ]
        for source, features in self._features.items():
            if (source.module, source.call, source.is_end) == (
                module,
                call,
                is_end,
            ):
                if source.operations:
                    self._watch.start(source.operations)
                    continue
                found[source.index] = features
                self._reach(source)
        return found

    def _replace_result(self, result: Any) -> Any:
        source = self._plan.sources[-1]
        values, spec = pytree.tree_flatten(result)
        values[source.index] = self._features[source]
        self._reach(source)
        return pytree.tree_unflatten(values, spec)

    def _filled(self, form: TensorForm, is_written: bool) -> torch.Tensor:
        filled = form.filled(self._plan.filling, self._batch, self._device)
        # Expanded memory cannot be written.
        return filled.contiguous() if is_written else filled

    def _reach(self, source: Source) -> None:
        if source == self._plan.sources[-1]:
            if self._modes and _is_in_checkpoint():
                raise FreezeError(
                    "cannot_freeze",
                    f"gradient checkpointing repeats the frozen module "
                    f"{source.module!r} in the backward pass; switch it off "
                    "for the block in which the frozen part ends",
                )
            self._is_reached = True
            self._restore_modes()
            if self._at_freeze_point is not None:
                self._at_freeze_point()


def _replace(
    module: nn.Module, name: str, value: Any, stack: ExitStack
) -> None:
    attributes = module.__dict__
    if name in attributes:
        stack.callback(attributes.__setitem__, name, attributes[name])
    else:
        stack.callback(attributes.pop, name, None)
    attributes[name] = value


def _is_in_checkpoint() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == _CHECKPOINT:
            return True
    return False


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins several tensors ``[B, ...]`` to one ``[B, n]``; one stays as is.

    Integers and booleans become floats of the widest float type.
    """
    if len(tensors) == 1:
        return tensors[0]
    dtype = torch.float32
    return torch.cat(
        [each.reshape(each.shape[0], -1).to(dtype) for each in tensors], 1
    )


def unpacked(plan: TailPlan, features: torch.Tensor) -> list[torch.Tensor]:
    """Separates what :func:`packed` joined."""
    forms = [source.form for source in plan.sources]
    if len(forms) == 1:
        return [features]
    sizes = [torch.Size(form.sample_shape).numel() for form in forms]
    return [
        part.reshape(-1, *form.sample_shape).to(form.dtype)
        for part, form in zip(features.split(sizes, 1), forms, strict=True)
    ]
