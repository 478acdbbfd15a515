"""Converts a module to a program through ``torch.export``.

The exported graph is functionalised and canonicalised: every regrouping of
dimensions becomes ``reshape``, splits become slices, tensors that depend only
on weights are computed once, and sizes become numbers or multiples of the
batch. The remaining calls are translated one by one.
"""

from __future__ import annotations

import operator as operator_module
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from hapi_protocol.errors import FreezeError, PackageError, cannot_freeze
from hapi_splitter.graph.batch_constants import (
    BatchConstants,
    has_symbols,
    is_fixed,
    is_size,
)
from hapi_splitter.graph.call_names import call_names
from hapi_splitter.graph.canonicalize import (
    ASSERTIONS,
    RESHAPES,
    SPLITS,
    is_identity,
    rewrite,
)
from hapi_splitter.graph.decompositions import IDENTITY, Rewritten
from hapi_splitter.graph.exporter import exported_program, relative
from hapi_splitter.graph.indexing import INDEX, rewrite_index
from hapi_splitter.graph.operators import operators
from hapi_splitter.graph.program import (
    INPUT,
    Affine,
    Call,
    Program,
    Ref,
    read_call,
)
from hapi_splitter.graph.program_builder import ProgramBuilder
from hapi_splitter.user_code import traced_line


@dataclass(frozen=True)
class ExportedRegion:
    """A program, its weights by id, name and stack trace of each call."""

    program: Program
    weights: dict[int, torch.Tensor]
    names: Sequence[str]
    traces: Sequence[str]


def export_region(
    module: nn.Module, example: torch.Tensor, inner: str = ""
) -> ExportedRegion:
    """Exports a module of one input and one output.

    Args:
        module: in eval mode, on one device.
        example: float32 ``[2, ...]`` on that device.
        inner: name of the submodule to which the names of calls are relative.

    Raises:
        FreezeError: ``cannot_trace`` with torch's reason, or
            ``unknown_op`` naming the operator and where it is.
    """
    exported = exported_program(module, example, inner)
    return _Translation(exported, inner).region()


class _Translation:
    """Translates one exported program."""

    def __init__(
        self, exported: torch.export.ExportedProgram, inner: str
    ) -> None:
        self._exported = exported
        self._inner = inner
        self._constants: dict[fx.Node, Any] = {}
        self._batch_constants = BatchConstants(self._constants, size_of)
        self._known: dict[fx.Node, Any] = {}
        self._builder = ProgramBuilder()

    def region(self) -> ExportedRegion:
        *nodes, output = self._exported.graph.nodes
        results: Any = output.args[0]
        needed = self._needed(results[-1])
        for node in nodes:
            if node not in needed:
                continue
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._call(node)
        result = self._known.get(results[-1])
        if not isinstance(result, Ref) or not self._builder.is_call(result):
            raise cannot_freeze("nothing is computed before the freeze point")
        program, weights, origins = self._builder.program(result)
        _check(program, origins)
        traces = [origin.meta.get("stack_trace") or "" for origin in origins]
        return ExportedRegion(program, weights, call_names(origins), traces)

    def _needed(self, result: fx.Node) -> set[fx.Node]:
        """Returns the nodes that a result is computed from.

        Other state that the module changes, such as counters, is not.
        """
        kinds = torch.export.graph_signature.OutputKind
        signature = self._exported.graph_signature
        changed = {
            spec.target
            for spec in signature.output_specs
            if spec.kind in (kinds.BUFFER_MUTATION, kinds.PARAMETER_MUTATION)
        }
        targets = {
            getattr(spec.arg, "name", None): spec.target
            for spec in signature.input_specs
        }
        needed, pending = set(), [result]
        while pending:
            node = pending.pop()
            if node in needed:
                continue
            needed.add(node)
            pending += node.all_input_nodes
            target = targets.get(node.name)
            if node.op == "placeholder" and target in changed:
                name = relative(str(target), self._inner)
                raise cannot_freeze(
                    f"the frozen region uses its {name!r}, which it changes "
                    "in every forward; freeze before it",
                )
        return needed

    def _placeholder(self, node: fx.Node) -> None:
        for spec in self._exported.graph_signature.input_specs:
            if getattr(spec.arg, "name", None) != node.name:
                continue
            if spec.kind is torch.export.graph_signature.InputKind.USER_INPUT:
                self._known[node] = Ref(INPUT)
            else:
                self._constants[node] = self._stored(spec.target)

    def _stored(self, target: str | None) -> torch.Tensor:
        assert target is not None
        source = self._exported.state_dict
        if target not in source:
            source = self._exported.constants
        stored = source[target]
        if not isinstance(stored, torch.Tensor):
            name = relative(target, self._inner)
            raise cannot_freeze(
                f"the frozen region uses {name!r}, a "
                f"{type(stored).__name__}, and packages hold tensors only; "
                "freeze before it",
            )
        return stored.detach()

    def _call(self, node: fx.Node) -> None:
        name = str(node.target)
        if is_size(node) or name in ASSERTIONS:
            return
        if not self._fold_constant(node) and not self._batch_constants.add(
            node
        ):
            try:
                self._known[node] = self._result_of(node)
            except BatchSizeError as error:
                raise _depends_on_batch(node) from error

    def _result_of(self, node: fx.Node) -> Any:
        name = str(node.target)
        if node.target is operator_module.getitem:
            return self._item(*node.args)
        if is_identity(node):
            return self._argument(node.all_input_nodes[0])
        if name in SPLITS:
            return self._split(node, name)
        return self._translate(node, name)

    def _item(self, source: Any, index: Any) -> Any:
        results = self._argument(source)
        if index >= len(results):
            raise _unknown(source, str(source.target))
        return results[index]

    def _fold_constant(self, node: fx.Node) -> bool:
        """Evaluates a call that depends only on weights."""
        if not is_fixed(node, self._constants):
            return False
        if any(_is_symbol(n.meta["val"]) for n in node.all_input_nodes):
            return False
        self._constants[node] = self._batch_constants.value(node)
        return True

    def _split(self, node: fx.Node, name: str) -> list[Any]:
        source = self._argument(node.args[0])
        dim, keeps_dim = _bound(node)["dim"], name != "aten.unbind.int"
        parts, start = [], 0
        for value in node.meta["val"]:
            size = int(value.shape[dim]) if keeps_dim else 1
            op = "aten.slice.Tensor" if keeps_dim else "aten.select.int"
            bounds = (start, start + size, 1) if keeps_dim else (start,)
            parts.append(self._add(node, op, (source, dim, *bounds)))
            start += size
        return parts

    def _translate(self, node: fx.Node, name: str) -> Any:
        if name in RESHAPES:
            shape = tuple(size_of(s) for s in node.meta["val"].shape)
            source = self._argument(node.args[0])
            return self._add(node, "aten.reshape.default", (source, shape))
        if name == INDEX:
            counts_samples = self._batch_constants.counts_samples
            rewritten = rewrite_index(
                _bound(node), node, self._fixed, counts_samples
            )
        else:
            rewritten = rewrite(name, _bound(node), node)
        if rewritten is None:
            raise _unknown(node, name)
        result = self._emit(node, rewritten)
        # Nothing reads the other results of batch norm and max.
        return [result] if isinstance(node.meta["val"], tuple) else result

    def _fixed(self, node: fx.Node) -> torch.Tensor | None:
        """Returns the value of a node that does not depend on the batch."""
        if node in self._batch_constants and node not in self._constants:
            constant = self._batch_constants.find(node)
            if constant is None or constant.dim is not None:
                return None
            return constant.per_sample
        return self._constants.get(node)

    def _emit(self, node: fx.Node, rewritten: Rewritten) -> Any:
        op, arguments = rewritten
        if op == IDENTITY:
            return self._resolved(node, arguments["self"])
        args = tuple(
            self._resolved(node, arguments[parameter.name])
            for parameter in operators()[op].parameters
        )
        return self._add(node, op, args)

    def _resolved(self, node: fx.Node, argument: Any) -> Any:
        if isinstance(argument, Rewritten):
            return self._emit(node, argument)
        if isinstance(argument, torch.Tensor):
            return self._builder.store(argument)
        if isinstance(argument, list | tuple):
            return tuple(self._resolved(node, item) for item in argument)
        return self._argument(argument)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            value = argument.meta.get("val")
            if _is_symbol(value) or isinstance(value, int):
                return size_of(value)
            if argument in self._constants:
                return self._weight(argument, self._constants[argument])
            if argument in self._batch_constants:
                return self._batch_constant(argument)
            return self._known[argument]
        if isinstance(argument, torch.SymInt):
            return size_of(argument)
        if isinstance(argument, list | tuple):
            return tuple(self._argument(item) for item in argument)
        return argument

    def _weight(self, node: fx.Node, tensor: torch.Tensor) -> Any:
        if node not in self._known:
            self._known[node] = self._builder.store(tensor)
        return self._known[node]

    def _batch_constant(self, node: fx.Node) -> Any:
        """Adds a weight that is expanded once per sample."""
        if node in self._known:
            return self._known[node]
        constant = self._batch_constants.find(node)
        if constant is None:
            # It is rounded differently in each batch, or differs by sample.
            try:
                self._known[node] = self._result_of(node)
            except FreezeError as error:
                op = (error.details or {}).get("op")
                raise _depends_on_batch(node, op) from error
            return self._known[node]
        value = constant.per_sample
        result = self._weight(node, value)
        if constant.dim is not None:
            result = self._expand(node, result, value.shape, constant.dim)
        self._known[node] = result
        return result

    def _expand(
        self, node: fx.Node, weight: Any, shape: Sequence[int], dim: int
    ) -> Any:
        before, count, after = shape[:dim], shape[dim], shape[dim + 1 :]
        if count == 1:
            sizes = (*before, Affine(1), *after)
            return self._add(node, "aten.expand.default", (weight, sizes))
        single = self._add(node, "aten.unsqueeze.default", (weight, dim))
        sizes = (*before, Affine(1), count, *after)
        copies = self._add(node, "aten.expand.default", (single, sizes))
        sizes = (*before, Affine(count), *after)
        return self._add(node, "aten.reshape.default", (copies, sizes))

    def _add(self, node: fx.Node, op: str, args: tuple[Any, ...]) -> Ref:
        return self._builder.add(node, Call(op, args))


def _check(program: Program, origins: Sequence[fx.Node]) -> None:
    """Refuses calls that a package could not hold."""
    entries = program.to_json()["calls"]
    for call, entry, node in zip(program.calls, entries, origins, strict=True):
        try:
            read_call(entry, entry[0])
        except PackageError as error:
            if _computes_with_batch(call):
                raise _depends_on_batch(node) from error
            raise FreezeError(
                "unknown_op",
                f"in {_where(node)}: {error.message}; freeze before it, "
                "or use other operators",
                details={"op": call.op},
            ) from error


def _bound(node: fx.Node) -> dict[str, Any]:
    """Returns a call's arguments by schema name, including defaults."""
    bound = {}
    assert isinstance(node.target, torch._ops.OpOverload)
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            bound[argument.name] = node.args[index]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound


def _is_symbol(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat)


class BatchSizeError(FreezeError):
    """A number depends on the batch size, and is no multiple of it."""


def size_of(value: Any) -> int | Affine:
    """Returns a size as a multiple of the batch size, or a number.

    Raises:
        BatchSizeError: ``cannot_trace`` if it depends on it in another way.
    """
    if isinstance(value, int):
        return value
    expression = value.node.expr
    symbols = list(expression.free_symbols)
    if not symbols:
        return int(expression)
    symbol = symbols[0]
    slope = expression.subs(symbol, 2) - expression.subs(symbol, 1)
    constant = expression.subs(symbol, 1) - slope
    if len(symbols) > 1 or (expression - slope * symbol - constant) != 0:
        raise BatchSizeError(
            "cannot_trace",
            f"a size of {expression} is not a multiple of the batch size",
        )
    return Affine(int(slope), int(constant))


def _computes_with_batch(call: Call) -> bool:
    parameters = operators()[call.op].parameters
    return any(
        isinstance(value, Affine)
        or (
            isinstance(value, tuple)
            and kind != "size"
            and Affine in map(type, value)
        )
        for value, kind in zip(
            call.args, [p.kind for p in parameters], strict=True
        )
    )


def _depends_on_batch(node: fx.Node, op: str | None = None) -> FreezeError:
    op = op or str(node.target)
    return FreezeError(
        "unknown_op",
        "the frozen region computes with the number of samples in a batch by "
        f"{op} in {_where(node)}, so that features would depend on "
        "the batch; freeze before it",
        details={"op": op},
    )


def _joins_samples(node: fx.Node) -> bool:
    """Returns True if a result has no batch, and an argument has one."""
    given = [operand.meta.get("val") for operand in node.all_input_nodes]
    result = node.meta.get("val")
    return any(map(has_symbols, given)) and not has_symbols(result)


def _unknown(node: fx.Node, name: str) -> FreezeError:
    if _joins_samples(node):
        return FreezeError(
            "unknown_op",
            f"the frozen region mixes the samples of a batch by {name} in "
            f"{_where(node)}, so that features would depend on the batch; "
            "freeze before it",
            details={"op": name},
        )
    return FreezeError(
        "unknown_op",
        f"model packages do not support operator {name} in {_where(node)}; "
        "freeze before it, or use other operators",
        details={"op": name},
    )


def _where(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path]
    line = traced_line(node.meta.get("stack_trace"))
    return f"{paths[-1] if paths else 'the model'}{line}"
