"""Notices when what frozen modules read changes after a split.

Next to weights (:mod:`hapi_splitter.freezing.frozen_weights`) they read
attributes of their own and of their classes, and global variables. Features
are computed with what these were when the model was split.
"""

from __future__ import annotations

import argparse
import functools
import operator
import sys
import warnings
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
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

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.code_form import (
    code_form,
    file_of,
    functions_in,
    globals_read,
    is_library,
    is_users,
)
from hapi_splitter.freezing.model_checks import (
    SplitWarning,
    hooks_of,
    is_users_hook,
)
from hapi_splitter.freezing.module_answers import is_answer
from hapi_splitter.freezing.preserved_state import is_filled, slots_of
from hapi_splitter.freezing.replay import same_constant

_OWN = frozenset(
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
_CHECKPOINTING = "gradient_checkpointing"
_NOT_IN_FORWARD = frozenset(("__init__", "extra_repr", "__repr__"))
_SEQUENCES = (list, tuple, set, deque)
_ARRAYS = (np.ndarray, bytearray, array)
_CONTAINERS = (
    *(dict, UserDict, UserList, SimpleNamespace, argparse.Namespace),
    *(torch.Tensor, FunctionType, MethodType, functools.partial),
    *(*_SEQUENCES, *_ARRAYS),
)
_PLAIN = (bool, int, float, complex, str, bytes, Enum, type(None))
_REMEDY = (
    "set it before the split, split the model again, or freeze before "
    "what reads it"
)
_MAX_ITEMS = 1000
"""Larger containers, such as vocabularies and data sets, are compared in
their length only."""
_MISSING = object()


class FrozenAttributes:
    """All that the code of frozen modules can read, as it is now.

    Objects of libraries and what Python code does not hold, such as files,
    the environment and the time, are not noticed.

    Args:
        model: the module that has them.
        modules: names of frozen modules.
        accepted: by place, the plain value that the model's own forward
            gives; None for any.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Iterable[str],
        accepted: Mapping[str, Any],
    ) -> None:
        self._accepted = accepted
        seen: dict[int, Any] = {}
        self._read = {
            name: _Read(name, model.get_submodule(name), seen)
            for name in modules
        }
        self._modules = {
            name: module
            for each in self._read.values()
            for name, module in each.modules.items()
        }
        self._kinds = [*map(type, self._modules.values())]
        self._spaces: list[Any] = [*map(vars, self._modules.values())]
        self._owners = [*self._modules.items()]
        for kind in {
            base for each in set(self._kinds) for base in each.__mro__
        }:
            if not _is_librarys(kind):
                self._spaces.append(vars(kind))
                self._owners.append((kind.__qualname__, kind))
        self._sizes = [*map(len, self._spaces)]
        self._keys = [*map(set, self._spaces)]
        self._hooks = [
            each
            for space in map(vars, self._modules.values())
            for each in (space["_forward_hooks"], space["_forward_pre_hooks"])
        ]
        self._num_hooks = [*map(len, self._hooks)]

    def check(self) -> None:
        """Raises if an attribute has come that the module's code reads.

        Warns of hooks that have come: they do not run.

        Raises:
            FreezeError: ``cannot_freeze`` naming the attribute.
        """
        sizes = [*map(len, self._spaces)]
        kinds = [*map(type, self._modules.values())]
        if sizes != self._sizes or kinds != self._kinds:
            self._check_added()
            self._sizes = sizes
        num_hooks = [*map(len, self._hooks)]
        if num_hooks != self._num_hooks:
            self._warn_of_hooks()
            self._num_hooks = num_hooks

    def check_all(self) -> None:
        """Does :meth:`check_module` for all modules."""
        for name in self._read:
            self.check_module(name)

    def check_module(self, name: str) -> None:
        """Raises if what a module can read has changed.

        Raises:
            FreezeError: ``cannot_freeze`` naming it, with both values.
        """
        if self._read[name].is_same():
            return
        for label, before, now in self._read[name].differences():
            if is_answer(now):
                continue
            if label in self._accepted:
                known = self._accepted[label]
                if known is None or _is_same(now, known):
                    continue
            change = f"from {_text(before)} to {_text(now)}"
            if now is before:
                change = "by a write to its numbers"
            raise FreezeError(
                "cannot_freeze",
                f"{label!r}, which the frozen module {name!r} can read, has "
                f"changed since the split, {change}, but features are "
                f"computed with what it was then; {_REMEDY}",
            )

    def changes(self) -> dict[str, Any]:
        """Returns what a forward of the model itself changes.

        Returns:
            By place, the value if it is plain; None otherwise.
        """
        return {
            label: _plain(now)
            for each in self._read.values()
            for label, _, now in each.differences()
        }

    def _check_added(self) -> None:
        for module, kind in zip(
            self._modules.items(), self._kinds, strict=True
        ):
            name, now = module[0], type(module[1])
            if now is not kind:
                raise FreezeError(
                    "cannot_freeze",
                    f"{name!r} was a {kind.__name__} when the model was "
                    f"split, and is a {now.__name__} now; {_REMEDY}",
                )
        for (name, owner), keys in zip(self._owners, self._keys, strict=True):
            kind = owner if isinstance(owner, type) else type(owner)
            for key in vars(owner).keys() - keys - _OWN:
                is_read = key in _names_in_code(kind) or (
                    # It hides one, such as a forward.
                    hasattr(super(kind, kind) if kind is owner else kind, key)
                    and not is_answer(vars(owner)[key])
                )
                if is_read and _CHECKPOINTING not in key:
                    raise FreezeError(
                        "cannot_freeze",
                        f"'{name}.{key}' was set after the split, which the "
                        "frozen module reads or calls; features are computed "
                        f"without it; {_REMEDY}",
                    )

    def _warn_of_hooks(self) -> None:
        for name, module in self._modules.items():
            if any(map(is_users_hook, hooks_of(module))):
                warnings.warn(
                    f"the frozen module {name!r} has hooks that were added "
                    "after the split; frozen modules do not run in training, "
                    "and their hooks neither",
                    SplitWarning,
                    stacklevel=4,
                )
                return


class _Read:
    """All that the code of a frozen module and those in it can read.

    Args:
        name: of the module.
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
            for read in _names_in_code(kind)
        }
        for path, each in self.modules.items():
            self._visit_module(path, each)
        self._versions = [each for *_, each in self._tensors]
        self._sizes = [*map(len, self._dicts)]

    def _visit_module(self, path: str, module: nn.Module) -> None:
        kind = type(module)
        for base in kind.__mro__:
            self._visit(base.__qualname__, base)
        ignored = _IN_TRAINING if _is_librarys(kind) else ()
        for key in self._read_of(module) - _OWN - set(ignored):
            if _CHECKPOINTING not in key:
                self._watch(f"{path}.{key}", vars(module), key)
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            order = [*module._modules]
            self._add(path, lambda: [*module._modules], order)
        for held in (module._modules, module._parameters, module._buffers):
            self._names.append(path)
            self._dicts.append(held)
            for key, each in held.items():
                if not isinstance(each, torch.Tensor):
                    self._watch(f"{path}.{key}", held, key)

    def _read_of(self, value: Any) -> set[str]:
        """Returns the attributes that code reads; others are notes, such as of
        the epoch."""
        names = self._names_read | _names_in_code(type(value))
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
            or _is_librarys(value if isinstance(value, type) else type(value))
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
            for index, each in enumerate(copied):
                self._visit(f"{label}[{index}]", each)

    def _visit_object(self, label: str, value: Any) -> None:
        if hasattr(value, "__dict__"):
            names = self._read_of(value)
            if isinstance(value, UserDict | UserList):
                names.add("data")
            for key in names:
                self._watch(f"{label}.{key}", vars(value), key)
        for descriptor, held in slots_of(value):
            read = functools.partial(_slot, descriptor, value)
            self._add(f"{label}.{descriptor.__name__}", read, held)

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
            and all(_is_same(read(), held) for _, read, held in self._others)
            and self._sizes == [*map(len, self._dicts)]
            and self._versions == [t._version for _, t, _ in self._tensors]
        )

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        """Yields what has changed, with its values before and now."""
        held = zip(
            self._labels, self._holders, self._keys, self._values, strict=True
        )
        now = ((a, b.get(c, _MISSING), d) for a, b, c, d in held)
        others = ((label, read(), held) for label, read, held in self._others)
        for label, value, before in (*now, *others):
            if not _is_same(value, before):
                yield label, before, value
        for label, size, items in zip(
            self._names, self._sizes, self._dicts, strict=True
        ):
            if len(items) != size:
                yield label, f"{size} items", f"{len(items)} items"
        for label, tensor, version in self._tensors:
            if tensor._version != version:
                yield label, tensor, tensor


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {[*value.shape]}"
    return (
        "nothing" if value is _MISSING else " ".join(f"{value!r:.60}".split())
    )


def _is_librarys(kind: type) -> bool:
    return is_library(file_of(sys.modules.get(kind.__module__)) or "")


def _reader(kind: type, name: str) -> Callable[[], Any]:
    return lambda: vars(kind).get(name, _MISSING)


def _slot(descriptor: Any, value: Any) -> Any:
    return dict(slots_of(value)).get(descriptor, _MISSING)


def _is_same(now: Any, before: Any) -> bool:
    """Returns True for the same object, or the same plain value or code."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, list | tuple):
        return len(now) == len(before) and all(map(_is_same, now, before))
    if isinstance(now, torch.Tensor):
        return same_constant(now, before)  # weight norms compute it again
    if isinstance(now, FunctionType):
        now, before = now.__code__, before.__code__
    if isinstance(now, CodeType):  # a cell of a notebook, run again
        return bool(code_form(now) == code_form(before))
    return isinstance(now, _PLAIN) and bool(now == before)


def _plain(value: Any) -> Any:
    """Returns a value that can be compared later, None for others."""
    if isinstance(value, list | tuple):
        copied = [*map(_plain, value)]
        return None if None in copied else type(value)(copied)
    return value if isinstance(value, _PLAIN) else None


_NAMES: dict[type, set[str]] = {}


def _names_in_code(kind: type) -> set[str]:
    """Returns names and texts in the code of a class but for its creation."""
    if kind in _NAMES:
        return _NAMES[kind]
    found = _NAMES[kind] = set()
    functions = [
        function
        for each in kind.__mro__
        if each not in (nn.Module, object)
        for name, held in vars(each).items()
        if name not in _NOT_IN_FORWARD
        for function in functions_in(held)
    ]
    for each in functions:
        codes = [each.__code__]
        for code in codes:
            codes += [c for c in code.co_consts if isinstance(c, CodeType)]
            found.update(code.co_names)
            found.update(c for c in code.co_consts if isinstance(c, str))
    return found
