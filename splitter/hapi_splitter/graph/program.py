"""The frozen region as plain data: a flat list of ATen calls.

A program has one input (a batch of samples), ``num_weights`` weights and a
list of calls, each of which yields one tensor. Tensors are numbered: 0 is
the input, 1 to ``num_weights`` the weights, then the calls in order. The
last call is the output. Packages store programs, never torch's graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, Union

import torch

from hapi_protocol.errors import bad_package
from hapi_splitter.graph.operators import DTYPE_NAMES, DTYPES, operators

INPUT = 0


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a tensor by id."""

    node: int


@dataclass(frozen=True, slots=True)
class Affine:
    """A size ``batch * B + constant`` for a batch of ``B`` samples."""

    batch: int
    constant: int = 0

    def at(self, batch: int) -> int:
        return self.batch * batch + self.constant


Argument: TypeAlias = Union[  # noqa: UP007 (it refers to itself)
    Ref, Affine, torch.dtype, int, float, bool, tuple["Argument", ...], None
]


@dataclass(frozen=True, slots=True)
class Call:
    """One ATen call; ``args`` are in the order of the operator's table row."""

    op: str
    args: tuple[Argument, ...]

    def refs(self) -> tuple[int, ...]:
        """Returns ids of the tensors that the call reads."""
        return tuple(_refs(self.args))


def _refs(argument: Argument) -> list[int]:
    if isinstance(argument, Ref):
        return [argument.node]
    if isinstance(argument, tuple):
        return [node for item in argument for node in _refs(item)]
    return []


@dataclass(frozen=True, slots=True)
class Program:
    """The calls of a frozen region.

    Args:
        num_weights: number of weights; their ids begin at 1.
        calls: call ``i`` yields tensor ``num_weights + 1 + i``.
    """

    num_weights: int
    calls: tuple[Call, ...]

    @property
    def first_call(self) -> int:
        return self.num_weights + 1

    @property
    def output(self) -> int:
        return self.num_weights + len(self.calls)

    def call(self, node: int) -> Call:
        return self.calls[node - self.first_call]

    def to_json(self) -> dict[str, Any]:
        return {
            "weights": self.num_weights,
            "calls": [
                [node, call.op, [_encode(a) for a in call.args]]
                for node, call in enumerate(self.calls, self.first_call)
            ],
        }


def _encode(argument: Argument) -> Any:
    if isinstance(argument, Ref):
        return argument.node
    if isinstance(argument, Affine):
        return {"batch": argument.batch, "constant": argument.constant}
    if isinstance(argument, torch.dtype):
        return DTYPE_NAMES[argument]
    if isinstance(argument, tuple):
        return [_encode(item) for item in argument]
    return argument


def program_from_json(document: Any, max_calls: int) -> Program:
    """Parses an untrusted program.

    Every call is checked against the table of operators: its name, and the
    number and types of its arguments.

    Raises:
        PackageError: naming the call and what is wrong with it.
    """
    if not isinstance(document, dict) or set(document) != {"weights", "calls"}:
        raise bad_package(
            "graph.json must be an object of 'weights' and 'calls'"
        )
    num_weights, calls = document["weights"], document["calls"]
    if type(num_weights) is not int or not 0 <= num_weights <= max_calls:
        raise bad_package(
            f"'weights' must be 0 to {max_calls}, not {num_weights!r:.40}"
        )
    if not isinstance(calls, list) or not calls:
        raise bad_package("'calls' must be a list of at least one call")
    if len(calls) > max_calls:
        raise bad_package(
            f"{len(calls)} calls in the graph, more than the limit of "
            f"{max_calls} nodes"
        )
    return Program(
        num_weights,
        tuple(
            read_call(entry, node)
            for node, entry in enumerate(calls, num_weights + 1)
        ),
    )


def read_call(entry: Any, node: int) -> Call:
    """Parses one untrusted call.

    Raises:
        PackageError: naming the call and what is wrong with it.
    """
    if not isinstance(entry, list) or len(entry) != 3:
        raise bad_package(
            f"call {node} is not a list of id, operator, arguments"
        )
    identifier, op, args = entry
    if type(identifier) is not int or identifier != node:
        raise bad_package(
            f"call {node} has the id {identifier!r:.40}; ids must be "
            "consecutive integers"
        )
    operator = operators().get(op) if isinstance(op, str) else None
    if operator is None:
        raise bad_package(
            f"call {node}: operator {op!r:.80} is not in the table"
        )
    if not isinstance(args, list) or len(args) != len(operator.parameters):
        raise bad_package(
            f"call {node}: {op} takes {len(operator.parameters)} arguments"
        )
    read = []
    for parameter, value in zip(operator.parameters, args, strict=True):
        try:
            is_none = value is None and parameter.kind.endswith("?")
            kind = parameter.kind.removesuffix("?")
            read.append(None if is_none else _READERS[kind](value, node))
        except _Mismatch as error:
            raise bad_package(
                f"call {node}: argument {parameter.name!r} of {op} must be "
                f"{error}, not {value!r:.80}"
            ) from None
    return Call(op, tuple(read))


class _Mismatch(Exception):
    """An argument has another type than the one in the message."""


def _tensor(value: Any, node: int) -> Ref:
    if type(value) is int and 0 <= value < node:
        return Ref(value)
    raise _Mismatch("the id of an earlier tensor")


def _tensors(value: Any, node: int) -> tuple[Ref, ...]:
    if isinstance(value, list) and 0 < len(value) <= _MAX_LIST:
        return tuple(_tensor(item, node) for item in value)
    raise _Mismatch("a list of ids of earlier tensors")


def _int(value: Any, node: int) -> int:
    if type(value) is int and abs(value) < _MAX_INT:
        return value
    raise _Mismatch("an integer of at most 62 bits")


def _ints(value: Any, node: int) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) <= _MAX_DIMS:
        return tuple(_int(item, node) for item in value)
    raise _Mismatch(f"a list of at most {_MAX_DIMS} integers")


def _size(value: Any, node: int) -> tuple[int | Affine, ...]:
    if isinstance(value, list) and len(value) <= _MAX_DIMS:
        return tuple(_dimension(item, node) for item in value)
    raise _Mismatch(f"a list of at most {_MAX_DIMS} sizes")


def _dimension(value: Any, node: int) -> int | Affine:
    if not isinstance(value, dict):
        return _int(value, node)
    if set(value) != {"batch", "constant"}:
        raise _Mismatch("an integer or {batch, constant}")
    return Affine(_int(value["batch"], node), _int(value["constant"], node))


def _number(value: Any, node: int) -> int | float:
    return _int(value, node) if type(value) is int else _float(value, node)


def _float(value: Any, node: int) -> float:
    if type(value) is int:
        return float(_int(value, node))
    if type(value) is float and math.isfinite(value):
        return value
    raise _Mismatch("a finite number")


def _bool(value: Any, node: int) -> bool:
    if isinstance(value, bool):
        return value
    raise _Mismatch("true or false")


def _zero(value: Any, node: int) -> float:
    if type(value) in (int, float) and value == 0:
        return 0.0
    raise _Mismatch("0 (anything else draws random numbers)")


def _dtype(value: Any, node: int) -> torch.dtype:
    if isinstance(value, str) and value in DTYPES:
        return DTYPES[value]
    raise _Mismatch(f"null or one of {', '.join(DTYPES)}")


_MAX_INT = 2**62
_MAX_DIMS = 8
_MAX_LIST = 4096
_READERS: Mapping[str, Callable[[Any, int], Argument]] = MappingProxyType(
    {
        "tensor": _tensor,
        "tensors": _tensors,
        "int": _int,
        "ints": _ints,
        "size": _size,
        "float": _float,
        "number": _number,
        "bool": _bool,
        "tanh": _bool,
        "zero": _zero,
        "dtype": _dtype,
    }
)
