"""Records one forward of a model: its module calls and tensor operations.

The model's own Python runs on real tensors. Nothing is traced symbolically,
so that branches, hooks and library code need no support here. A record shows
which tensors of the samples are still needed at each module call.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from hapi_splitter.freezing.stand_ins import comparable
from hapi_splitter.freezing.structures import (
    flatten,
    tensors_in,
    unflatten,
)

ALIAS = "alias"
"""Name of the operation of a module that returns its argument. It makes the
result a tensor of its own in the record."""
READS_SHAPE_ONLY = frozenset(
    f"{prefix}{kind}{suffix}"
    for kind in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")
    for prefix, suffix in (("new_", ""), ("", "_like"))
)
READS_FIRST_ONLY = frozenset(("expand_as", "view_as", "reshape_as", "type_as"))
_READS_VALUES = frozenset(
    {
        "__array__",
        "__bool__",
        "__contains__",
        "__float__",
        "__format__",
        "__index__",
        "__int__",
        "__repr__",
        "allclose",
        "equal",
        "is_nonzero",
        "item",
        "numpy",
        "tolist",
    }
)
"""Functions that return no tensor but read a tensor's values."""


@dataclass(frozen=True)
class Operation:
    """One call of a torch function.

    Args:
        name: name of the function.
        args: flattened arguments, tensors as :class:`Recorded`.
        reads: numbers of the tensors that it reads and that depend on the
            samples.
        values: flattened results, tensors as :class:`Recorded`.
        spec: structure of the results.
        parameters: names of the parameters and buffers that it reads.
    """

    name: str
    args: tuple[Any, ...]
    reads: frozenset[int]
    values: tuple[Any, ...]
    spec: pytree.TreeSpec = field(compare=False)
    parameters: frozenset[str]

    @property
    def has_other_tensors(self) -> bool:
        """True if it reads tensors that do not depend on the samples."""
        return any(
            isinstance(argument, Recorded) and argument.number is None
            for argument in self.args
        )


@dataclass(frozen=True)
class ModuleEvent:
    """The begin or the end of a module's call.

    Args:
        module: dotted name; "" is the model.
        call: 0 for the module's first call in the forward.
        is_end: False for the begin.
        values: flattened arguments or results, tensors as :class:`Recorded`.
        spec: structure of the values.
    """

    module: str
    call: int
    is_end: bool
    values: tuple[Any, ...]
    spec: pytree.TreeSpec = field(compare=False)


@dataclass(frozen=True)
class Recorded:
    """A tensor in a record.

    Args:
        number: number of the tensor; None if it does not depend on the
            samples.
        shape: its shape.
        dtype: its dtype.
        memory: equal for tensors that share memory.
    """

    number: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: int


@dataclass(frozen=True)
class ModelRun:
    """The record of one forward.

    Attributes:
        steps: operations and module events, in order.
        created: step after which each tensor depends on the samples.
        last_use: last step that reads each tensor; infinite for results.
        kept: tensors that are alive after the forward, other than results.
    """

    steps: Sequence[Operation | ModuleEvent]
    created: Mapping[int, int]
    last_use: Mapping[int, float]
    kept: frozenset[int]

    @cached_property
    def events(self) -> Mapping[int, ModuleEvent]:
        """Module events by step."""
        return {
            step: event
            for step, event in enumerate(self.steps)
            if isinstance(event, ModuleEvent)
        }

    @cached_property
    def spans(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """First and last step of each call, by module."""
        spans: dict[str, list[tuple[int, int]]] = {}
        for step, event in self.events.items():
            calls = spans.setdefault(event.module, [])
            if event.is_end:
                calls[event.call] = calls[event.call][0], step
            else:
                calls.append((step, len(self.steps)))
        return spans

    def find(self, event: ModuleEvent) -> ModuleEvent | None:
        """Returns the same event of this record; None if there is none."""
        calls = self.spans.get(event.module, ())
        if event.call >= len(calls):
            return None
        return self.events.get(calls[event.call][event.is_end])

    def live(self, step: int) -> frozenset[int]:
        """Returns the tensors of the samples that are read after a step."""
        return self._live[step]

    @cached_property
    def _live(self) -> Sequence[frozenset[int]]:
        born: dict[int, set[int]] = {}
        dead: dict[float, set[int]] = {}
        for number, created in self.created.items():
            if number in self.last_use:
                born.setdefault(created, set()).add(number)
                dead.setdefault(self.last_use[number], set()).add(number)
        live: set[int] = set()
        by_step = []
        for step in range(len(self.steps)):
            live |= born.get(step, set())
            live -= dead.get(step, set())
            by_step.append(frozenset(live))
        return by_step

    @cached_property
    def reads(self) -> Mapping[str, tuple[int, int]]:
        """First and last step that reads each parameter and buffer."""
        reads: dict[str, tuple[int, int]] = {}
        for step, event in enumerate(self.steps):
            if isinstance(event, Operation):
                for name in event.parameters:
                    reads[name] = reads.get(name, (step, step))[0], step
        return reads


def record(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ModelRun:
    """Records a forward in the model's current mode, without gradients.

    Args:
        model: the module that runs.
        args: its arguments; their tensors are the samples.
        kwargs: its keyword arguments.

    Raises:
        Exception: any error of the model.
    """
    recorder = _Recorder(model, (args, kwargs))
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                recorder.watch(module, name, stack)
        with torch.no_grad(), recorder:
            result = model(*args, **kwargs)
    recorder.keep(result)
    del result
    return recorder.run()


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module, samples: Any) -> None:
        super().__init__()
        self._steps: list[Operation | ModuleEvent] = []
        self._numbers: Any = WeakTensorKeyDictionary()
        self._created: dict[int, int] = {}
        self._last_use: dict[int, float] = {}
        self._calls: Counter[str] = Counter()
        self._open: list[tuple[str, int]] = []
        self._parameters = {
            id(tensor): name
            for named in (model.named_buffers, model.named_parameters)
            for name, tensor in named(remove_duplicate=False)
        }
        for tensor in tensors_in(samples):
            self._number(tensor)

    def watch(self, module: nn.Module, name: str, stack: ExitStack) -> None:
        """Records a module's calls until the stack closes."""

        def begin(_: Any, args: Any, kwargs: Any) -> None:
            self._open.append((name, self._calls[name]))
            self._calls[name] += 1
            self._add_event(*self._open[-1], False, (args, kwargs))

        def end(_: Any, args: Any, result: Any) -> None:
            self._add_event(*self._open.pop(), True, result)

        def separate(_: Any, args: Any, kwargs: Any, result: Any) -> Any:
            """Makes results that are arguments tensors of their own."""
            given = {id(tensor) for tensor in tensors_in((args, kwargs))}
            leaves, spec = flatten(result)
            same = [leaf for leaf in leaves if id(leaf) in given]
            if not same:
                return None
            aliases = {id(tensor): self._alias(tensor) for tensor in same}
            return unflatten(
                [aliases.get(id(leaf), leaf) for leaf in leaves], spec
            )

        for handle in (
            module.register_forward_pre_hook(
                begin, prepend=True, with_kwargs=True
            ),
            module.register_forward_hook(separate, with_kwargs=True),
            module.register_forward_hook(end),
        ):
            stack.callback(handle.remove)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not is_operation(func, result):
            return result
        name = name_of(func)
        leaves, _ = flatten((args, kwargs))
        values = self._recorded(leaves)
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if name in READS_FIRST_ONLY:
            given = given[:1]
        reads = {self._numbers.get(tensor) for tensor in given} - {None}
        parameters = {self._parameters.get(id(tensor)) for tensor in given}
        step = len(self._steps)
        self._last_use.update(dict.fromkeys(reads, step))
        results = tensors_in(result)
        if name.startswith("__set"):
            results = given[:1]
        for tensor in results if reads else ():
            self._number(tensor, step)
        self._steps.append(
            Operation(
                name,
                values,
                frozenset(reads),
                *self._values(result),
                frozenset(name for name in parameters if name),
            )
        )
        return result

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        number = self._numbers.get(tensor)
        if number is None:
            return tensor
        with torch._C.DisableTorchFunction():
            same = tensor.view(tensor.shape)
        step = len(self._steps)
        self._last_use[number] = step
        args, _ = self._values(tensor)
        self._number(same, step)
        self._steps.append(
            Operation(
                ALIAS,
                args,
                frozenset({number}),
                *self._values(same),
                frozenset(),
            )
        )
        return same

    def _number(self, tensor: torch.Tensor, created: int = 0) -> int:
        if tensor not in self._numbers:
            self._numbers[tensor] = len(self._created)
            self._created[self._numbers[tensor]] = created
        number: int = self._numbers[tensor]
        return number

    def _add_event(
        self, module: str, call: int, is_end: bool, values: Any
    ) -> None:
        self._steps.append(
            ModuleEvent(module, call, is_end, *self._values(values))
        )

    def _values(self, value: Any) -> tuple[tuple[Any, ...], pytree.TreeSpec]:
        leaves, spec = flatten(value)
        return self._recorded(leaves), spec

    def _recorded(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        with torch._C.DisableTorchFunction():
            return tuple(
                Recorded(
                    self._numbers.get(leaf),
                    tuple(leaf.shape),
                    leaf.dtype,
                    _memory(leaf),
                )
                if isinstance(leaf, torch.Tensor)
                else comparable(leaf)  # not the object, which holds tensors
                for leaf in leaves
            )

    def keep(self, result: Any) -> None:
        """Marks the model's results as used."""
        for tensor in tensors_in(result):
            number = self._numbers.get(tensor)
            if number is not None:
                self._last_use[number] = math.inf

    def run(self) -> ModelRun:
        """Returns the record, when the model's results are gone."""
        if self._kept():
            gc.collect()  # of cycles of references
        return ModelRun(
            self._steps, self._created, self._last_use, self._kept()
        )

    def _kept(self) -> frozenset[int]:
        return frozenset(
            number
            for number in self._numbers.values()
            if self._created[number]
        )


def is_operation(func: Any, result: Any) -> bool:
    """Returns True if a call of torch counts as a step of a record."""
    name = name_of(func)
    if name in READS_SHAPE_ONLY:
        return False
    return (
        name in _READS_VALUES
        or name.startswith("__set")
        or bool(tensors_in(result))
    )


def name_of(func: Any) -> str:
    """Returns the name of a torch function; of a property, its own name."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", name)
    return str(name)


def _memory(tensor: torch.Tensor) -> int:
    """Returns an id of a tensor's memory; 0 within torch.vmap."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return 0
