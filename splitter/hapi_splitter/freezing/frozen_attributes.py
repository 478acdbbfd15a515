"""Notices when what frozen modules read changes after a split.

Beside weights (:mod:`hapi_splitter.freezing.frozen_weights`) they read
attributes of their own and of their classes, and global variables. Features
are computed with what these were when the model was split.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import nn

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.code_form import (
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
from hapi_splitter.freezing.preserved_state import is_filled
from hapi_splitter.freezing.replay import same_constant

_OWN = frozenset(
    ("training", "_parameters", "_buffers", "_non_persistent_buffers_set")
)
"""Attributes of modules that the split itself or other checks see to."""
_SEQUENCES = (list, tuple, set, deque)
_CONTAINERS = (
    *(dict, torch.Tensor, np.ndarray, types.SimpleNamespace),
    *(types.FunctionType, *_SEQUENCES),
)
_PLAIN = (bool, int, float, complex, str, bytes)
_REMEDY = (
    "set it before the split, split the model again, or freeze before "
    "what reads it"
)
_MAX_ITEMS = 1000
"""Of larger containers, such as vocabularies and data sets, only the length
is compared in each step."""
_MISSING = object()


class FrozenAttributes:
    """What the code of frozen modules can read, as it is now.

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
        self._spaces = [*map(vars, self._modules.values())]
        self._sizes = [*map(len, self._spaces)]
        self._keys = [*map(set, self._spaces)]
        self._hooks = [
            each
            for space in self._spaces
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
        if sizes != self._sizes:
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
            change = f"from {before!r:.60} to {now!r:.60}"
            if isinstance(now, torch.Tensor):
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
            label: now if isinstance(now, _PLAIN) else None
            for each in self._read.values()
            for label, _, now in each.differences()
        }

    def _check_added(self) -> None:
        held = zip(self._modules.items(), self._keys, strict=True)
        for (name, module), keys in held:
            for key in vars(module).keys() - keys:
                is_read = key in _names_in_code(type(module)) or (
                    # A forward, but not what stands in for one.
                    hasattr(type(module), key)
                    and not is_answer(vars(module)[key])
                )
                if is_read and "hook" not in key:
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
    """What a frozen module and those in it can read.

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
        kinds = {type(each) for each in self.modules.values()}
        self._names_read = {
            name
            for kind in kinds
            if not is_library(_file(kind))
            for name in _names_in_code(kind)
        }
        for path, each in self.modules.items():
            for key, value in vars(each).items():
                if "hook" not in key and key not in _OWN:
                    self._watch(f"{path}.{key}", vars(each), key, value)
            for kind in type(each).__mro__:
                if not is_library(_file(kind)):
                    self._visit_class(kind)
        self._versions = [each for *_, each in self._tensors]
        self._sizes = [*map(len, self._dicts)]

    def _watch(self, label: str, holder: Any, key: Any, value: Any) -> None:
        self._labels.append(label)
        self._holders.append(holder)
        self._keys.append(key)
        self._values.append(value)
        self._visit(label, value)

    def _visit(self, label: str, value: Any) -> None:
        """Watches what is in a value."""
        if id(value) in self._seen or _is_opaque(value):
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, np.ndarray):
            if value.size <= _MAX_ITEMS:
                self._others.append((label, value.tobytes, value.tobytes()))
        elif isinstance(value, torch.Tensor):
            if not value.is_inference():
                self._tensors.append((label, value, value._version))
        elif isinstance(value, (dict, *_SEQUENCES)) and (
            len(value) > _MAX_ITEMS
        ):
            self._others.append(
                (f"length of {label}", lambda: len(value), len(value))
            )
        elif isinstance(value, dict):
            self._names.append(label)
            self._dicts.append(value)
            for key, each in value.items():
                self._watch(f"{label}[{key!r}]", value, key, each)
        elif isinstance(value, _SEQUENCES):
            copied = [*value]
            if not isinstance(value, tuple):
                self._others.append((label, lambda: [*value], copied))
            for index, each in enumerate(copied):
                self._visit(f"{label}[{index}]", each)
        elif hasattr(value, "__dict__"):
            # Others are the user's own notes, such as of the epoch.
            names = self._names_read | _names_in_code(type(value))
            for key in names & vars(value).keys():
                each = vars(value)[key]
                self._watch(f"{label}.{key}", vars(value), key, each)

    def _visit_class(self, kind: type) -> None:
        """Watches a class of the user's and what its functions read."""
        if id(kind) in self._seen:
            return
        self._seen[id(kind)] = kind
        for name, held in vars(kind).items():
            functions = functions_in(held)
            if not functions and not name.startswith("_"):
                label = f"{kind.__qualname__}.{name}"
                if not hasattr(type(held), "__get__"):
                    self._others.append((label, _reader(kind, name), held))
                    self._visit(label, held)
            for function in functions:
                self._visit_function(function)

    def _visit_function(self, function: types.FunctionType) -> None:
        """Watches the variables that a function of the user's reads."""
        if not is_users(function):
            return
        for key, value in globals_read(function):
            namespace = function.__globals__
            *path, last = key.split(".")
            for part in path:
                namespace = vars(namespace[part])
            if not isinstance(value, types.ModuleType):
                label = f"{function.__module__}.{key}"
                self._watch(label, namespace, last, value)
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            if is_filled(cell):
                label = f"{function.__qualname__}.{name}"
                read = functools.partial(getattr, cell, "cell_contents")
                self._others.append((label, read, read()))
                self._visit(label, read())

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
        for label, holder, key, before in held:
            now = holder.get(key, _MISSING)
            if not _is_same(now, before):
                yield label, before, now
        for label, read, before in self._others:
            now = read()
            if not _is_same(now, before):
                yield label, before, now
        for label, size, now in zip(
            self._names, self._sizes, self._dicts, strict=True
        ):
            if len(now) != size:
                yield f"number of items of {label}", size, len(now)
        for label, tensor, version in self._tensors:
            if tensor._version != version:
                yield label, None, tensor


def _is_opaque(value: Any) -> bool:
    """Returns True for what is not looked into."""
    if isinstance(value, _CONTAINERS):
        return False
    is_object = isinstance(value, nn.Module | type)
    return is_object or is_library(_file(type(value)))


def _file(kind: type) -> str:
    return file_of(sys.modules.get(kind.__module__)) or ""


def _reader(kind: type, name: str) -> Callable[[], Any]:
    return lambda: vars(kind).get(name, _MISSING)


def _is_same(now: Any, before: Any) -> bool:
    """Returns True for the same object, or the same plain value."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, list | tuple):
        return len(now) == len(before) and all(map(_is_same, now, before))
    if isinstance(now, torch.Tensor):
        return same_constant(now, before)  # weight norms compute it anew
    return isinstance(now, _PLAIN) and bool(now == before)


def _names_in_code(kind: type) -> set[str]:
    """Returns names and texts in the code of a class but for its creation."""
    found: set[str] = set()
    for name, held in (
        item for each in kind.__mro__ for item in vars(each).items()
    ):
        if name in ("__init__", "extra_repr"):
            continue
        codes = [each.__code__ for each in functions_in(held)]
        for code in codes:
            codes += [c for c in code.co_consts if isinstance(c, CodeType)]
            found.update(code.co_names)
            found.update(c for c in code.co_consts if isinstance(c, str))
    return found
