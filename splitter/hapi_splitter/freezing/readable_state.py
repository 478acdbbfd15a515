"""All that a module's code can read, compared with what it was.

Code reads attributes of modules, of their classes and of the user's objects,
items of containers, closures and global variables.
"""

from __future__ import annotations

import argparse
import functools
import operator
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import chain
from types import (
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import nn

from hapi_splitter.freezing.code_form import (
    code_form,
    codes_in,
    functions_in,
    globals_read,
    is_librarys,
    is_users,
)
from hapi_splitter.freezing.preserved_state import is_filled, slots_of
from hapi_splitter.freezing.replay import same_constant

OWN = frozenset(
    {
        *("training", "_parameters", "_buffers", "_compiled_call_impl"),
        "_non_persistent_buffers_set",
        *(name for name in vars(nn.Module()) if "hook" in name),
    }
)
"""Attributes of modules that the split itself or other checks see to."""
_IN_TRAINING = ("p", "momentum", "drop_prob")
"""Attributes of layers of libraries, such as dropout, without an effect in
eval mode; so are those with this in their name:"""
CHECKPOINTING = "gradient_checkpointing"
_NOT_IN_FORWARD = frozenset(("__init__", "extra_repr", "__repr__"))
_SEQUENCES = (list, tuple, set, deque)
_ARRAYS = (np.ndarray, bytearray, array)
_CONTAINERS = (
    *(dict, UserDict, UserList, SimpleNamespace, argparse.Namespace),
    *(torch.Tensor, FunctionType, MethodType, functools.partial),
    *(*_SEQUENCES, *_ARRAYS),
)
PLAIN_TYPES = (bool, int, float, complex, str, bytes, Enum, type(None))
_MAX_ITEMS = 1000
"""Larger containers, such as vocabularies and data sets, are compared in
their length only."""
MISSING = object()


class ReadableState:
    """All that the code of a frozen module and those in it can read.

    Args:
        name: name of the module.
        module: itself.
        seen: gets what was looked into, by id.
    """

    def __init__(
        self, name: str, module: nn.Module, seen: dict[int, Any]
    ) -> None:
        self._labels: list[str] = []
        self._holders: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._others: list[tuple[str, Callable[[], Any], Any]] = []
        self._tensors: list[tuple[str, torch.Tensor, int]] = []
        self._names: list[str] = []
        self._dicts: list[dict[Any, Any]] = []
        self._seen = seen  # held, so that ids stay theirs
        self.modules = dict(module.named_modules(prefix=name))
        self._names_read = {
            read
            for kind in set(map(type, self.modules.values()))
            for read in names_in_code(kind)
        }
        for path, part in self.modules.items():
            self._visit_module(path, part)
        self._versions = [version for *_, version in self._tensors]
        self._sizes = [*map(len, self._dicts)]

    def _visit_module(self, path: str, module: nn.Module) -> None:
        kind = type(module)
        for base in kind.__mro__:
            self._visit(base.__qualname__, base)
        ignored = _IN_TRAINING if is_librarys(kind) else ()
        for key in self._read_of(module) - OWN - set(ignored):
            if CHECKPOINTING not in key:
                self._watch(f"{path}.{key}", vars(module), key)
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            order = [*module._modules]
            self._add(path, lambda: [*module._modules], order)
        for held in (module._modules, module._parameters, module._buffers):
            self._names.append(path)
            self._dicts.append(held)
            for key, value in held.items():
                if not isinstance(value, torch.Tensor):
                    self._watch(f"{path}.{key}", held, key)

    def _read_of(self, value: Any) -> set[str]:
        """Returns the attributes that code reads; others are notes, such as of
        the epoch."""
        names = self._names_read | names_in_code(type(value))
        return {*vars(value)} & names

    def _watch(self, label: str, holder: Any, key: Any) -> None:
        """Watches an item of a dict."""
        self._labels.append(label)
        self._holders.append(holder)
        self._keys.append(key)
        self._values.append(holder[key])
        self._visit(label, holder[key])

    def _add(self, label: str, read: Callable[[], Any], value: Any) -> None:
        """Watches what a function returns."""
        self._others.append((label, read, value))
        self._visit(label, value)

    def _visit(self, label: str, value: Any) -> None:
        """Watches what is in a value."""
        is_looked_into = isinstance(value, _CONTAINERS) or not (
            isinstance(value, nn.Module)
            or is_librarys(value if isinstance(value, type) else type(value))
        )
        if id(value) in self._seen or not is_looked_into:
            return
        self._seen[id(value)] = value
        if isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, MethodType):
            self._visit(label, value.__self__)
            self._visit(label, value.__func__)
        elif isinstance(value, functools.partial):
            self._visit(label, [value.func, value.args, value.keywords])
        elif isinstance(value, torch.Tensor):
            if not value.is_inference():
                self._tensors.append((label, value, value._version))
        elif isinstance(value, (dict, *_SEQUENCES, *_ARRAYS)):
            self._visit_items(label, value)
        else:
            self._visit_object(label, value)

    def _visit_items(self, label: str, value: Any) -> None:
        if len(value) > _MAX_ITEMS:
            self._add(f"length of {label}", lambda: len(value), len(value))
        elif isinstance(value, _ARRAYS):
            self._add(label, lambda: bytes(value), bytes(value))
        elif isinstance(value, dict):
            self._names.append(label)
            self._dicts.append(value)
            for key in [*value]:
                self._watch(f"{label}[{key!r}]", value, key)
        else:
            copied = [*value]
            if not isinstance(value, tuple):
                self._others.append((label, lambda: [*value], copied))
            for index, item in enumerate(copied):
                self._visit(f"{label}[{index}]", item)

    def _visit_object(self, label: str, value: Any) -> None:
        if hasattr(value, "__dict__"):
            names = self._read_of(value)
            if isinstance(value, UserDict | UserList):
                names.add("data")
            for key in names:
                self._watch(f"{label}.{key}", vars(value), key)
        for descriptor, held in slots_of(value):
            name = descriptor.__name__
            read = functools.partial(getattr, value, name, MISSING)
            self._add(f"{label}.{name}", read, held)

    def _visit_class(self, kind: type) -> None:
        """Watches a class of the user's and what its functions read."""
        for name, held in vars(kind).items():
            functions = functions_in(held)
            if functions or not name.startswith("__"):
                label = f"{kind.__qualname__}.{name}"
                self._add(label, _reader(kind, name), held)
            for function in functions:
                self._visit(f"{kind.__qualname__}.{name}", function)

    def _visit_function(self, function: FunctionType) -> None:
        """Watches a function of the user's and what it reads."""
        if not is_users(function):
            return
        label = function.__qualname__
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            read = functools.partial(getattr, function, name)
            self._add(f"{label}.{name}", read, read())
        for key in vars(function):
            self._watch(f"{label}.{key}", vars(function), key)
        for key, value in globals_read(function):
            namespace = function.__globals__
            *path, last = key.split(".")
            for part in path:
                namespace = vars(namespace[part])
            if not isinstance(value, ModuleType):
                self._watch(f"{function.__module__}.{key}", namespace, last)
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            if is_filled(cell):
                read = functools.partial(getattr, cell, "cell_contents")
                self._add(f"{label}.{name}", read, read())

    def is_same(self) -> bool:
        """Returns True if nothing has changed."""
        # Once a step, so in C: 30 us for 500 attributes.
        return (
            all(
                map(
                    operator.is_,
                    map(dict.get, self._holders, self._keys),
                    self._values,
                )
            )
            and all(
                is_same_value(read(), held) for _, read, held in self._others
            )
            and self._sizes == [*map(len, self._dicts)]
            and self._versions == [t._version for _, t, _ in self._tensors]
        )

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        """Yields what has changed, with its values before and now."""
        held = zip(
            self._labels, self._holders, self._keys, self._values, strict=True
        )
        now = ((a, b.get(c, MISSING), d) for a, b, c, d in held)
        others = ((label, read(), held) for label, read, held in self._others)
        for label, value, before in (*now, *others):
            if not is_same_value(value, before):
                yield label, before, value
        for label, size, items in zip(
            self._names, self._sizes, self._dicts, strict=True
        ):
            if len(items) != size:
                yield label, f"{size} items", f"{len(items)} items"
        for label, tensor, version in self._tensors:
            if tensor._version != version:
                yield label, tensor, tensor


def _reader(kind: type, name: str) -> Callable[[], Any]:
    return lambda: vars(kind).get(name, MISSING)


def is_same_value(now: Any, before: Any) -> bool:
    """Returns True for the same object, or the same plain value or code."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, list | tuple):
        return len(now) == len(before) and all(map(is_same_value, now, before))
    if isinstance(now, torch.Tensor):
        return same_constant(now, before)  # weight norms compute it again
    if isinstance(now, FunctionType):
        now, before = now.__code__, before.__code__
    if isinstance(now, CodeType):  # a cell of a notebook, run again
        return bool(code_form(now) == code_form(before))
    return isinstance(now, PLAIN_TYPES) and bool(now == before)


_NAMES: dict[type, set[str]] = {}


def names_in_code(kind: type) -> set[str]:
    """Returns names and texts in the code of a class but for its creation."""
    if kind in _NAMES:
        return _NAMES[kind]
    names = _NAMES[kind] = set()
    functions = [
        function
        for base in kind.__mro__
        if base not in (nn.Module, object)
        for name, held in vars(base).items()
        if name not in _NOT_IN_FORWARD
        for function in functions_in(held)
    ]
    for code in chain.from_iterable(map(codes_in, functions)):
        names.update(code.co_names)
        names.update(c for c in code.co_consts if isinstance(c, str))
    return names
