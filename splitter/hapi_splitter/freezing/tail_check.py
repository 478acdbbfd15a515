"""Compares a tail with the model it was taken from, on one batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.places import Place, watch
from hapi_splitter.freezing.preserved_state import SavedState
from hapi_splitter.freezing.region import Inputs, Region, packed
from hapi_splitter.freezing.structures import flatten
from hapi_splitter.freezing.tail_call import (
    TailPlan,
    TailRunner,
    modules_before,
)

_RTOL = 1e-4
_HALF_RTOLS = {torch.bfloat16: 0.02, torch.float16: 2**-8}
_OTHER_FILLING = 1.0


class TailCheck:
    """Compares tails of a model with the model itself.

    The model's modes change; its other state does not.

    Args:
        model: the user's model.
        samples: a batch, ``[B, *sample_shape]``.
        inputs: returns the model's arguments from samples.
        end: place at which the requested frozen modules end.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: torch.Tensor,
        inputs: Inputs,
        end: Place,
    ) -> None:
        self._model = model
        self._samples = samples
        self._inputs = inputs
        self._end = end

    def problem(self, plan: TailPlan) -> str | None:
        """Returns how a tail differs from the model; None if it does not.

        It is compared in eval and in training mode, with two values of the
        stand-ins, and with all of the model's code in training mode.
        """
        self._set_mode(training=False)
        features = self._features(plan)
        return self._evaluation_problem(
            plan, features
        ) or self._training_problem(plan, features)

    def agrees(
        self,
        plan: TailPlan,
        features: torch.Tensor,
        writes: TorchDispatchMode,
    ) -> bool:
        """Compares a plan that was checked before, in eval mode only.

        Args:
            plan: of the tail.
            features: that the samples had then.
            writes: of the caller, who preserves the model's state.
        """
        self._set_mode(training=False)
        sent: dict[Place, torch.Tensor] = {}
        expected = self._of_model(plan, sent)
        if not same(packed([sent[each] for each in plan.places]), features):
            return False
        runner = TailRunner(self._model, plan, _seed)
        with writes, torch.no_grad():
            return same((runner.run(features.clone()), _draw()), expected)

    def _features(self, plan: TailPlan) -> torch.Tensor:
        """Returns what is sent for the samples, ``[B, *shape]``.

        Not what the whole model has at these places: it may write to a
        tensor between two of them.
        """
        region = Region(self._model, plan.places, self._inputs)
        with self._preserved():
            features: torch.Tensor = region(self._samples)
        return features

    def _set_mode(self, training: bool, frozen: Sequence[str] = ()) -> None:
        """Sets the modes, but for modules that remain in eval mode."""
        self._model.train(training)
        for name in frozen:
            self._model.get_submodule(name).eval()
        self._state = SavedState(self._model)

    @contextmanager
    def _preserved(self) -> Iterator[None]:
        """Every run begins with the same state of the model."""
        with self._state.preserved() as writes, writes, torch.no_grad():
            yield

    def _evaluation_problem(
        self, plan: TailPlan, features: torch.Tensor
    ) -> str | None:
        expected = self._of_model(plan)
        for filling in (plan.filling, _OTHER_FILLING):
            actual = self._of_tail(replace(plan, filling=filling), features)
            if not same(actual, expected):
                return (
                    "after it the model computes something else from the "
                    "features than in its whole forward"
                )
        return None

    def _training_problem(
        self, plan: TailPlan, features: torch.Tensor
    ) -> str | None:
        self._set_mode(True, [each.module for each in plan.stand_ins])
        try:
            expected = self._of_model(plan)
        except Exception as error:
            return self._failure_problem(plan, features, error)
        if not same(self._of_tail(plan, features), expected):
            return (
                "in training mode the tail also needs other tensors from "
                "before it; freeze before them, or build the model without "
                "auxiliary outputs"
            )
        try:
            whole = self._of_tail(replace(plan, open_modules=()), features)
        except FreezeError:
            return None  # training skips modules at random
        if not same(whole, expected):
            return (
                "code before it depends on the training mode and changes the "
                "result after it"
            )
        return None

    def _failure_problem(
        self, plan: TailPlan, features: torch.Tensor, expected: Exception
    ) -> str | None:
        """Compares a tail with a model that cannot train on samples alone."""
        try:
            self._of_tail(plan, features)
        except type(expected) as error:
            if str(error) == str(expected):
                return None
        return (
            "in training mode the model fails in another way than its code "
            f"after it: {type(expected).__name__}: {str(expected)[:200]}"
        )

    def _of_tail(self, plan: TailPlan, features: torch.Tensor) -> Any:
        runner = TailRunner(self._model, plan, _seed)
        with self._preserved():
            return runner.run(features.clone()), _draw()

    def _of_model(
        self, plan: TailPlan, sent: dict[Place, torch.Tensor] | None = None
    ) -> Any:
        """Runs the whole model; its code is in eval mode before the end.

        Args:
            plan: of the tail.
            sent: gets the tensors that are sent.
        """
        modes = [
            each for each in modules_before(self._model, plan) if each.training
        ]

        def restore(_: torch.Tensor) -> None:
            for module in modes:
                module.training = True

        args, kwargs = self._inputs(self._samples.clone())
        with ExitStack() as stack:
            stack.enter_context(self._preserved())
            watch(self._model, self._end, restore, stack)
            watch(self._model, plan.places[-1], lambda _: _seed(), stack)
            if sent is not None:
                for place in plan.places:
                    take = partial(_put, sent, place)
                    watch(self._model, place, take, stack)
            for module in modes:
                module.training = False
            return self._model(*args, **kwargs), _draw()


def _put(
    sent: dict[Place, torch.Tensor], place: Place, tensor: torch.Tensor
) -> None:
    sent[place] = tensor.clone()  # the model may write to it


def _draw() -> list[Any]:
    """Returns random numbers, which show how many were drawn before."""
    return [torch.rand(1), random.random()]  # noqa: S311


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def same(actual: Any, expected: Any) -> bool:
    """Compares two results in all tensors and numbers that they hold."""
    actual_leaves, actual_spec = flatten(actual)
    leaves, spec = flatten(expected)
    if len(actual_leaves) != len(leaves) or actual_spec != spec:
        return False
    return all(map(_same_leaf, actual_leaves, leaves))


def _same_leaf(actual: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return False
        if not expected.is_floating_point():
            return torch.equal(actual, expected)
        rtol = _HALF_RTOLS.get(expected.dtype, _RTOL)
        finite = expected[expected.isfinite()]
        atol = rtol * finite.abs().max().item() if finite.numel() else 0.0
        return torch.allclose(actual, expected, rtol, atol, equal_nan=True)
    if isinstance(expected, int | float | str | bool):
        return bool(actual == expected)
    return True  # objects such as caches have no comparison
