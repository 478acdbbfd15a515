"""Computes a key of everything that the split of a model depends on.

These are its weights and other state, the code of its classes and of the
functions that they call, and torch's settings.  Code of libraries is known by
their versions, their classes and the files of these; the user's own code by
all of its files that are imported, and by functions and globals as they are
in memory, which can differ from the files.

What has no canonical form makes a model uncacheable: hooks, closures in
attributes, objects with state outside Python.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import platform
import re
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

import hapi_protocol
import hapi_splitter
from hapi_splitter.freezing.code_form import (
    code_form,
    file_digest,
    file_of,
    functions_in,
    globals_read,
    is_builtin,
    is_in_linecache,
    is_library,
    is_users,
)
from hapi_splitter.host_limits import allowed_cores
from hapi_splitter.numerics import exact_flags
from hapi_splitter.package.weights import tensor_bytes

_PLAIN = frozenset(
    {
        *(NoneType, bool, int, float, complex, str, bytes, range),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
        *(torch.Size, type(Ellipsis), type(NotImplemented)),
    }
)
_SEQUENCES = (list, tuple, deque)
_TENSORS = (torch.Tensor, nn.Parameter)
_NAMED = (
    Enum,
    ModuleType,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)
_TREE = ("_parameters", "_buffers", "_modules")
_WITHOUT_EFFECT = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_is_full_backward_hook",
)
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
_LIBRARIES = frozenset(("numpy", "peft", "timm", "transformers"))
"""Libraries that the user's own code may call."""


class UncacheableError(Exception):
    """A model depends on something without a canonical form."""


def split_key(module: nn.Module, facts: Mapping[str, Any]) -> str:
    """Returns a key, equal for models that are split alike, hexadecimal.

    Args:
        module: before it is split.
        facts: the other arguments of the split, as JSON.

    Raises:
        UncacheableError: naming what is not known.
    """
    if any(getattr(module_hooks, name) for name in _GLOBAL_HOOKS):
        raise UncacheableError("hooks of all modules")
    form = _CanonicalForm()
    try:
        state = form.of(module)
        document = {
            "model": state,
            "tensors": form.tensors(),
            "code": form.code(),
            "settings": _settings(module),
            "facts": facts,
        }
        text = json.dumps(document, sort_keys=True)
    except UncacheableError:
        raise
    except Exception as error:  # of the user's objects
        raise UncacheableError(f"{type(error).__name__}: {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()


class _CanonicalForm:
    """Describes objects as JSON; equal objects have equal descriptions."""

    def __init__(self) -> None:
        # Objects are held, so that their ids are not used again.
        self._seen: dict[Any, tuple[int, Any]] = {}
        self._tensors: list[torch.Tensor] = []
        self._classes: dict[type, Any] = {}
        self._files: set[str] = set()
        self._has_user_code = False

    def of(self, value: Any) -> Any:
        """Returns the form of a value that a model holds.

        Raises:
            UncacheableError: naming its type.
        """
        kind = type(value)
        if kind in _PLAIN:
            return [kind.__name__, repr(value)]
        if isinstance(value, type):
            self._add_class(value)
            return ["class", _name(value)]
        if isinstance(value, logging.Logger):
            return ["logger", value.name]
        if isinstance(value, _NAMED):
            return [_name(kind), repr(value)]
        if id(value) in self._seen:
            return ["seen", self._seen[id(value)][0]]
        self._seen[id(value)] = len(self._seen), value
        self._add_class(kind)
        return [_name(kind), *self._parts(value)]

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            yield self._tensor(value)
        elif isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject:
                raise UncacheableError("an array of objects")
            digest = hashlib.sha256(value.tobytes()).hexdigest()
            yield [str(value.dtype), list(value.shape), digest]
        elif isinstance(value, FunctionType):
            if value.__closure__:
                raise UncacheableError(f"closure {value.__qualname__}")
            yield self._function(value)
        elif isinstance(value, MethodType):
            yield [self.of(value.__self__), self._function(value.__func__)]
        elif isinstance(value, BuiltinFunctionType):
            if not isinstance(value.__self__, ModuleType | NoneType | type):
                yield self.of(value.__self__)
            yield [value.__module__, value.__qualname__]
        elif isinstance(value, functools.partial):
            yield [self.of(value.func), self.of(value.args)]
            yield self.of(value.keywords)
        elif isinstance(value, re.Pattern):
            yield [value.pattern, value.flags]
        elif isinstance(value, weakref.ref):
            yield self.of(value())
        else:
            yield from self._containers(value)

    def _containers(self, value: Any) -> Iterator[Any]:
        if isinstance(value, defaultdict):
            yield self.of(value.default_factory)
        if isinstance(value, dict):
            pairs = (
                OrderedDict.items(value)
                if isinstance(value, OrderedDict)
                else dict.items(value)
            )
            yield [[self.of(key), self.of(each)] for key, each in pairs]
        elif isinstance(value, _SEQUENCES):
            yield [self.of(each) for each in value]
        elif isinstance(value, set | frozenset):
            yield sorted(map(json.dumps, map(self.of, value)))
        elif not _is_plain_python(type(value)):
            raise UncacheableError(f"a {_name(type(value))}")
        if isinstance(value, nn.Module):
            yield self._module(value)
        elif hasattr(value, "__dict__"):
            yield self.of(vars(value))

    def _module(self, module: nn.Module) -> Any:
        attributes = dict(vars(module))
        for name in _WITHOUT_EFFECT:
            attributes.pop(name, None)
        for name in [each for each in attributes if "hook" in each]:
            if name in _MODULE_ATTRIBUTES and not attributes.pop(name):
                continue
            raise UncacheableError(f"{name} of {type(module).__name__}")
        return [
            [name, self.of(dict(held) if name in _TREE else held)]
            for name, held in attributes.items()
        ]

    def _tensor(self, tensor: torch.Tensor) -> Any:
        is_plain = type(tensor) in _TENSORS and not tensor.is_quantized
        if not is_plain or tensor.layout != torch.strided or tensor.is_meta:
            raise UncacheableError(f"a tensor {type(tensor).__name__}")
        self._tensors.append(tensor)
        memory = tensor.untyped_storage()
        first, _ = self._seen.setdefault(
            ("memory", memory._cdata), (len(self._seen), memory)
        )
        return [
            str(tensor.dtype),
            [*tensor.shape],
            tensor.stride(),
            [first, tensor.storage_offset()],
            tensor.requires_grad,
            tensor.device.type,
            self.of(vars(tensor)),
        ]

    def tensors(self) -> list[str]:
        """Returns the digests of all tensors so far."""
        with ThreadPoolExecutor(max(1, int(allowed_cores()))) as pool:
            return list(pool.map(_digest, self._tensors))

    def code(self) -> Any:
        """Returns the form of all code so far."""
        if self._has_user_code:
            self._files |= {
                file
                for module in [*sys.modules.values()]
                if (file := file_of(module)) and not is_library(file)
            }
        tops = {kind.__module__.partition(".")[0] for kind in self._classes}
        if self._has_user_code:
            tops |= _LIBRARIES
        return {
            "classes": [[_name(k), v] for k, v in self._classes.items()],
            "files": sorted({file_digest(file) for file in self._files}),
            "versions": {
                top: str(getattr(sys.modules.get(top), "__version__", None))
                for top in sorted(tops)
            },
        }

    def _add_class(self, kind: type) -> None:
        for each in kind.__mro__:
            if each not in self._classes and each.__module__ != "builtins":
                self._classes[each] = None
                self._classes[each] = self._class(each)

    def _class(self, kind: type) -> Any:
        module = sys.modules.get(kind.__module__)
        file = file_of(module)
        if file:
            self._files.add(file)
        is_user = not is_library(file or "") and not is_builtin(module)
        members = [
            (name, function)
            for name, held in sorted(vars(kind).items())
            for function in functions_in(held)
        ]
        if is_user:
            self._has_user_code = True
            if not file and not any(is_in_linecache(f) for _, f in members):
                raise UncacheableError(f"no source of {_name(kind)}")
        return [
            [[n, self._function(each, bool(file))] for n, each in members],
            [
                [name, self._in_code(held, is_user)]
                for name, held in sorted(vars(kind).items())
                if type(held) in (bool, int, float)
                or (is_user and not _is_code(name, held))
            ],
        ]

    def _function(self, function: Any, has_source: bool = False) -> Any:
        """Returns the code of a function, and what the user's reads."""
        if not isinstance(function, FunctionType):
            return self.of(function)
        if id(function.__code__) in self._seen:
            return ["seen", self._seen[id(function.__code__)][0]]
        self._seen[id(function.__code__)] = len(self._seen), function
        form: list[Any] = [function.__module__, function.__qualname__]
        form.append(code_form(function.__code__))
        is_user = is_users(function)
        if is_user:
            self._has_user_code = True
            has_source |= bool(file_of(sys.modules.get(form[0])))
            if not has_source and not is_in_linecache(function):
                raise UncacheableError(f"no source of {form[1]}")
            form += [
                [name, self._in_code(value, True)]
                for name, value in globals_read(function)
            ]
            form.append(
                self.of([function.__defaults__, function.__kwdefaults__])
            )
        form += [
            self._in_code(cell.cell_contents, is_user)
            for cell in function.__closure__ or ()
        ]
        return form

    def _in_code(self, value: Any, is_user: bool) -> Any:
        """Returns the form of a value that code reads.

        Libraries' values without one are taken to follow from the others.
        """
        while "__wrapped__" in getattr(value, "__dict__", ()):
            value = value.__wrapped__
        try:
            if isinstance(value, FunctionType):
                return self._function(value)
            return self.of(value)
        except UncacheableError as error:
            if is_user:
                raise
            return ["unknown", str(error)]


def _is_code(name: str, held: Any) -> bool:
    """Returns True for members of a class that its functions describe."""
    is_field = type(held).__module__ in ("builtins", "_collections")
    return (
        name.startswith(("__", "_abc_"))
        or bool(functions_in(held))
        or (is_field and inspect.isdatadescriptor(held))
    )


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_plain_python(kind: type) -> bool:
    """Returns True if all state of a class's objects is in ``__dict__``."""
    size = kind.__basicsize__ - object.__basicsize__
    return (
        kind.__dictoffset__ != 0
        and size <= _DICT_BYTES
        and all(
            each is object
            or (
                each.__flags__ & _HEAP_TYPE and not vars(each).get("__slots__")
            )
            for each in kind.__mro__
        )
    )


_DICT_BYTES = 16
"""Size of an object's references to its ``__dict__`` and weak references."""
_HEAP_TYPE = 1 << 9
"""Flag of types that Python code has made (``Py_TPFLAGS_HEAPTYPE``)."""


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def _settings(module: nn.Module) -> Any:
    """Returns torch's settings and the versions of what runs."""
    overrides: Any = torch.overrides
    modes = overrides._get_current_function_mode_stack()
    kinds = {type(mode).__name__ for mode in modes}
    if kinds - {"DeviceContext"}:
        raise UncacheableError(f"modes of torch: {', '.join(sorted(kinds))}")
    devices = {each.device for each in module.parameters()}
    backends: Any = torch.backends
    return [
        _installed(),
        torch.__version__,
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        [
            [
                torch.is_autocast_enabled(kind),
                str(torch.get_autocast_dtype(kind)),
            ]
            for kind in ("cpu", "cuda")
        ],
        [str(getattr(owner, name)) for owner, name, _ in exact_flags()],
        torch.are_deterministic_algorithms_enabled(),
        [backends.mkldnn.enabled, backends.cudnn.enabled],
        [
            getattr(backends.cuda, f"{kind}_sdp_enabled")()
            for kind in ("flash", "mem_efficient", "math", "cudnn")
        ],
        sorted(
            torch.cuda.get_device_name(each)
            if each.type == "cuda"
            else each.type
            for each in devices
        ),
    ]


@functools.cache
def _installed() -> Any:
    """Returns versions of libraries, this package's code, and the machine."""
    ours = hashlib.sha256()
    for package in (hapi_protocol, hapi_splitter):
        for file in sorted(Path(package.__path__[0]).rglob("*.py")):
            ours.update(file.read_bytes())
    return [
        # Of these a package states the versions.
        [metadata.version(name) for name in ("torch", "torchvision")],
        ours.hexdigest(),
        sys.version,
        [platform.machine(), torch.backends.cpu.get_cpu_capability()],
    ]
