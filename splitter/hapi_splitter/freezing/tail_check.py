"""Compares a tail with the model it was taken from, on one batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from hapi_splitter.freezing.places import Place, watch
from hapi_splitter.freezing.preserved_state import SavedState
from hapi_splitter.freezing.region import Inputs, packed
from hapi_splitter.freezing.replay import StepMemory
from hapi_splitter.freezing.structures import flatten
from hapi_splitter.freezing.tail_call import (
    TailPlan,
    TailRunner,
    frozen_modules,
)

_RTOL = 1e-4
_HALF_RTOLS = {torch.bfloat16: 0.02, torch.float16: 2**-8}
_PROBES = 64
"""Calls in training mode that look for code before the freeze point that runs
at random: what runs in one of ten is overlooked once in a thousand times."""


class TailCheck:
    """Compares a tail of a model with the model itself.

    Args:
        model: the user's model.
        plan: of the tail.
        samples: a batch, ``[B, *sample_shape]``.
        inputs: returns the model's arguments from samples.
        state: of the model, with which each run begins.

    Attributes:
        memory: what the calls of the tail have remembered.
        result: of the model in eval mode.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: TailPlan,
        samples: torch.Tensor,
        inputs: Inputs,
        state: SavedState,
    ) -> None:
        self._model = model
        self._plan = plan
        self._samples = samples
        self._inputs = inputs
        self._state = state
        self.memory = StepMemory()
        self.result: Any = None

    def problem(self, features: torch.Tensor) -> str | None:
        """Returns how the parts differ from the model; None if they do not.

        They are compared in eval mode and in training mode with the frozen
        modules in eval mode.

        Args:
            features: of the exported region, of all samples or the first.
        """
        sent: list[torch.Tensor] = []
        expected = self._of_model(False, sent)
        self.result = expected[0]
        if not same(features, sent[0][: len(features)]):
            return (
                "exported by torch.export, the frozen modules compute "
                "something else than in the model; freeze an earlier module"
            )
        if not same(self._of_tail(False, sent[0]), expected):
            return (
                "after it the model computes something else from the "
                "features than in its whole forward"
            )
        return self._training_problem(sent[0])

    def _training_problem(self, features: torch.Tensor) -> str | None:
        try:
            expected = self._of_model(True)
        except Exception as error:  # of the user's code
            return self._failure_problem(features, error)
        if not same(self._of_tail(True, features), expected):
            return (
                "in training mode the model computes something else from the "
                "features than in its whole forward"
            )
        self._probe(features)
        return None

    def _failure_problem(
        self, features: torch.Tensor, expected: Exception
    ) -> str | None:
        """Compares a tail with a model that cannot train on samples alone."""
        try:
            self._of_tail(True, features)
        except type(expected) as error:
            if str(error) == str(expected):
                return None
        return (
            "in training mode the model fails in another way than its code "
            f"after it: {type(expected).__name__}: {str(expected)[:200]}"
        )

    def _probe(self, features: torch.Tensor) -> None:
        """Runs what may happen at random before the freeze point.

        Raises:
            FreezeError: if it is not always the same.
        """

        def leave() -> None:
            raise _Entered

        runner = TailRunner(self._model, self._plan, self.memory, leave)
        with self._run(True):
            for number in range(_PROBES):
                _seed(number)
                before = _random_states()
                with suppress(_Entered):
                    runner.run(features)
                if not number and before == _random_states():
                    return

    @contextmanager
    def _run(self, training: bool) -> Iterator[None]:
        """Begins with the saved state, in a mode, and ends in that state."""
        with self._state.preserved(), torch.no_grad():
            self._model.train(training)
            for each in frozen_modules(self._model, self._plan):
                each.eval()
            yield

    def _of_tail(self, training: bool, features: torch.Tensor) -> Any:
        runner = TailRunner(self._model, self._plan, self.memory, _seed)
        with self._run(training):
            return runner.run(features.clone()), _draw()

    def _of_model(
        self, training: bool, sent: list[torch.Tensor] | None = None
    ) -> Any:
        """Runs the whole model, with a seed at the freeze point.

        Args:
            training: mode of what is not frozen.
            sent: gets the tensor that is sent, as the region has it.
        """
        args, kwargs = self._inputs(self._samples.clone())
        places = self._plan.places
        taken: dict[Place, torch.Tensor] = {}

        def take(place: Place, tensor: torch.Tensor) -> None:
            taken[place] = tensor
            if place == places[-1]:
                _seed()
                if sent is not None:
                    parts = packed([taken[each] for each in places])
                    sent.append(parts.clone())  # the model may write to it

        with ExitStack() as stack:
            stack.enter_context(self._run(training))
            for place in places:
                watch(self._model, place, partial(take, place), stack)
            return self._model(*args, **kwargs), _draw()


class _Entered(BaseException):
    """Leaves the model's call; no ``except Exception`` may catch it."""


def _draw() -> list[Any]:
    """Returns random numbers, which show how many were drawn before."""
    return [torch.rand(1), random.random()]  # noqa: S311


def _seed(number: int = 0) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _random_states() -> list[Any]:
    kind, *state = np.random.get_state()
    keys = state[0].tobytes() if isinstance(state[0], np.ndarray) else state[0]
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        [kind, keys, *state[1:]],
    ]


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
