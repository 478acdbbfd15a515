"""Compares a tail with the model it was taken from, on one batch."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    suppress,
)
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.frozen_attributes import FrozenAttributes
from hapi_splitter.freezing.module_answers import answered
from hapi_splitter.freezing.preserved_state import SavedState
from hapi_splitter.freezing.region import Inputs, packed
from hapi_splitter.freezing.replay import StepMemory
from hapi_splitter.freezing.structures import flatten, unflatten
from hapi_splitter.freezing.tail_call import (
    TailPlan,
    TailRunner,
    frozen_modules,
)
from hapi_splitter.freezing.tensor_positions import TensorPosition, watch
from hapi_splitter.user_code import failed_line

_RTOL = 1e-4
_HALF_RTOLS = {torch.bfloat16: 0.02, torch.float16: 2**-8}
_PROBES = 64
"""Calls in training mode that look for code before the freeze point that runs
at random: what runs in one of ten is overlooked once in a thousand times."""
_UNTRAINED = "None of the inputs have requires_grad=True"
"""Begin of the warning of ``torch.utils.checkpoint``."""
_OTHER_BATCH = 7
"""Other than those of the records, for numbers that follow from the batch size
in another way than it looks for these."""


class TailCheck:
    """Compares a tail of a model with the model itself.

    Args:
        model: the user's model.
        plan: plan of the tail.
        samples: a batch, ``[B, *sample_shape]``.
        inputs: returns the model's arguments from samples.
        state: state of the model, with which each run begins.

    Attributes:
        memory: what the calls of the tail have remembered.
        result: result of the model in eval mode.
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
        self._attributes = FrozenAttributes(model, plan.replaced_modules, {})
        self._hooked = ""
        self._results: dict[str, list[Any]] = {}
        self._drawing = ""

    def problem(self, features: torch.Tensor) -> str | None:
        """Returns how the parts differ from the model; None if they do not.

        They are compared in eval mode and in training mode with the frozen
        modules in eval mode.

        Args:
            features: features of the exported region, of all samples or the
                first.
        """
        sent: list[torch.Tensor] = []
        expected = self._of_model(False, sent=sent)
        self.result = expected[0]
        if self._drawing:
            return (
                f"the frozen module {self._drawing!r} draws random numbers of "
                "Python or NumPy in eval mode, which would be the same for "
                "all samples; freeze before it"
            )
        if not same(features, sent[0][: len(features)]):
            return (
                "exported by torch.export, the frozen modules compute "
                "something else than in the model; freeze an earlier module"
            )
        if not same(self._of_tail(False, sent[0]), expected):
            return (
                "after it the model computes something else from the "
                f"features than in its whole forward{self._hooked}"
            )
        return self._training_problem(sent[0])

    def _hooks(self) -> str:
        """A clause about the frozen module with hooks, for a message."""
        for name in self._plan.replaced_modules:
            if self._model.get_submodule(name)._forward_hooks:
                return (
                    f"; the frozen module {name!r} has hooks, by which for "
                    "instance output_hidden_states=True collects results, and "
                    "they do not run in training: switch them off"
                )
        return ""

    def _training_problem(self, features: torch.Tensor) -> str | None:
        """Compares them in training mode, the tail with gradients.

        The whole model needs them, and runs whole, only if they differ.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            actual = _Outcome(self._of_tail, True, features, True)
        if any(str(w.message).startswith(_UNTRAINED) for w in caught):
            return (
                "gradient checkpointing with use_reentrant=True begins at the "
                "features, which need no gradient, so that its layers would "
                "not be trained; use use_reentrant=False"
            )
        for gradients in (False, True):
            expected = _Outcome(self._of_model, True, gradients)
            if actual.error is None and actual.same(expected):
                self._probe(features)
                return None
        if isinstance(actual.error, FreezeError):
            raise actual.error
        if actual.same(expected):
            return None
        if expected.error is not None:
            return (
                "in training mode the model fails in another way than its "
                f"code after it: {expected.text}"
            )
        if actual.error is not None:
            return (
                "in training the code after it does not run without the "
                f"frozen modules{failed_line(actual.error)}: {actual.text}; "
                "gradients through the frozen part do not exist"
            )
        return (
            "in training mode the model computes something else from the "
            f"features than in its whole forward{self._hooked}"
        )

    def _probe(self, features: torch.Tensor) -> None:
        """Runs what is before the freeze point: with another batch size, and
        often if it draws random numbers.

        Raises:
            FreezeError: if it is not always the same.
        """

        def leave() -> None:
            raise _Entered

        runner = TailRunner(self._model, self._plan, self.memory, leave)
        with self._run(True):
            with suppress(_Entered):
                runner.run(features[:1].repeat_interleave(_OTHER_BATCH, 0))
            for number in range(_PROBES):
                _seed(number)
                before = _random_states()
                with suppress(_Entered):
                    runner.run(features)
                if not number and before == _random_states():
                    return

    @contextmanager
    def _run(self, training: bool, gradients: bool = False) -> Iterator[None]:
        """Begins with the saved state, in a mode, and ends in that state."""
        with self._state.preserved(), torch.set_grad_enabled(gradients):
            self._model.train(training)
            for module in frozen_modules(self._model, self._plan):
                module.eval()
            yield

    def _of_tail(
        self, training: bool, features: torch.Tensor, gradients: bool = False
    ) -> Any:
        runner = TailRunner(self._model, self._plan, self.memory, _seed)
        with self._run(training, gradients):
            before = self._hooks()
            given = features.clone()
            outcome = runner.run(given), _draw()
            self.memory.writes_features |= given._version > 0
            self._hooked = self._hooks()
            if self._hooked != before:  # what later calls do
                outcome = runner.run(features.clone()), _draw()
            self.memory.accepted.update(self._attributes.changes())
            return outcome

    def _of_model(
        self,
        training: bool,
        gradients: bool = False,
        sent: list[torch.Tensor] | None = None,
    ) -> Any:
        """Runs the whole model, with a seed at the freeze point.

        Args:
            training: mode of what is not frozen.
            gradients: True to compute with gradients.
            sent: gets the tensor that is sent, as the region has it.
        """
        args, kwargs = self._inputs(self._samples.clone())
        positions = self._plan.positions
        taken: dict[TensorPosition, torch.Tensor] = {}

        def take(position: TensorPosition, tensor: torch.Tensor) -> None:
            taken[position] = tensor
            if position == positions[-1]:
                _seed()
                if sent is not None:
                    parts = packed([taken[other] for other in positions])
                    # The model may write to it; clients get it contiguous.
                    sent.append(
                        parts.clone(memory_format=torch.contiguous_format)
                    )

        with ExitStack() as stack:
            stack.enter_context(self._run(training, gradients))
            if not training:
                self._remember_results(stack)
            elif not gradients and not self._hooks():
                stack.enter_context(self._remembered_results())
            for position in positions:
                watch(self._model, position, partial(take, position), stack)
            outcome = self._model(*args, **kwargs), _draw()
            # What the tail does not change is the frozen modules' own.
            changed = dict.fromkeys(self._attributes.changes())
            self.memory.accepted = {**changed, **self.memory.accepted}
            return outcome

    def _remember_results(self, stack: ExitStack) -> None:
        """Keeps what frozen modules compute until the stack closes."""
        for name in self._plan.replaced_modules:
            results = self._results[name] = []

            before: list[Any] = []

            def begin(*_: Any, states: list[Any] = before) -> None:
                states.append(_other_random_states())

            def keep(
                _: Any,
                __: Any,
                result: Any,
                to: list[Any] = results,
                states: list[Any] = before,
                name: str = name,
            ) -> None:
                leaves, spec = flatten(result)
                to.append(unflatten(map(_cloned, leaves), spec))
                if states.pop() != _other_random_states():
                    self._drawing = name

            module = self._model.get_submodule(name)
            for hook in (
                module.register_forward_pre_hook(begin),
                module.register_forward_hook(keep),
            ):
                stack.callback(hook.remove)

    def _remembered_results(self) -> AbstractContextManager[None]:
        """Lets frozen modules return what they did, in their order.

        Other arguments are found in the run of the tail.  What differs for
        another reason is compared again, without this.
        """
        find = self._model.get_submodule
        results = {k: iter(held) for k, held in self._results.items()}

        def answer(name: str, *_: Any) -> Any:
            leaves, spec = flatten(next(results[name]))
            return unflatten(map(_cloned, leaves), spec)

        return answered({name: find(name) for name in results}, answer)


class _Outcome:
    """The result of a run, or the error of the user's code in it."""

    def __init__(self, run: Callable[..., Any], *args: Any) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        try:
            self.result = run(*args)
        except Exception as error:  # of the user's code
            self.error = error

    @property
    def text(self) -> str:
        return f"{type(self.error).__name__}: {str(self.error)[:200]}"

    def same(self, other: _Outcome) -> bool:
        if self.error is None and other.error is None:
            return same(self.result, other.result)
        is_same = type(self.error) is type(other.error)
        return is_same and str(self.error) == str(other.error)


class _Entered(BaseException):
    """Leaves the model's call; no ``except Exception`` may catch it."""


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _draw() -> list[Any]:
    """Returns random numbers, which show how many were drawn before."""
    return [torch.rand(1), random.random()]  # noqa: S311


def _seed(number: int = 0) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), *_other_random_states()]


def _other_random_states() -> list[Any]:
    """Returns the states of the random numbers of Python and NumPy."""
    _, keys, *others = np.random.get_state()
    return [random.getstate(), np.asarray(keys).tobytes(), others]


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
