"""Computes a key of everything that the split of a model depends on.

These are the model's weights and structure, the attributes of its modules, the
code of their classes, the user's files, torch's settings and versions.  An
object in an attribute counts by what :mod:`pickle` would store of it.  Code of
libraries is known by versions and the files of classes.  The user's own is
read from memory: functions, and global variables that they name, can differ
from the files.  The files count as well, since their code is reached in other
ways, too.

Models with hooks, and with objects that cannot be pickled, have no key.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import inspect
import json
import platform
import sys
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

import hapi_protocol
import hapi_splitter
from hapi_splitter.freezing.code_form import (
    code_form,
    file_of,
    functions_in,
    globals_read,
    is_library,
    is_librarys,
    is_users,
)
from hapi_splitter.host_limits import allowed_cores
from hapi_splitter.numerics import exact_flags
from hapi_splitter.package.weights import tensor_bytes

_PLAIN = (NoneType, bool, int, float, str)
_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name)
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class UncacheableError(Exception):
    """A model depends on something that cannot be compared."""


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
    description = _Description()
    try:
        document = {
            "model": description.of(module),
            "tensors": description.tensors(),
            "files": description.files(),
            "versions": description.versions(),
            "settings": _settings(module),
            "facts": facts,
        }
        text = json.dumps(document, sort_keys=True)
    except UncacheableError:
        raise
    except Exception as error:  # of the user's objects
        raise UncacheableError(f"{type(error).__name__}: {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()


class _Description:
    """Describes objects as JSON; equal objects have equal descriptions."""

    def __init__(self) -> None:
        # Objects are held, so that their ids are not used again.
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._tensors: list[torch.Tensor] = []
        self._memories: dict[int, int] = {}
        self._modules: set[str] = set()
        self._has_users_code = False

    def of(self, value: Any) -> Any:
        """Returns the description of a value.

        Raises:
            UncacheableError: naming its type.
        """
        kind = type(value)
        if kind in _PLAIN:
            return repr(value)
        if kind is bytes:
            return ["bytes", hashlib.sha256(value).hexdigest()]
        if kind in (tuple, frozenset):
            return [kind.__name__, *self._items(value)]
        if id(value) in self._numbers:
            return ["same as", self._numbers[id(value)][0]]
        self._numbers[id(value)] = len(self._numbers), value
        if issubclass(kind, ModuleType):
            self._modules.add(value.__name__)
            return ["module", value.__name__]
        if issubclass(kind, type):
            return ["class", *self._class(value)]
        return [self.of(kind), *self._content(value)]

    def _content(self, value: Any) -> Iterator[Any]:
        if isinstance(value, nn.Module):
            yield from self._module(value)
        elif isinstance(value, torch.Tensor):
            yield from self._tensor(value)
        elif isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, MethodType):
            yield from self._items((value.__self__, value.__func__))
        elif isinstance(value, weakref.ref):
            yield self.of(value())
        elif type(value) in (list, dict, set):
            yield from self._items(value)
        else:
            yield from self._pickled(value)

    def _items(self, value: Any) -> Iterator[Any]:
        if isinstance(value, set | frozenset):
            return iter(sorted(map(json.dumps, map(self.of, value))))
        pairs = value.items() if isinstance(value, dict) else value
        return map(self.of, pairs)

    def _pickled(self, value: Any) -> Iterator[Any]:
        """Yields what pickle stores of an object; see ``__reduce_ex__``."""
        if not is_librarys(type(value)):
            yield self.of(dict(getattr(value, "__dict__", {})))
        reduce = copyreg.dispatch_table.get(type(value))
        parts = reduce(value) if reduce else value.__reduce_ex__(2)
        if isinstance(parts, str):
            yield [getattr(value, "__module__", None), parts]
            yield self.of(getattr(value, "__wrapped__", None))
        else:
            for part in parts:
                yield self.of([*part] if isinstance(part, Iterator) else part)

    def _module(self, module: nn.Module) -> Iterator[Any]:
        attributes = dict(vars(module))
        for name in _HOOKS:
            if attributes.pop(name, None) and "state_dict" not in name:
                raise UncacheableError(f"{name} of {type(module).__name__}")
        if isinstance(module, torch._dynamo.OptimizedModule):
            return self._items([module._orig_mod])  # which splits run
        attributes.pop("_compiled_call_impl", None)
        return self._items(attributes)

    def _tensor(self, tensor: torch.Tensor) -> Iterator[Any]:
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
        if not is_plain or tensor.layout != torch.strided or tensor.is_meta:
            raise UncacheableError(f"a tensor {type(tensor).__name__}")
        self._tensors.append(tensor)
        memory = tensor.untyped_storage().data_ptr()
        yield [
            str(tensor.dtype),
            [*tensor.shape],
            tensor.stride(),
            # Tensors may share memory.
            self._memories.setdefault(memory, len(self._memories)),
            tensor.storage_offset(),
            tensor.requires_grad,
            tensor.device.type,
        ]
        yield self.of(vars(tensor))

    def _function(self, function: FunctionType) -> Iterator[Any]:
        """Yields the code of a function, and what the user's reads."""
        self._modules.add(str(function.__module__))  # made code may have none
        yield [function.__module__, function.__qualname__]
        yield code_form(function.__code__)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        read = (function.__defaults__, function.__kwdefaults__, *cells)
        yield from self._items(read)
        if is_users(function):
            self._has_users_code = True
            yield self.of(vars(function))
            yield from self._items(globals_read(function))

    def _class(self, kind: type) -> Iterator[Any]:
        yield f"{kind.__module__}.{kind.__qualname__}"
        if kind.__module__ in sys.builtin_module_names:
            return
        self._modules.add(kind.__module__)
        yield from self._items(kind.__bases__)
        file = file_of(sys.modules.get(kind.__module__))
        is_of_library = is_library(file or "")
        self._has_users_code |= not is_of_library
        read = _set_from_outside if is_of_library else _written_by_user
        for name, held in sorted(vars(kind).items()):
            parts = read(kind, name, held)
            if parts:
                yield [name, *self._items(parts)]

    def tensors(self) -> list[str]:
        """Returns the digests of all tensors so far."""
        with ThreadPoolExecutor(max(1, int(allowed_cores()))) as pool:
            return list(pool.map(_digest, self._tensors))

    def files(self) -> list[str]:
        """Returns the digests of the files of all code so far.

        If some of it is the user's, these are all of the user's own files that
        are imported.
        """
        files = {file_of(sys.modules.get(name)) for name in self._modules}
        if self._has_users_code:
            imported = map(file_of, [*sys.modules.values()])
            files |= {file for file in imported if not is_library(file or "")}
        contents = (Path(file).read_bytes() for file in files if file)
        return sorted({hashlib.sha256(data).hexdigest() for data in contents})

    def versions(self) -> dict[str, str]:
        """Returns the versions of all packages so far."""
        packages = {name.partition(".")[0] for name in self._modules}
        return {
            name: str(getattr(sys.modules.get(name), "__version__", None))
            for name in packages
        }


def _set_from_outside(kind: type, name: str, held: Any) -> list[Any]:
    """Returns what users may have set in a library's class: numbers, and
    functions of other packages, or of the user's own."""
    if type(held) in (bool, int, float):
        return [] if name.startswith("_") else [held]
    own = kind.__module__.partition(".")[0]
    return [
        code
        for code in functions_in(held)
        if str(code.__module__).partition(".")[0] != own or is_users(code)
    ]


def _written_by_user(kind: type, name: str, held: Any) -> list[Any]:
    """Returns what a user's class has: functions, and values that Python has
    not made itself, such as descriptors of slots."""
    is_pythons = name.startswith(("__", "_abc_")) or (
        inspect.isdatadescriptor(held)
        and type(held).__module__ in ("builtins", "_collections")
    )
    return functions_in(held) or ([] if is_pythons else [held])


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def _settings(module: nn.Module) -> Any:
    """Returns torch's settings and the versions of what runs."""
    overrides: Any = torch.overrides
    modes = overrides._get_current_function_mode_stack()
    kinds = {type(mode).__name__ for mode in modes}
    if kinds - {"DeviceContext"}:
        raise UncacheableError(f"modes of torch: {', '.join(sorted(kinds))}")
    devices = {parameter.device for parameter in module.parameters()}
    backends: Any = torch.backends
    return [
        _installed(),
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
            torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else device.type
            for device in devices
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
        torch.__version__,
        metadata.version("torchvision"),  # a package states it
        ours.hexdigest(),
        sys.version,
        [platform.machine(), torch.backends.cpu.get_cpu_capability()],
    ]
