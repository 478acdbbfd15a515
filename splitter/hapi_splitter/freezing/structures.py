"""Flattens arguments and results of modules, dataclasses included.

torch's pytrees treat dataclasses and subclasses of dict as leaves unless a
library has registered them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

_PLAIN = frozenset((int, float, str, bool, type(None)))
_SLICE = ("start", "stop", "step")


@dataclasses.dataclass(frozen=True)
class Fields:
    """Fields of a dataclass or slice, or items of a dict or torch.Size."""

    kind: type
    values: dict[Any, Any]


pytree.register_pytree_node(
    Fields,
    lambda fields: (
        list(fields.values.values()),
        (fields.kind, tuple(fields.values)),
    ),
    lambda values, context: _rebuilt(
        context[0], dict(zip(context[1], values, strict=True))
    ),
)


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Returns the leaves of nested containers, and their structure."""
    return pytree.tree_flatten(_opened(value))


def leaves_in(value: Any) -> list[Any]:
    """Returns the leaves only, in the order of :func:`flatten`, but faster."""
    if type(value) in (tuple, list):
        return [leaf for item in value for leaf in leaves_in(item)]
    if type(value) is dict:
        return [leaf for item in value.values() for leaf in leaves_in(item)]
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return [value]
    return flatten(value)[0]


def unflatten(leaves: Iterable[Any], spec: pytree.TreeSpec) -> Any:
    """Returns containers of the structure with other leaves."""
    if spec.type is None:  # a single leaf, as most modules return
        (leaf,) = leaves
        return leaf
    return pytree.tree_unflatten(list(leaves), spec)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors among the leaves."""
    return [
        leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)
    ]


def _opened(value: Any) -> Any:
    """Replaces what torch takes for a leaf by its fields."""
    return pytree.tree_map(_opened_leaf, value)


def _opened_leaf(leaf: Any) -> Any:
    held: dict[Any, Any]
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        names = [field.name for field in dataclasses.fields(leaf)]
        held = {name: getattr(leaf, name) for name in names}
    elif isinstance(leaf, dict):
        held = dict(leaf)
    elif isinstance(leaf, slice):
        held = {name: getattr(leaf, name) for name in _SLICE}
    elif isinstance(leaf, torch.Size):
        held = dict(enumerate(leaf))
    else:
        return leaf
    return Fields(
        type(leaf), {key: _opened(item) for key, item in held.items()}
    )


def _rebuilt(kind: type, values: dict[Any, Any]) -> Any:
    if kind is slice:
        return slice(*values.values())
    if kind is torch.Size:
        return torch.Size(values.values())
    if issubclass(kind, dict):
        items = dict.__new__(kind)
        dict.update(items, values)
        return items
    new = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(new, name, value)
    return new
