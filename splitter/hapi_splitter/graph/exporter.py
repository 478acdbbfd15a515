"""Runs ``torch.export`` on a module and explains its errors."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import torch
from torch import fx, nn

from hapi_protocol.errors import FreezeError
from hapi_splitter.graph.functionalize import functionalize
from hapi_splitter.user_code import failed_line, running_line, traced_line

_MAX_BATCH = 65536


def exported_program(
    module: nn.Module, example: torch.Tensor, inner: str = ""
) -> torch.export.ExportedProgram:
    """Exports a module for any batch size, without in-place operators.

    Args:
        module: in eval mode, on one device. If it sets ``failed_in`` on an
            error, that is the path of the module that failed.
        example: ``[2, ...]`` on that device.
        inner: name of the submodule to which paths are relative.

    Raises:
        FreezeError: ``cannot_trace`` with torch's reason and the line of the
            model's code.
    """
    batch = torch.export.Dim("batch", min=1, max=_MAX_BATCH)
    guards: list[str] = []
    try:
        with _quiet_exporter(), _guard_lines(guards):
            exported = torch.export.export(
                module,
                (example,),
                dynamic_shapes=({0: batch},),
                strict=False,
            )
            _forget_weights(exported)
            _check_operators(exported, inner)
            exported = functionalize(exported)
    except FreezeError:
        raise
    except Exception as error:  # tracing raises many types
        path = relative(getattr(error, "failed_in", ""), inner)
        where = f" in module {path!r}" if path else ""
        line = failed_line(error) or next(filter(None, guards), "")
        raise FreezeError(
            "cannot_trace",
            "torch.export cannot trace the frozen region with any batch size"
            f"{where}{line and f', {line[2:-1]}'}: {_reason(error)}; freeze "
            "before it, or give two modules (frozen, tail) instead of the "
            "model: the second takes the first one's output",
        ) from error
    for node in exported.graph.nodes:
        _make_relative(node, inner)
    return exported


def _forget_weights(exported: torch.export.ExportedProgram) -> None:
    """Removes weak references to weights, which torch's caches keep.

    With them ``model.to()`` fails for weights that are tensors of another
    class, such as quantised ones.
    """
    for node in exported.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            converter = mode.fake_tensor_converter.meta_converter
            converter.describer.lookup_tensor.clear()
            return


def _check_operators(
    exported: torch.export.ExportedProgram, inner: str
) -> None:
    """Refuses operators of functions, except regions without gradients."""
    for node in exported.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            name = str(node.target)
            if not name.startswith("wrap_"):
                stack = node.meta.get("nn_module_stack") or {"": ("", "")}
                path = relative([*stack.values()][-1][0], inner)
                raise FreezeError(
                    "unknown_op",
                    f"model packages do not support operator {name} in "
                    f"{path or 'the model'}"
                    f"{traced_line(node.meta.get('stack_trace'))}; freeze "
                    "before it, or use other operators",
                    details={"op": name},
                )


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Hides the exporter's log and graphs of errors, which are raised."""
    logger = logging.getLogger("torch.fx")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    shown = io.StringIO()
    try:
        with redirect_stderr(shown):
            yield
        sys.stderr.write(shown.getvalue())
    finally:
        logger.setLevel(before)


@contextmanager
def _guard_lines(lines: list[str]) -> Iterator[None]:
    """Collects lines of the model whose way depends on the batch size.

    torch's errors name a condition, but not where it is; its log comes from
    there.
    """
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before, shown = logger.level, logger.getEffectiveLevel()

    def find(entry: logging.LogRecord) -> bool:
        if "[guard added]" in str(entry.msg):
            lines.append(running_line())
        return entry.levelno >= shown

    logger.addFilter(find)
    logger.setLevel(min(shown, logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeFilter(find)


def _reason(error: Exception) -> str:
    # Imported here, because that takes a third of a second.
    from torch.fx.experimental.symbolic_shapes import (
        GuardOnDataDependentSymNode,
    )

    if isinstance(error, GuardOnDataDependentSymNode):
        return "its control flow depends on values of the samples"
    text = str(error).partition("The error above occurred when")[0]
    if "Constraints violated" in text:
        return (
            "its code depends on the number of samples in a batch, by a "
            "condition, a loop, len() or int()"
        )
    return f"{type(error).__name__}: {text.strip()[:500]}"


def _make_relative(node: fx.Node, inner: str) -> None:
    """Removes the name of a submodule from the paths of a node."""
    stack = node.meta.get("nn_module_stack") or {}
    for key, (path, kind) in stack.items():
        stack[key] = relative(path, inner), kind


def relative(path: str, inner: str) -> str:
    return path.removeprefix(inner).removeprefix(".")
