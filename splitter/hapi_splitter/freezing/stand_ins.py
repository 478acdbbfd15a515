"""The recorded steps of a model before its freeze point, as plain values.

When the tail runs, modules that end before the freeze point are not computed,
and what the model's code does with their results up to there is not either.
Tensors without data stand in for all of it
(:mod:`hapi_splitter.freezing.stand_in_tensor`).  These are the steps that they
go through; :mod:`hapi_splitter.freezing.replay` accepts no others.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils import _pytree as pytree

from hapi_splitter.freezing.code_form import code_form, is_librarys
from hapi_splitter.graph.program import Affine, Ref


@dataclass(frozen=True)
class TensorForm:
    """A tensor's shape for any batch size, and its dtype."""

    shape: tuple[int | Affine, ...]
    dtype: torch.dtype

    def sizes(self, batch: int) -> list[int]:
        return [
            size.at(batch) if isinstance(size, Affine) else size
            for size in self.shape
        ]

    @property
    def is_batch(self) -> bool:
        """True if the first dimension is the batch, and no other grows."""
        first, *others = self.shape or (0,)
        return first == Affine(1) and all(type(n) is int for n in others)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return tuple(size for size in self.shape[1:] if type(size) is int)


@dataclass(frozen=True)
class StandIn:
    """A tensor of the samples that is not computed.

    Args:
        number: number of the tensor in the record.
        form: its shape and dtype.
    """

    number: int
    form: TensorForm


@dataclass(frozen=True)
class Entry:
    """The step at which a tensor that is sent replaces its stand-in.

    Args:
        number: number of the tensor.
        step: index of the step that yields it; -1 for an input of the model.
    """

    number: int
    step: int


@dataclass(frozen=True)
class Answer:
    """The answer to a question about a tensor, such as ``mask.all()``.

    Up to the freeze point the answer is what it was: in an export it would be
    an error, so that only code asks that does not ask while it is exported,
    and for which both answers are right.
    """

    value: bool


@dataclass(frozen=True)
class OtherTensor:
    """An argument that does not depend on the samples."""


@dataclass(frozen=True)
class OtherValue:
    """An argument that is compared by a text: its type, and the code of a
    function or the plain attributes of an object of the user's."""

    text: str


PLAIN = frozenset(
    (int, float, str, bool, type(None), torch.dtype, torch.device)
)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType)
_BY_REPR = (complex, type(...), torch.memory_format, torch.layout)


def comparable(value: Any) -> Any:
    """Returns a plain value itself, of others :class:`OtherValue`."""
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in PLAIN or isinstance(value, OtherValue):
        return value
    if isinstance(value, np.ndarray):
        return OtherValue(hashlib.sha256(value.tobytes()).hexdigest())
    if isinstance(value, _BY_REPR):
        return OtherValue(repr(value))
    kind = type(value)
    text = kind.__name__
    if isinstance(value, _CODE):
        text += f" {value.__module__}.{value.__qualname__}"
        code = getattr(value, "__code__", None)
        if code is not None:
            text += f" {zlib.crc32(repr(code_form(code)).encode())}"
    elif not is_librarys(kind):
        plain = {
            name: item
            for name, item in getattr(value, "__dict__", {}).items()
            if type(item) in PLAIN
        }
        text += f" {plain}"
    return OtherValue(text)


@dataclass(frozen=True)
class VaryingValue:
    """An argument that depends on the batch in no known way."""


@dataclass(frozen=True)
class ModuleResult:
    """The result of one call of a module that is not run.

    Args:
        module: dotted name.
        args: flattened arguments, as those of an operation.
        values: flattened results: :class:`StandIn` or None.
        spec: structure of the results.
    """

    module: str
    args: tuple[Any, ...]
    values: tuple[Any, ...]
    spec: pytree.TreeSpec


@dataclass(frozen=True)
class SkippedOperation:
    """One call of a torch function before the freeze point.

    It is computed only if all that it reads is sent.

    Args:
        name: name of the function.
        args: flattened arguments: :class:`~hapi_splitter.graph.program.Ref`
            for tensors of the samples, others as above or plain values, with
            :class:`~hapi_splitter.graph.program.Affine` for integers that
            follow from the batch size.
        values: flattened results: numbers of tensors, :class:`Answer`, or
            None.
        dtypes: dtypes of these tensors.
        spec: structure of the results.
    """

    name: str
    args: tuple[Any, ...]
    values: tuple[int | Answer | None, ...]
    dtypes: tuple[torch.dtype | None, ...]
    spec: pytree.TreeSpec

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset(n for n in self.values if isinstance(n, int))

    @property
    def reads(self) -> frozenset[int]:
        return frozenset(a.node for a in self.args if isinstance(a, Ref))


SkippedStep: TypeAlias = ModuleResult | SkippedOperation
