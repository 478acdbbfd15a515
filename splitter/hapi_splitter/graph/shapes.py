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

from hapi_protocol.errors import PackageError, bad_package
from hapi_splitter.graph.batch_independence import (
    BatchPosition,
    Bound,
    MixesSamplesError,
    Value,
    tensors_of,
)
from hapi_splitter.graph.flops import flops_of
from hapi_splitter.graph.integer_bounds import (
    dtype_bounds,
    is_within,
    result_bounds,
    weight_bounds,
)
from hapi_splitter.graph.operators import (
    CUMSUM,
    DTYPE_NAMES,
    EMBEDDING,
    FLOATS,
    INDICES,
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
    names: Sequence[str] = (),
) -> tuple[Value, ...]:
    """Infers the static properties of every tensor, in the order of ids.

    Args:
        program: with operators and argument types already checked.
        weights: by id; of floats only shapes and dtypes are read.
        form: form of one sample.
        limits: None means no limits.
        names: names of the calls, for messages.

    Raises:
        PackageError: naming the call that fails, mixes samples, exceeds a
            limit, looks up unchecked ids or has an unsupported dtype.
    """
    every = dtype_bounds(form.dtype)
    values = {
        INPUT: Value(
            (1, *form.shape), form.dtype, BatchPosition(0), True, every
        )
    }
    _check_limits(values[INPUT], 0, limits, "the input")
    ids = {INPUT} if values[INPUT].num_elements <= MAX_IDS else set()
    num_lookups = 0
    meta = torch.device("meta")
    runs: list[_Shapes] = [
        {INPUT: form.zeros(batch, meta)} for batch in _BATCHES
    ]
    for node, weight in weights.items():
        _check_dtype(weight.dtype, f"weight {node}")
        shape, bounds = tuple(weight.shape), weight_bounds(weight)
        values[node] = Value(shape, weight.dtype, None, False, bounds)
        for run in runs:
            run[node] = torch.empty_like(weight, device="meta")
    flops = 0
    for node, call in enumerate(program.calls, program.first_call):
        operator = operators()[call.op]
        where = f"call {node}, {call.op}"
        if names:
            where = f"{call.op} in {names[node - program.first_call]}"
        bound = bind(operator, call.args, values)
        if call.op == EMBEDDING:
            num_lookups += 1
            _check_lookup(call, bound, ids, num_lookups, where)
        elif call.op in INDICES:
            _check_indices(call, bound, where)
        for batch, run in zip(_BATCHES, runs, strict=True):
            try:
                run[node] = run_call(call, run, batch)
            except _CANNOT_RUN as error:
                reason = str(error).partition("\n")[0][:200]
                raise bad_package(f"{where}: cannot run: {reason}") from None
        _check_product(operator.name, bound, where)
        _check_cumsum(operator.name, runs[0][node].dtype, where)
        values[node] = _value(operator, bound, [r[node] for r in runs], where)
        if _holds_ids(call, values[node], ids):
            ids.add(node)
        flops += flops_of(operator.name, bound, values[node])
        _check_limits(values[node], flops, limits, where)
    return tuple(values[node] for node in range(len(values)))


def warm_up() -> None:
    """Makes torch import what :func:`infer` needs, which takes seconds."""
    relu = Call("aten.relu.default", (Ref(INPUT),))
    infer(Program(0, (relu,)), {}, SampleForm((1,)))


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
        raise bad_package(f"{where}: would mix samples: {error}") from None
    shape = list(results[0].shape)
    if batch is not None:
        shape[batch.dim] = batch.coefficient
    for size, result in zip(_BATCHES, results, strict=True):
        expected = list(shape)
        if batch is not None:
            expected[batch.dim] *= size
        if expected != list(result.shape):
            raise bad_package(
                f"{where}: shape {list(result.shape)} for a batch of {size}, "
                f"expected {expected}",
            )
    _check_dtype(results[0].dtype, where)
    data = any(value.data for value in tensors_of(bound))
    dtype = results[0].dtype
    bounds = result_bounds(operator.name, bound, dtype)
    return Value(tuple(shape), dtype, batch, data, bounds)


def _check_dtype(dtype: torch.dtype, where: str) -> None:
    if dtype not in DTYPE_NAMES:
        raise bad_package(
            f"{where}: tensors of {dtype} are not supported; use "
            f"{', '.join(DTYPE_NAMES.values())}",
        )


def _check_product(op: str, bound: Bound, where: str) -> None:
    if op not in PRODUCTS:
        return
    dtypes = {
        name: value.dtype
        for name, value in bound.items()
        if isinstance(value, Value)
    }
    if dtypes.get("attn_mask") == torch.bool:
        del dtypes["attn_mask"]
    first = next(iter(dtypes.values()))
    for name, dtype in dtypes.items():
        if dtype not in FLOATS or dtype != first:
            raise bad_package(
                f"{where}: its argument {name!r} is of {dtype}; products "
                "take tensors that are all float32, all bfloat16 or all "
                "float16",
            )


def _check_cumsum(op: str, dtype: torch.dtype, where: str) -> None:
    if op == CUMSUM and dtype.is_floating_point:
        raise bad_package(
            f"{where}: cumulative sums of {dtype} are not supported; torch "
            "has no deterministic kernel for GPUs; use integers or bools",
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
    """Accepts bounded indices, and ids of the input.

    The range of ids is checked per sample. See
    :mod:`hapi_splitter.graph.index_bounds`.
    """
    if number > MAX_LOOKUPS:
        raise bad_package(f"{where}: more than {MAX_LOOKUPS} lookups")
    weight, indices = bound["weight"], bound["indices"]
    is_table = not weight.data and weight.ndim == 2 and weight.shape[0] > 0
    if not is_table or indices.dtype != torch.int64:
        raise _unchecked(indices, where)
    if call.refs()[1] not in ids and not is_within(indices, weight.shape[0]):
        raise _unchecked(indices, where)


def _check_indices(call: Call, bound: Bound, where: str) -> None:
    table, indices = (bound[name] for name in INDICES[call.op])
    sizes = dict(enumerate(table.shape)) | {
        dim - table.ndim: size for dim, size in enumerate(table.shape)
    }
    size = sizes.get(bound["dim"], 0)
    if indices.dtype != torch.int64 or not is_within(indices, size):
        raise _unchecked(indices, where)


def _unchecked(indices: Value, where: str) -> PackageError:
    """Makes the error for indices of unknown range.

    One out of range would end a GPU's process.
    """
    if indices.bounds is None:
        known = ""
    else:
        known = f", from {indices.bounds[0]} to {indices.bounds[1]}"
    return bad_package(
        f"{where}: it must look up unchanged int64 ids of the input, at most "
        f"{MAX_IDS} per sample, in a constant table of rows, or int64 indices "
        "whose computation limits them to the table, such as clamp; the range "
        f"of these indices ({indices.dtype}{known}) cannot be checked",
    )


def _check_limits(
    value: Value, flops: int, limits: ShapeLimits | None, where: str
) -> None:
    if limits is None:
        return
    if value.num_bytes > limits.sample_bytes:
        raise bad_package(
            f"{where}: a tensor of {value.num_bytes} bytes per sample exceeds "
            f"the limit of {limits.sample_bytes}",
        )
    if flops > limits.sample_flops:
        raise bad_package(
            f"{where}: exceeds the limit of {limits.sample_flops} "
            "floating-point operations per sample",
        )
