"""Converts the plan of a tail to JSON and back.

Classes, such as a library's model outputs, are written as names.  Reading
imports nothing: they are found among the modules that the model has imported.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hapi_splitter.freezing.places import Place
from hapi_splitter.freezing.stand_ins import (
    Answer,
    Entry,
    ModuleResult,
    OtherTensor,
    OtherValue,
    SkippedOperation,
    StandIn,
    TensorForm,
    VaryingValue,
)
from hapi_splitter.freezing.structures import Fields
from hapi_splitter.freezing.tail_call import TailPlan
from hapi_splitter.graph.program import Affine, Ref

_PLAIN = (bool, int, float, str, type(None))


def plan_to_json(plan: TailPlan) -> Any:
    """Returns a plan as JSON.

    Raises:
        ValueError: naming a value that has no JSON.
    """
    return {
        field.name: _encode(getattr(plan, field.name))
        for field in dataclasses.fields(plan)
    }


def plan_from_json(document: Any) -> TailPlan:
    """Returns the plan of :func:`plan_to_json`.

    Raises:
        ValueError: for any other document, or if a class is not imported.
    """
    try:
        plan = TailPlan(**{key: _decode(v) for key, v in document.items()})
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"not the plan of a tail: {error}") from error
    return plan


def _encode(value: Any) -> Any:
    """Returns a plain value itself, another as ``{kind: content}``."""
    if type(value) in _PLAIN:
        return value
    if type(value) in (torch.dtype, torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if type(value) in (tuple, list, frozenset):
        items = sorted(value) if type(value) is frozenset else value
        return {type(value).__name__: [_encode(each) for each in items]}
    if isinstance(value, type) or value is namedtuple:
        return {"class": [value.__module__, value.__qualname__]}
    if isinstance(value, pytree.TreeSpec):
        return {"spec": _encode([value.type, value.context, value.children()])}
    if type(value) in _PARTS:
        held = [
            getattr(value, each.name) for each in dataclasses.fields(value)
        ]
        return {type(value).__name__: _encode(held)}
    raise ValueError(f"a {type(value).__name__} has no JSON")


def _decode(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    ((kind, content),) = value.items()
    if kind == "dtype":
        found = getattr(torch, content)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{content!r} is no dtype")
        return found
    if kind == "device":
        return torch.device(content)
    if kind == "class":
        return _find_class(*content)
    if kind == "spec":
        return _tree_spec(*_decode(content))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decode(each) for each in content)
    return _PARTS_BY_NAME[kind](*_decode(content))


def _find_class(module: str, name: str) -> Any:
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = vars(found)[part]
    if not isinstance(found, type) and found is not namedtuple:
        raise ValueError(f"{module}.{name} is no class")
    return found


def _tree_spec(
    kind: Any, context: Any, children: Sequence[pytree.TreeSpec]
) -> pytree.TreeSpec:
    if kind is None:
        return pytree.tree_structure(0)
    if kind is Fields:
        held, _ = context
        is_known = dataclasses.is_dataclass(held) or issubclass(
            held, dict | slice | torch.Size
        )
        if not is_known:
            raise ValueError(f"{held} is neither dataclass nor dict")
    elif kind is namedtuple:
        if not issubclass(context, tuple):
            raise ValueError(f"{context} is no namedtuple")
    elif kind not in pytree.SUPPORTED_NODES:
        raise ValueError(f"{kind} is no container of torch")
    return pytree.TreeSpec(kind, context, list(children))


_PARTS = (
    *(
        Affine,
        Answer,
        Entry,
        ModuleResult,
        OtherTensor,
        OtherValue,
        Place,
        Ref,
    ),
    *(SkippedOperation, StandIn, TensorForm, VaryingValue),
)
_PARTS_BY_NAME = {kind.__name__: kind for kind in _PARTS}
_SEQUENCES = {kind.__name__: kind for kind in (tuple, list, frozenset)}
