"""Goes through the steps before the freeze point in one call of a tail.

Whatever the model's code does with the samples up to the freeze point has to
be what it did when the model was split, since its results are in the features
already: anything else would be skipped without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hapi_protocol.errors import FreezeError, cannot_freeze
from hapi_splitter.freezing.model_run import name_of
from hapi_splitter.freezing.stand_in_tensor import StandInTensor, replaced
from hapi_splitter.freezing.stand_ins import (
    PLAIN,
    Answer,
    Entry,
    ModuleResult,
    OtherTensor,
    SkippedOperation,
    SkippedStep,
    StandIn,
    comparable,
)
from hapi_splitter.freezing.structures import flatten, leaves_in, unflatten
from hapi_splitter.graph.program import Affine, Ref
from hapi_splitter.user_code import running_line

_RTOL = 1e-5
_MAX_BATCHES = 8
_CONVERSIONS = frozenset(("cpu", "cuda", "to", "type"))
_GRADIENTS = frozenset(
    ("grad", "backward", "register_hook", "requires_grad_", "retain_grad")
)
_REMEDY = (
    "switch that off before the split, or give two modules (frozen, tail) "
    "instead of the model"
)


class StepMemory:
    """The memory of the calls of one tail.

    Attributes:
        others: tensors that do not depend on the samples, by step and
            position among the arguments, as in the first call.
        sizes: sizes and strides of results, by batch size and step.
        accepted: values that the model's own forward gives to attributes of
            frozen modules, by place; None for any.
        writes_features: True if the model's forward writes to the features.
    """

    def __init__(self) -> None:
        self.accepted: dict[str, Any] = {}
        self.writes_features = False
        self.others: dict[tuple[int, int], torch.Tensor] = {}
        self.sizes: dict[int, dict[int, list[Any]]] = {}

    def sizes_of(self, batch: int) -> dict[int, list[Any]]:
        if batch not in self.sizes and len(self.sizes) >= _MAX_BATCHES:
            self.sizes.clear()
        return self.sizes.setdefault(batch, {})


class Replay:
    """The steps of one call of a tail.

    Args:
        steps: that are not computed.
        entries: where the features enter.
        features: the tensors that are sent, for each entry.
        memory: what the tail remembers.
        entered: called when all features have entered.
        answering: called with the name of a frozen module that is called.

    Attributes:
        failure: error that was raised; the model's code may catch it.
    """

    def __init__(
        self,
        steps: Sequence[SkippedStep],
        entries: Sequence[Entry],
        features: Sequence[torch.Tensor],
        memory: StepMemory,
        entered: Callable[[], None],
        answering: Callable[[str], None],
    ) -> None:
        self._steps = steps
        self._features = dict(zip(entries, features, strict=True))
        self._last_entry = max(entry.step for entry in entries)
        self._batch, self._device = features[0].shape[0], features[0].device
        self._memory = memory
        self._sizes = memory.sizes_of(self._batch)
        self._entered, self._answering = entered, answering
        self._next = -1  # the inputs come first
        self._tensors: dict[int, StandInTensor] = {}
        self._sources: dict[int, str] = {}
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.failure: FreezeError | None = None

    @property
    def has_entered(self) -> bool:
        """True if the model has got all features."""
        return self._next > self._last_entry

    def inputs(self, values: Sequence[Any]) -> list[Any]:
        """Returns stand-ins for the inputs of the model."""
        filled = [self._filled(value, "") for value in values]
        self._advance()
        return filled

    def release(self) -> None:
        """Lets go of tensors, so that no cycle of references is left."""
        self._tensors.clear()
        self._features.clear()
        self._seen.clear()

    def module_result(
        self, module: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns the result of a call of a module that is not run."""
        self._checked(self._answering, module)
        step, leaves = self._step, _leaves(args, kwargs)
        if (
            not isinstance(step, ModuleResult)
            or step.module != module
            or not self._has_arguments(step.args, leaves)
        ):
            raise self._failed(
                f"the model's forward runs the frozen module {module!r}"
                f"{running_line()}, which it did not do like this when it was "
                f"split{self._changed_value(leaves)}; frozen modules are not "
                f"run in training; {_REMEDY}"
            )
        values = [self._filled(value, module) for value in step.values]
        self._advance()
        return unflatten(values, step.spec)

    def operation(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Returns the result of an operation that is not computed.

        It is computed if all that it reads is sent.
        """
        name, step = name_of(func), self._step
        leaves = leaves_in((args, kwargs))
        inputs = [e for e in leaves if isinstance(e, StandInTensor)]
        if (
            not isinstance(step, SkippedOperation)
            or step.name != name
            or (_is_write(name) and leaves[0] is not inputs[0])
            or not self._has_arguments(
                step.args, leaves, _is_off(name, args, kwargs)
            )
        ):
            raise self.refusal(name, inputs[0])
        values: Sequence[Any] = [None] * len(step.values)
        if isinstance(step.values[0], Answer):
            self._advance()
            return step.values[0].value
        if all(tensor.entered is not None for tensor in inputs):
            _, spec = flatten((args, kwargs))
            args, kwargs = unflatten(map(replaced, leaves), spec)
            values, _ = flatten(func(*args, **kwargs))
        elif self._next not in self._sizes:
            self._sizes[self._next] = _meta_sizes(func, args, kwargs)
        source = self._sources[inputs[0].number]
        results = [
            self._result(index, value, source)
            for index, value in enumerate(values)
        ]
        self._advance()
        return unflatten(results, step.spec)

    @property
    def _step(self) -> SkippedStep | None:
        has_more = self._next < len(self._steps)
        return self._steps[self._next] if has_more else None

    def _advance(self) -> None:
        had_entered = self.has_entered
        self._next += 1
        if self.has_entered and not had_entered:
            self._checked(self._entered)

    def _checked(self, check: Callable[..., None], *args: Any) -> None:
        """Calls a function whose error the model's code may catch."""
        try:
            check(*args)
        except FreezeError as error:
            self.failure = self.failure or error
            raise

    def _filled(self, value: Any, source: str) -> Any:
        if isinstance(value, StandIn):
            sizes = value.form.sizes(self._batch)
            return self._tensor(value.number, value.form.dtype, source, sizes)
        return value.at(self._batch) if isinstance(value, Affine) else value

    def _result(self, index: int, value: Any, source: str) -> Any:
        """Returns a result of the operation that is the next step."""
        step = self._steps[self._next]
        assert isinstance(step, SkippedOperation)
        number, dtype = step.values[index], step.dtypes[index]
        if not isinstance(number, int) or dtype is None:
            return value
        if value is not None:
            sizes = value.size(), value.stride()
        else:
            sizes = self._sizes[self._next][index]
        return self._tensor(number, dtype, source, *sizes, value=value)

    def _tensor(
        self,
        number: int,
        dtype: torch.dtype,
        source: str,
        size: Sequence[int],
        stride: Sequence[int] | None = None,
        value: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns a stand-in, or the features if they are complete here.

        Before, also those that have entered go through the steps only.
        """
        part = self._features.get(Entry(number, self._next))
        tensor = self._tensors.get(number)
        if tensor is None:
            tensor = StandInTensor(
                self, number, size, stride, dtype, self._device
            )
            self._tensors[number] = tensor
            self._sources[number] = source
        if part is not None or value is not None:
            tensor.entered = value if part is None else part
        is_complete = self._next == self._last_entry
        return tensor if part is None or not is_complete else part

    def _has_arguments(
        self,
        expected: Sequence[Any],
        leaves: Sequence[Any],
        is_off: bool = False,
    ) -> bool:
        """Compares arguments with those when the model was split."""
        return len(expected) == len(leaves) and all(
            self._is_argument(argument, leaves[index], index, is_off)
            for index, argument in enumerate(expected)
        )

    def _is_argument(
        self, expected: Any, given: Any, index: int, is_off: bool
    ) -> bool:
        if isinstance(given, StandInTensor):
            return expected == Ref(given.number) and given.steps is self
        if isinstance(given, torch.Tensor):
            return isinstance(expected, OtherTensor) and self._is_known(
                given, index
            )
        if isinstance(expected, Affine):
            return type(given) is int and given == expected.at(self._batch)
        value = comparable(given)
        is_same = value == expected and type(value) is type(expected)
        return is_same or (is_off and not isinstance(expected, Ref))

    def _changed_value(self, leaves: Sequence[Any]) -> str:
        """Returns a clause about a plain argument, "" without one."""
        expected = getattr(self._step, "args", ())
        if len(expected) == len(leaves):
            for before, now in zip(expected, leaves, strict=True):
                is_plain = type(before) in PLAIN and type(now) in PLAIN
                if is_plain and before != now:
                    return f", with {now!r} instead of {before!r}"
        return ""

    def _is_known(self, given: torch.Tensor, index: int) -> bool:
        """Compares a tensor that does not depend on the samples."""
        key, others = (self._next, index), self._memory.others
        # The same table is an argument of many modules.
        _, seen = self._seen.get(id(given), (given, None))
        if key not in others:
            others[key] = _kept(given) if seen is None else seen
        known = others[key]
        self._seen[id(given)] = given, known
        return known is seen or same_constant(given, known)

    def refusal(self, name: str, tensor: StandInTensor) -> FreezeError:
        """Returns the error of a stand-in that an operation reads."""
        source = self._sources.get(tensor.number, "")
        of = f"the result of {source!r}" if source else "the model's input"
        remedy = f"freeze {source!r} or an earlier module, " if source else ""
        if name in _GRADIENTS:
            return self._failed(
                f"the model's forward reads {of} by {name!r}{running_line()}, "
                "but frozen layers are not run in training, so that gradients "
                "through the frozen part do not exist; leave that out"
            )
        if self._step is None or tensor.steps is not self:
            problem = "which the frozen part has computed already"
        else:
            problem = "which it did not do there when the model was split"
        return self._failed(
            f"the model's forward reads {of} by {name!r}{running_line()}, "
            f"{problem}; frozen layers are not run in training, so that there "
            f"are no values; {remedy}{_REMEDY}"
        )

    def _failed(self, message: str) -> FreezeError:
        error = cannot_freeze(message)
        self.failure = self.failure or error
        return error


def same_constant(given: torch.Tensor, known: torch.Tensor) -> bool:
    """Compares tensors that may differ in one dimension, that of the batch.

    Along it, all that is beyond the shorter one has to be the same.
    """
    if given is known:
        return True
    if given.dtype != known.dtype or given.dim() != known.dim():
        return False
    known = known.to(given.device)
    pairs = zip(given.shape, known.shape, strict=True)
    grown = [dim for dim, (a, b) in enumerate(pairs) if a != b]
    if len(grown) > 1:
        return False
    for dim in grown:
        count = min(given.shape[dim], known.shape[dim])
        row = known.narrow(dim, 0, 1)
        is_constant = count > 0 and torch.equal(
            known.narrow(dim, 0, count),
            row.expand_as(known.narrow(dim, 0, count)),
        )
        if is_constant:
            known = row.expand_as(given)
        else:
            given, known = (
                tensor.narrow(dim, 0, count) for tensor in (given, known)
            )
    if torch.equal(given, known):
        return True
    if not given.is_floating_point():
        return False
    atol = _RTOL * known.abs().max().item() if known.numel() else 0.0
    return torch.allclose(given, known, _RTOL, atol, equal_nan=True)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what a tensor is compared with; parameters are watched."""
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    return tensor.detach().clone()


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
    is_simple = len(args) == 1 and isinstance(args[0], StandInTensor)
    return args if is_simple and not kwargs else leaves_in((args, kwargs))


def _is_write(name: str) -> bool:
    """Returns True if a function writes to its first argument."""
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name.startswith(("__set", "__i"))


def _is_off(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns True for dropout that drops nothing, in either mode."""
    probability = kwargs.get("p", args[1] if len(args) > 1 else None)
    return "dropout" in name and probability == 0


def _meta_sizes(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Any]:
    """Returns sizes and strides of the results of an operation."""
    if name_of(func) in _CONVERSIONS:
        return [(args[0].size(), args[0].stride())]
    leaves, spec = flatten((args, kwargs))
    args, kwargs = unflatten(map(_on_meta, leaves), spec)
    with torch.no_grad():
        results, _ = flatten(func(*args, **kwargs))
    return [
        (tuple(result.shape), result.stride())
        if isinstance(result, torch.Tensor)
        else None
        for result in results
    ]


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(
        value.size(), value.stride(), dtype=value.dtype, device="meta"
    )
