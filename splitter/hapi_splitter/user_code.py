"""Finds the line of the user's code that a message names.

It is the innermost one outside of Python, torch and this package. Each
function returns `` (in FILE, line N, in FUNCTION)``, or "" if there is none.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

_LIBRARIES = tuple(
    f"{Path(file).parent}/" for file in (__file__, torch.__file__)
)
_PYTHON = f"{sysconfig.get_path('stdlib')}/"
_FRAME = re.compile(r'File "(/.*)", line (\d+), in (.*)')


def running_line() -> str:
    """Returns the line that is running."""
    frames = reversed(traceback.extract_stack(sys._getframe(1)))
    return _first((f.filename, f.lineno, f.name) for f in frames)


def failed_line(error: BaseException) -> str:
    """Returns the line that has raised an error."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return _first((f.filename, f.lineno, f.name) for f in frames)


def traced_line(stack_trace: str | None) -> str:
    """Returns the line in the text of a node of ``torch.export``."""
    return _first(reversed(_FRAME.findall(stack_trace or "")))


def _first(frames: Iterable[tuple[str, object, str]]) -> str:
    callee = ""
    for file, line, name in frames:
        is_python = file.startswith(_PYTHON) and "-packages/" not in file
        if not is_python and not file.startswith(_LIBRARIES):
            return f" (in {file}, line {line}, in {name}{callee})"
        if "_higher_order_ops" in file:
            callee = f", which calls torch's {name}"
    return ""
