"""Leaves a model and the random states as they were before a block.

Models keep caches, counters and running statistics in attributes, layers such
as LoRA's write to their weights in ``train`` and ``eval``, and
``torch.export`` leaves tensors without data behind. So everything that can be
reached from a model is restored: attributes, also of its classes, globals of
the user's code, the memory of tensors and arrays, generators of random numbers
and iterators.
"""

from __future__ import annotations

import copy
import functools
import io
import logging
import mmap
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import (
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import nn

from hapi_protocol.errors import cannot_freeze
from hapi_splitter.freezing.code_form import (
    codes_in,
    functions_in,
    is_librarys,
    is_users,
)
from hapi_splitter.freezing.stand_in_tensor import StandInTensor

logger = logging.getLogger(__name__)

_PLAIN = (int, float, complex, str, bytes, bool, type(None), ModuleType)
_HUGE_PAGE_BYTES = 2 << 20
_HEAP_TYPE = 1 << 9
"""Flag of classes that Python code has made (``Py_TPFLAGS_HEAPTYPE``)."""
_NO_DESCRIPTOR = object()


@contextmanager
def preserved_state(*models: nn.Module) -> Iterator[SavedState]:
    """Restores all that models can reach, and random states, after a block.

    Args:
        models: modules that run in the block.

    Yields:
        The state, for blocks within the block.

    Raises:
        FreezeError: ``cannot_freeze`` naming what cannot be restored.
    """
    state = SavedState(*models)
    with state.preserved():
        yield state


class SavedState:
    """The state of models, for any number of blocks that begin with it.

    Args:
        models: modules that run in the blocks.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._devices = {
            tensor.device for model in models for tensor in model.parameters()
        }
        self._attributes = _Attributes()
        for model in models:
            self._attributes.save(model)
        self._memories = _Memories(self._attributes.tensors)
        self._names = {
            _address(tensor): name
            for model in models
            for named in (model.named_buffers, model.named_parameters)
            for name, tensor in named()
        }
        self._depth = 0

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restores the saved state, and that of random numbers, after a block.

        Raises:
            FreezeError: as :func:`preserved_state`.
        """
        python, numbers = random.getstate(), np.random.get_state()
        gpus = [device for device in self._devices if device.type == "cuda"]
        with torch.random.fork_rng(gpus):
            self._attributes.begin()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                self._restore()
                random.setstate(python)
                np.random.set_state(numbers)

    def _restore(self) -> None:
        self._attributes.restore()
        changed = self._memories.restore()
        if self._depth:
            self._attributes.begin()
        elif changed:
            names = [self._names.get(key, "another") for key in changed]
            logger.info("the model's tensors are put back: %s", names)

    def is_changed(self, tensor: torch.Tensor) -> bool:
        """Returns True if the memory of a tensor is not as it was saved."""
        return self._memories.is_changed(tensor)


class _Attributes:
    """Copies of all containers and attributes that a model can reach.

    Attributes:
        tensors: all tensors among them.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._saved: dict[int, tuple[Any, Any]] = {}
        self._data: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        self._restorers: list[Callable[[], Any]] = []
        self._iterators: list[tuple[Any, Any, Any]] = []

    def save(self, root: Any) -> None:
        pending = [root]
        while pending:
            value = pending.pop()
            if isinstance(value, _PLAIN) or id(value) in self._saved:
                continue
            if isinstance(value, type):
                pending += self._class(value)
                continue
            copied, inner = self._copied(value)
            # The value is held, so that its id is not used again.
            self._saved[id(value)] = value, copied
            pending += inner
            if type(value).__flags__ & _HEAP_TYPE:
                pending += type(value).__mro__

    def _copied(self, value: Any) -> tuple[Any, list[Any]]:
        """Returns a shallow copy of what can change, and what is inside."""
        if isinstance(value, torch.Tensor):
            if isinstance(value, StandInTensor):
                return None, []  # it has no data
            self.tensors.append(value)
            # Others have no gradient that could be set.
            gradient = value.is_leaf and (value.requires_grad, value.grad)
            self._data.append((value, value.detach(), gradient))
            return None, [getattr(value, "__dict__", None)]
        if isinstance(value, dict):
            self._find_iterators(value, value.items())
            return dict(value), [*value.keys(), *value.values()]
        if isinstance(value, list):
            self._find_iterators(value, enumerate(value))
            return list(value), list(value)
        if isinstance(value, deque | set):
            return list(value), list(value)
        if isinstance(value, tuple | frozenset):
            return None, list(value)
        if isinstance(value, MethodType):
            return None, [value.__self__, value.__func__]
        if isinstance(value, FunctionType):
            cells = [c for c in value.__closure__ or () if is_filled(c)]
            held = [cell.cell_contents for cell in cells]
            inner = [*held, value.__defaults__, value.__kwdefaults__]
            if is_users(value):
                read = dict(_globals(value))
                inner += [vars(value), *read.values()]
                self._restorers.append(
                    functools.partial(_restore_names, value.__globals__, read)
                )
            return list(zip(cells, held, strict=True)), inner
        if isinstance(value, functools.partial):
            attributes = getattr(value, "__dict__", None)
            return None, [value.func, value.args, value.keywords, attributes]
        restorer = _restorer(value)
        if restorer is not None:
            self._restorers.append(restorer)
            return None, []
        slots = slots_of(value)
        if slots:
            self._restorers.append(functools.partial(_set, value, slots))
        held = [item for _, item in slots if item is not _NO_DESCRIPTOR]
        return None, [getattr(value, "__dict__", None), *held]

    def _class(self, kind: type) -> list[Any]:
        """Saves the attributes of a class; of the user's, all in them."""
        if id(kind) in self._saved or not kind.__flags__ & _HEAP_TYPE:
            return []
        self._saved[id(kind)] = kind, None
        if kind.__module__.partition(".")[0] == "torch":
            return []
        held = {
            name: attribute
            for name, attribute in vars(kind).items()
            if not name.startswith("__")
        }
        self._restorers.append(functools.partial(_restore_class, kind, held))
        if is_librarys(kind):
            return []
        inner: list[Any] = []
        for attribute in held.values():
            inner += functions_in(attribute) or [attribute]
        return inner

    def _find_iterators(self, holder: Any, items: Any) -> None:
        for key, value in items:
            is_iterator = hasattr(type(value), "__next__") and not (
                type(value).__flags__ & _HEAP_TYPE
                or isinstance(value, io.IOBase)
            )
            if is_iterator:
                self._iterators.append((holder, key, value))

    def begin(self) -> None:
        """Puts copies of iterators in their place, since none can go back."""
        for holder, key, iterator in self._iterators:
            try:
                other = copy.deepcopy(iterator)
            except (TypeError, NotImplementedError):
                other = _Unread(key, iterator)
            _put(holder, key, other)

    def restore(self) -> None:
        for value, copied in self._saved.values():
            if isinstance(value, FunctionType):
                for cell, held in copied:
                    cell.cell_contents = held
            elif copied is not None and not _same(value, copied):
                _restore(value, copied)
        for restorer in self._restorers:
            restorer()
        for tensor, before, gradient in self._data:
            if _address(tensor) != _address(before):
                tensor.data = before
            if gradient and tensor.requires_grad != gradient[0]:
                tensor.requires_grad = gradient[0]
            if gradient and tensor.grad is not gradient[1]:
                tensor.grad = gradient[1]


class _Unread:
    """Takes the place of an iterator that cannot be copied."""

    def __init__(self, name: Any, iterator: Any) -> None:
        self._name = name
        self._kind = type(iterator).__name__

    def __iter__(self) -> _Unread:
        return self

    def __next__(self) -> Any:
        raise cannot_freeze(
            f"the forward reads the {self._kind} {self._name!r} of the model, "
            "which a split cannot put back to where it was; make it a list, "
            "or an object that can be copied",
        )


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the global variables that a function's code may name."""
    names = {name for code in codes_in(function) for name in code.co_names}
    for name in names & function.__globals__.keys():
        yield name, function.__globals__[name]


def _restore_names(namespace: dict[str, Any], held: dict[str, Any]) -> None:
    for name, value in held.items():
        if namespace.get(name) is not value:
            namespace[name] = value


def _put(holder: Any, key: Any, value: Any) -> None:
    kind = dict if isinstance(holder, dict) else list
    kind.__setitem__(holder, key, value)


def _restorer(value: Any) -> Callable[[], Any] | None:
    """Returns what restores an object with state outside Python, or None."""
    restore: Callable[[], Any] | None = None
    if isinstance(value, torch.Generator):
        restore = functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        restore = functools.partial(
            setattr, value.bit_generator, "state", value.bit_generator.state
        )
    if isinstance(value, np.random.RandomState):
        restore = functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        restore = functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.memmap):
        return None  # may be a data set
    if isinstance(value, np.ndarray) and value.flags.writeable:
        restore = functools.partial(_restore_array, value, value.copy())
    if isinstance(value, bytearray):
        restore = functools.partial(
            value.__setitem__, slice(None), bytes(value)
        )
    return restore


def _restore_array(array: Any, before: Any) -> None:
    if array.tobytes() != before.tobytes():
        np.copyto(array, before)


def slots_of(value: Any) -> list[tuple[Any, Any]]:
    """Returns the descriptors of ``__slots__`` with their values."""
    slots = []
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            descriptor: Any = vars(kind).get(name)
            if isinstance(descriptor, MemberDescriptorType):
                try:
                    held = descriptor.__get__(value)
                except AttributeError:
                    held = _NO_DESCRIPTOR
                slots.append((descriptor, held))
    return slots


def _set(value: Any, slots: list[tuple[Any, Any]]) -> None:
    for descriptor, held in slots:
        if held is not _NO_DESCRIPTOR:
            descriptor.__set__(value, held)
        elif _is_set(descriptor, value):
            descriptor.__delete__(value)


def _is_set(descriptor: Any, value: Any) -> bool:
    try:
        descriptor.__get__(value)
    except AttributeError:
        return False
    return True


def _restore_class(kind: type, held: dict[str, Any]) -> None:
    now = {n: v for n, v in vars(kind).items() if not n.startswith("__")}
    for name in now.keys() - held.keys():
        type.__delattr__(kind, name)
    for name, value in held.items():
        if now.get(name, _NO_DESCRIPTOR) is not value:
            type.__setattr__(kind, name, value)


def is_filled(cell: Any) -> bool:
    """Returns True for a variable of a closure that has a value."""
    try:
        cell.cell_contents  # noqa: B018 (raises if it is empty)
    except ValueError:
        return False
    return True


def _same(value: Any, copied: Any) -> bool:
    """Compares a container with its copy, entry by entry and in order."""
    if len(value) != len(copied):
        return False
    if isinstance(value, dict) and any(
        held is not value[key] for key, held in copied.items() if key in value
    ):
        return False
    return all(a is b for a, b in zip(value, copied, strict=True))


def _restore(value: Any, copied: Any) -> None:
    if isinstance(value, dict):
        # Not the methods of a subclass, which may do more.
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        kind.clear(value)
        kind.update(value, copied)
        return
    value.clear()
    if isinstance(value, set):
        value.update(copied)
    else:
        value.extend(copied)


class _Memories:
    """Copies of the memory of tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        wholes = {_address(tensor): tensor.detach() for tensor in tensors}
        wholes.pop(0, None)
        self._wholes = {key: _whole(tensor) for key, tensor in wholes.items()}
        self._copies = dict(
            zip(self._wholes, _copies([*self._wholes.values()]), strict=True)
        )

    def is_changed(self, tensor: torch.Tensor) -> bool:
        address = _address(tensor)
        return address in self._wholes and not self._is_same(address)

    def _is_same(self, address: int) -> bool:
        return torch.equal(
            _in_words(self._wholes[address]), _in_words(self._copies[address])
        )

    def restore(self) -> list[int]:
        """Restores the memory and returns the addresses that had changed."""
        changed = [key for key in self._wholes if not self._is_same(key)]
        for key in changed:
            self._wholes[key].copy_(self._copies[key])
        return changed


def _copies(wholes: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields copies, those in main memory next to one another."""
    sizes = [-(-len(whole) // 64) * 64 for whole in wholes]
    on_host = [whole.device.type == "cpu" for whole in wholes]
    total = sum(n for n, here in zip(sizes, on_host, strict=True) if here)
    arena = torch.frombuffer(_pages(total), dtype=torch.uint8)
    used = 0
    for whole, size, here in zip(wholes, sizes, on_host, strict=True):
        if here:
            yield arena[used : used + len(whole)].copy_(whole)
            used += size
        else:
            yield whole.clone()


def _pages(size: int) -> Any:
    """Returns memory; of huge pages, since small ones take as long as the
    rest of a split (1.3 s for 343 MB, and 0.3 s with huge ones)."""
    if size < _HUGE_PAGE_BYTES:
        return bytearray(max(size, 1))
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _in_words(memory: torch.Tensor) -> torch.Tensor:
    """Returns bytes as larger numbers, which are compared faster."""
    is_aligned = memory.data_ptr() % 8 == 0 and len(memory) % 8 == 0
    return memory.view(torch.int64) if is_aligned else memory


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor's memory."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def _address(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's memory, 0 without memory."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        # On the meta device or fake, where nothing is written; of sparse
        # tensors, which torch.export refuses, writes are not restored.
        return 0
