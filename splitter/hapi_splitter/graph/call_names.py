"""Readable names of graph calls, from the modules of the user's model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

_MAX_LENGTH = 200
_OTHER = re.compile(r"[^A-Za-z0-9_.]")


def call_names(nodes: Sequence[fx.Node]) -> list[str]:
    """Returns one name per exported call, such as ``layer1.0.relu``.

    A call inside a module has the module's name. A call between modules (the
    sum of a residual block) has the name of its neighbours' common parent and
    its operator.
    """
    paths = [_module_path(node) for node in nodes]
    names = []
    for index, (node, path) in enumerate(zip(nodes, paths, strict=True)):
        if not path:
            before = next((path for path in paths[index::-1] if path), "")
            after = next((path for path in paths[index:] if path), "")
            parent = _common_parent(before, after)
            path = f"{parent}.{_op_name(node)}".strip(".")
        names.append(_OTHER.sub("_", path)[:_MAX_LENGTH])
    return names


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return paths[-1] if paths else ""


def _op_name(node: fx.Node) -> str:
    return str(node.target).split(".")[1 if "." in str(node.target) else 0]


def _common_parent(first: str, second: str) -> str:
    """Returns the path of the deepest module that contains both."""
    shared = []
    for one, other in zip(
        first.split(".")[:-1], second.split(".")[:-1], strict=False
    ):
        if one != other:
            break
        shared.append(one)
    return ".".join(shared)
