"""Runs ``torch.export`` on a module and explains its errors."""

from __future__ import annotations

import io
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import torch
from torch import fx, nn

from hapi_protocol.errors import FreezeError
from hapi_splitter.graph.functionalize import functionalize

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
    try:
        with _quiet_exporter():
            exported = functionalize(
                torch.export.export(
                    module,
                    (example,),
                    dynamic_shapes=({0: batch},),
                    strict=False,
                )
            )
    except Exception as error:  # tracing raises many types
        path = relative(getattr(error, "failed_in", ""), inner)
        where = f" in module {path!r}" if path else ""
        raise FreezeError(
            "cannot_trace",
            "torch.export cannot trace the frozen region with any batch size"
            f"{where}{_user_code(error)}: {_reason(error)}; freeze before it, "
            "or give two modules (frozen, tail) instead of the model: the "
            "second takes the first one's output",
        ) from error
    for node in exported.graph.nodes:
        _make_relative(node, inner)
    return exported


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


def _reason(error: Exception) -> str:
    # Imported here, because that takes a third of a second.
    from torch.fx.experimental.symbolic_shapes import (
        GuardOnDataDependentSymNode,
    )

    if isinstance(error, GuardOnDataDependentSymNode):
        return "its control flow depends on values of the samples"
    text = str(error).partition("The error above occurred when")[0]
    return f"{type(error).__name__}: {text.strip()[:500]}"


def _user_code(error: BaseException) -> str:
    """Returns the innermost line of the model's code in a traceback."""
    ours = Path(__file__).parents[1]
    lines = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not _is_library(Path(frame.filename), ours)
    ]
    if not lines:
        return ""
    last = lines[-1]
    return f", in {last.filename}, line {last.lineno}, in {last.name}"


def _is_library(path: Path, ours: Path) -> bool:
    torch_folder = Path(torch.__file__).parent
    return torch_folder in path.parents or ours in path.parents


def _make_relative(node: fx.Node, inner: str) -> None:
    """Removes the name of a submodule from the paths of a node."""
    stack = node.meta.get("nn_module_stack") or {}
    for key, (path, kind) in stack.items():
        stack[key] = relative(path, inner), kind


def relative(path: str, inner: str) -> str:
    return path.removeprefix(inner).removeprefix(".")
