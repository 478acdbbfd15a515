"""Leaves a model and the random states as they were before a block.

Models keep caches, counters and running statistics in attributes, and
``torch.export`` leaves tensors without data there. So every attribute that
can be reached from a model is restored, and every tensor that is written to.
"""

from __future__ import annotations

import functools
import random
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type, ModuleType)
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")


@contextmanager
def preserved_state(*models: nn.Module) -> Iterator[TorchDispatchMode]:
    """Restores attributes, tensors and random states after a block.

    Args:
        models: modules that run in the block.

    Yields:
        A context in which the modules must run, except on fake tensors.
    """
    with SavedState(*models).preserved() as writes:
        yield writes


class SavedState:
    """The state of models, for any number of blocks that begin with it.

    Args:
        models: modules that run in the blocks.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._devices = {
            each.device for model in models for each in model.parameters()
        }
        self._attributes = _Attributes()
        for model in models:
            self._attributes.save(model)

    @contextmanager
    def preserved(self) -> Iterator[TorchDispatchMode]:
        """Restores the saved state, and that of random numbers, after a block.

        Yields:
            As :func:`preserved_state`.
        """
        python, numbers = random.getstate(), np.random.get_state()
        writes = _SavedWrites(self._attributes.tensors)
        gpus = [each for each in self._devices if each.type == "cuda"]
        with torch.random.fork_rng(gpus):
            try:
                yield writes
            finally:
                self._attributes.restore()
                writes.restore()
                random.setstate(python)
                np.random.set_state(numbers)


class _Attributes:
    """Copies of all containers and attributes that a model can reach.

    Attributes:
        tensors: all tensors among them.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._saved: dict[int, tuple[Any, Any]] = {}
        self._memories: list[tuple[torch.Tensor, torch.Tensor]] = []

    def save(self, root: Any) -> None:
        pending = [root]
        while pending:
            value = pending.pop()
            if isinstance(value, _PLAIN) or id(value) in self._saved:
                continue
            copy, inner = self._copied(value)
            # The value is held, so that its id is not used again.
            self._saved[id(value)] = value, copy
            pending += inner

    def _copied(self, value: Any) -> tuple[Any, list[Any]]:
        """Returns a shallow copy of what can change, and what is inside."""
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self._memories.append((value, value.detach()))
            return None, []
        if isinstance(value, dict):
            return dict(value), [*value.keys(), *value.values()]
        if isinstance(value, list | deque | set):
            return list(value), list(value)
        if isinstance(value, tuple | frozenset):
            return None, list(value)
        if isinstance(value, MethodType):
            return None, [value.__self__, value.__func__]
        if isinstance(value, FunctionType):
            cells = [c for c in value.__closure__ or () if _is_filled(c)]
            held = [cell.cell_contents for cell in cells]
            return list(zip(cells, held, strict=True)), held
        attributes = getattr(value, "__dict__", None)
        if isinstance(value, functools.partial):
            return None, [value.func, value.args, value.keywords, attributes]
        return None, [attributes]

    def restore(self) -> None:
        for value, copy in self._saved.values():
            if isinstance(value, FunctionType):
                for cell, held in copy:
                    cell.cell_contents = held
            elif copy is not None and not _same(value, copy):
                _restore(value, copy)
        for tensor, before in self._memories:
            if tensor.data_ptr() != before.data_ptr():
                tensor.data = before


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (raises if it is empty)
    except ValueError:
        return False
    return True


def _same(value: Any, copy: Any) -> bool:
    """Compares a container with its copy, entry by entry and in order."""
    if len(value) != len(copy):
        return False
    if isinstance(value, dict) and any(
        held is not value[key] for key, held in copy.items() if key in value
    ):
        return False
    return all(a is b for a, b in zip(value, copy, strict=True))


def _restore(value: Any, copy: Any) -> None:
    if isinstance(value, dict):
        # Not the methods of a subclass, which may do more.
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        kind.clear(value)
        kind.update(value, copy)
        return
    value.clear()
    if isinstance(value, set):
        value.update(copy)
    else:
        value.extend(copy)


class _SavedWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies the memory of known tensors before an operator writes to it."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {_address(each): each for each in tensors}
        self._copies: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable or schema.name[6:] in _BATCH_NORMS:
            for index, argument in enumerate(schema.arguments):
                is_written = (
                    argument.alias_info and argument.alias_info.is_write
                )
                if is_written or argument.name.startswith("running_"):
                    given = args[index] if index < len(args) else None
                    self._save(kwargs.get(argument.name, given))
        return func(*args, **kwargs)

    def _save(self, written: Any) -> None:
        for each in (
            written if isinstance(written, list | tuple) else [written]
        ):
            if isinstance(each, torch.Tensor):
                address = _address(each)
                is_new = address and address not in self._copies
                if is_new and address in self._known:
                    whole = _whole(self._known[address])
                    self._copies[address] = whole.clone()

    def restore(self) -> None:
        for address, copy in self._copies.items():
            _whole(self._known[address]).copy_(copy)


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
