"""Every argument of a benchmark says what it means."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def arguments(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of ``add_argument``, also by the name ``add``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = getattr(node.func, "attr", None) or getattr(
            node.func, "id", None
        )
        first = node.args[0]
        is_option = isinstance(first, ast.Constant) and str(
            first.value
        ).startswith("--")
        if name == "add_argument" or (name == "add" and is_option):
            yield node


@pytest.mark.parametrize(
    "path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda p: p.stem
)
def test_arguments_have_help(path):
    silent = [
        ast.unparse(call)
        for call in arguments(ast.parse(path.read_text()))
        if not any(k.arg in ("help", None) for k in call.keywords)
    ]
    assert silent == []
