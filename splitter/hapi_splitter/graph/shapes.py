"""Infers shapes and batch positions of a program's tensors.

Shapes recorded in a package are not trusted. The checked program runs on
torch's ``meta`` device, which needs no memory, with two batch sizes. Only the
dimension that the rules of :mod:`hapi_splitter.graph.batch_independence` call
the batch may grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hapi_protocol.errors import PackageError
from hapi_splitter.graph.batch_independence import (
    Batch,
    Bound,
    MixesSamplesError,
    Value,
    tensors_of,
)
from hapi_splitter.graph.flops import flops_of
from hapi_splitter.graph.operators import (
    DTYPE_NAMES,
    EMBEDDING,
    PRODUCTS,
    SELECTIONS,
    Operator,
    operators,
)
from hapi_splitter.graph.program import (
    INPUT,
    Affine,
    Argument,
    Call,
    Program,
    Ref,
)
from hapi_splitter.inputs.sample_format import SampleForm

MAX_IDS = 1 << 17
"""Most ids of one sample in one lookup."""
MAX_LOOKUPS = 512
MAX_MOVES = 512
"""Most calls that move ids before they are looked up."""

_BATCHES = (2, 3)
_CANNOT_RUN = (
    RuntimeError,  # also NotImplementedError
    ArithmeticError,
    IndexError,
    TypeError,
    ValueError,
)
_Shapes: TypeAlias = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ShapeLimits:
    """Limits on the cost of a program.

    Args:
        sample_bytes: largest tensor, in bytes per sample (of a constant:
            in total).
        sample_flops: floating-point operations of all calls per sample.
    """

    sample_bytes: int = 1 << 30
    sample_flops: int = 10**13


def infer(
    program: Program,
    weights: Mapping[int, torch.Tensor],
    form: SampleForm,
    limits: ShapeLimits | None = None,
) -> tuple[Value, ...]:
    """Infers the static properties of every tensor, in the order of ids.

    Args:
        program: with operators and argument types already checked.
        weights: by id; only shapes and dtypes are read.
        form: of one sample.
        limits: None means no limits.

    Raises:
        PackageError: naming the call that fails, mixes samples, exceeds a
            limit, looks up unchecked ids or has an unsupported dtype.
    """
    values = {INPUT: Value((1, *form.shape), form.dtype, Batch(0), True)}
    _check_limits(values[INPUT], 0, limits, "the input")
    ids = {INPUT} if values[INPUT].num_elements <= MAX_IDS else set()
    num_lookups = 0
    meta = torch.device("meta")
    runs: list[_Shapes] = [
        {INPUT: form.zeros(batch, meta)} for batch in _BATCHES
    ]
    for node, weight in weights.items():
        _check_dtype(weight.dtype, f"weight {node}")
        values[node] = Value(tuple(weight.shape), weight.dtype, None, False)
        for run in runs:
            run[node] = torch.empty_like(weight, device="meta")
    flops = 0
    for node, call in enumerate(program.calls, program.first_call):
        operator = operators()[call.op]
        where = f"call {node}, {call.op}"
        bound = bind(operator, call.args, values)
        if call.op == EMBEDDING:
            num_lookups += 1
            _check_lookup(call, bound, ids, num_lookups, where)
        for batch, run in zip(_BATCHES, runs, strict=True):
            try:
                run[node] = run_call(call, run, batch)
            except _CANNOT_RUN as error:
                reason = str(error).partition("\n")[0][:200]
                raise PackageError(
                    "bad_package", f"{where}: cannot run: {reason}"
                ) from None
        _check_product(operator.name, bound, where)
        values[node] = _value(operator, bound, [r[node] for r in runs], where)
        if _holds_ids(call, values[node], ids):
            ids.add(node)
        flops += flops_of(operator.name, bound, values[node])
        _check_limits(values[node], flops, limits, where)
    return tuple(values[node] for node in range(len(values)))


def run_call(
    call: Call, tensors: Mapping[int, torch.Tensor], batch: int
) -> torch.Tensor:
    """Runs a call and returns its tensor.

    Args:
        call: with its operator and argument types checked.
        tensors: the call's tensors by id, possibly on the ``meta`` device.
        batch: number of samples.

    Raises:
        RuntimeError, ArithmeticError, IndexError, TypeError, ValueError:
            from torch, if the arguments do not fit together.
    """

    def concrete(argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return tensors[argument.node]
        if isinstance(argument, Affine):
            return argument.at(batch)
        if isinstance(argument, tuple):
            return [concrete(item) for item in argument]
        return argument

    operator = operators()[call.op]
    positional, by_name = arrange(operator, [concrete(a) for a in call.args])
    with torch.no_grad():
        return first_tensor(operator.overload()(*positional, **by_name))


def first_tensor(result: Any) -> torch.Tensor:
    """Returns an operator's result; of batch norm's three, the first."""
    tensor = result[0] if isinstance(result, tuple) else result
    assert isinstance(tensor, torch.Tensor)
    return tensor


def arrange(
    operator: Operator, args: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Splits arguments in table order into positional and named ones."""
    positional: list[Any] = []
    by_name: dict[str, Any] = {}
    for parameter, value in zip(operator.parameters, args, strict=True):
        if parameter.kind == "tanh":
            value = "tanh" if value else "none"
        if parameter.by_name:
            by_name[parameter.name] = value
        else:
            positional.append(value)
    return positional, by_name


def bind(
    operator: Operator,
    args: tuple[Argument, ...],
    values: Mapping[int, Any],
) -> Bound:
    """Returns arguments by name, in the form that batch rules read.

    Args:
        operator: the operator of the call.
        args: in the order of its table row.
        values: replacements of tensors, by id.
    """

    def known(argument: Argument, kind: str) -> Any:
        if isinstance(argument, Ref):
            return values[argument.node]
        if isinstance(argument, Affine):
            return argument.batch, argument.constant
        if isinstance(argument, tuple):
            return tuple(known(item, kind) for item in argument)
        return (0, argument) if kind == "size" else argument

    return {
        parameter.name: known(argument, parameter.kind)
        for parameter, argument in zip(operator.parameters, args, strict=True)
    }


def _value(
    operator: Operator,
    bound: Bound,
    results: Sequence[torch.Tensor],
    where: str,
) -> Value:
    try:
        batch = operator.rule(bound)
    except MixesSamplesError as error:
        raise PackageError(
            "bad_package", f"{where}: would mix samples: {error}"
        ) from None
    shape = list(results[0].shape)
    if batch is not None:
        shape[batch.dim] = batch.coefficient
    for size, result in zip(_BATCHES, results, strict=True):
        expected = list(shape)
        if batch is not None:
            expected[batch.dim] *= size
        if expected != list(result.shape):
            raise PackageError(
                "bad_package",
                f"{where}: shape {list(result.shape)} for a batch of {size}, "
                f"expected {expected}",
            )
    _check_dtype(results[0].dtype, where)
    data = any(value.data for value in tensors_of(bound))
    return Value(tuple(shape), results[0].dtype, batch, data)


def _check_dtype(dtype: torch.dtype, where: str) -> None:
    if dtype not in DTYPE_NAMES:
        raise PackageError(
            "bad_package",
            f"{where}: tensors of {dtype} are not supported; use "
            f"{', '.join(DTYPE_NAMES.values())}",
        )


def _check_product(op: str, bound: Bound, where: str) -> None:
    if op not in PRODUCTS:
        return
    for name, value in bound.items():
        if not isinstance(value, Value) or value.dtype == torch.float32:
            continue
        if (name, value.dtype) != ("attn_mask", torch.bool):
            raise PackageError(
                "bad_package",
                f"{where}: its argument {name!r} is of {value.dtype}; "
                "products take torch.float32 only",
            )


def _holds_ids(call: Call, value: Value, ids: Set[int]) -> bool:
    return (
        call.op in SELECTIONS
        and ids >= set(call.refs())
        and value.num_elements <= MAX_IDS
        and len(ids) <= MAX_MOVES
    )


def _check_lookup(
    call: Call, bound: Bound, ids: Set[int], number: int, where: str
) -> None:
    """Accepts only ids of the input, whose range is checked per sample.

    An index out of range would end a GPU's process. See
    :mod:`hapi_splitter.graph.index_bounds`.
    """
    if number > MAX_LOOKUPS:
        raise PackageError(
            "bad_package", f"{where}: more than {MAX_LOOKUPS} lookups"
        )
    weight, indices = bound["weight"], bound["indices"]
    is_safe = (
        indices.dtype == torch.int64
        and call.refs()[1] in ids
        and not weight.data
        and weight.ndim == 2
        and weight.shape[0] > 0
    )
    if not is_safe:
        raise PackageError(
            "bad_package",
            f"{where}: it must look up unchanged int64 ids of the input, at "
            f"most {MAX_IDS} per sample, in a constant table of rows; the "
            f"range of these indices ({indices.dtype}) cannot be checked",
        )


def _check_limits(
    value: Value, flops: int, limits: ShapeLimits | None, where: str
) -> None:
    if limits is None:
        return
    if value.num_bytes > limits.sample_bytes:
        raise PackageError(
            "bad_package",
            f"{where}: a tensor of {value.num_bytes} bytes per sample exceeds "
            f"the limit of {limits.sample_bytes}",
        )
    if flops > limits.sample_flops:
        raise PackageError(
            "bad_package",
            f"{where}: exceeds the limit of {limits.sample_flops} "
            "floating-point operations per sample",
        )
