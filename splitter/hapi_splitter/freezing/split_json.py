"""Converts the plain values of a split, such as its plan, to JSON and back.

Classes, such as a library's model outputs, are written as names.  Reading
imports nothing: they are found among the modules that the model has imported.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import namedtuple
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hapi_splitter.freezing import stand_ins, tail_call, tensor_positions
from hapi_splitter.graph import batch_independence

_PLAIN = (bool, int, float, str, type(None))
_RECORDS = {
    kind.__name__: kind
    for module in (
        batch_independence,
        stand_ins,
        tail_call,
        tensor_positions,
    )
    for kind in vars(module).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}


def to_json(value: Any) -> Any:
    """Returns a plain value or a tuple itself, another as ``{kind: content}``.

    Raises:
        ValueError: naming a value that has no JSON.
    """
    kind = type(value)
    content: Any
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return [*map(to_json, value)]
    if kind in (torch.dtype, torch.device):
        content = str(value).removeprefix("torch.")
    elif kind in (list, frozenset):
        content = [
            *map(to_json, sorted(value) if kind is frozenset else value)
        ]
    elif isinstance(value, type) or value is namedtuple:
        return {"class": [value.__module__, value.__qualname__]}
    elif _RECORDS.get(kind.__name__) is kind:
        fields = dataclasses.fields(value)
        content = [to_json(getattr(value, field.name)) for field in fields]
    elif isinstance(value, pytree.TreeSpec):
        # torch 2.9 has a field where later ones have a method.
        given = getattr(value, "children", None)
        children = given() if given else value.children_specs
        parts = (value.type, value.context, tuple(children))
        return {"spec": to_json(parts)}
    else:
        raise ValueError(f"a {kind.__name__} has no JSON")
    return {kind.__name__: content}


def from_json(document: Any) -> Any:
    """Returns the value of :func:`to_json`.

    Raises:
        ValueError: if a class is not imported.
    """
    if type(document) in _PLAIN:
        return document
    if type(document) is list:
        return tuple(map(from_json, document))
    ((kind, content),) = document.items()
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    if kind == "class":
        return _find_class(*content)
    if kind == "spec":
        kind, context, children = from_json(content)
        if kind is None:
            return pytree.tree_structure(0)
        return pytree.TreeSpec(kind, context, list(children))
    values = map(from_json, content)
    if kind in _RECORDS:
        return _RECORDS[kind](*values)
    return list(values) if kind == "list" else frozenset(values)


def _find_class(module: str, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module])
    except (AttributeError, LookupError) as error:
        raise ValueError(f"{module}.{name} is not imported") from error
