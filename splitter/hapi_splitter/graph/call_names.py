"""Names of calls for people, from the modules of the user's model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

_MAX_LENGTH = 200
_OTHER = re.compile(r"[^A-Za-z0-9_.]")


def call_names(nodes: Sequence[fx.Node]) -> list[str]:
    """One name for each exported call, such as ``layer1.0.relu``.

    A call in a module is named after it; one between modules (the sum of a
    residual block) after what its neighbours have in common and itself.
    """
    paths = [_module_path(node) for node in nodes]
    names = []
    for index, (node, path) in enumerate(zip(nodes, paths, strict=True)):
        if not path:
            parent = _common(_before(paths, index), _after(paths, index))
            path = f"{parent}.{_op_name(node)}".strip(".")
        names.append(_OTHER.sub("_", path)[:_MAX_LENGTH])
    return names


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return paths[-1] if paths else ""


def _op_name(node: fx.Node) -> str:
    return str(node.target).split(".")[1 if "." in str(node.target) else 0]


def _before(paths: Sequence[str], index: int) -> str:
    return next((path for path in paths[index::-1] if path), "")


def _after(paths: Sequence[str], index: int) -> str:
    return next((path for path in paths[index:] if path), "")


def _common(first: str, second: str) -> str:
    """The deepest module that holds both."""
    shared = []
    for one, other in zip(
        first.split(".")[:-1], second.split(".")[:-1], strict=False
    ):
        if one != other:
            break
        shared.append(one)
    return ".".join(shared)
