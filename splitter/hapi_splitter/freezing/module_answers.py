"""Lets modules answer without being run, in one thread."""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_CHANGE = threading.Lock()
Answer = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@contextmanager
def answered(
    modules: Mapping[str, nn.Module], answer: Answer
) -> Iterator[None]:
    """Makes modules return an answer in this thread, without their hooks.

    In other threads they run as they do otherwise.

    Args:
        modules: by name.
        answer: returns the result for the name of a module and its arguments.
    """
    thread, replacements = threading.get_ident(), []
    try:
        with _CHANGE:
            for name, module in modules.items():
                replacements.append(_Answers.of(module))
                replacements[-1].by_thread[thread] = name, answer
        yield
    finally:
        with _CHANGE:
            for replacement in replacements:
                replacement.remove(thread)


class _Answers:
    """The answers of one module, by thread.

    They take the place of the module's ``forward``, or of all of its call if
    it has hooks.  Both are read once in a call of the module, so that other
    threads see either the one or the other.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._attributes = vars(module)
        self._name = name
        self.before = getattr(module, name)
        self._own = self._attributes.get(name)
        # No frame of Python, which torch.compile would compile.
        self._attributes[name] = functools.partial(_dispatcher(), self)
        self.by_thread: dict[int, tuple[str, Answer]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Answers:
        """Returns one without answers, for a copy of the model."""
        copied = object.__new__(_Answers)
        copied.before = copy.deepcopy(self.before, memo)
        copied.by_thread = {}
        return copied

    @classmethod
    def of(cls, module: nn.Module) -> _Answers:
        name = _attribute(module)
        attribute: Any = vars(module).get(name)
        return attribute.args[0] if is_answer(attribute) else cls(module, name)

    def remove(self, thread: int) -> None:
        self.by_thread.pop(thread, None)
        if self.by_thread:
            return
        if self._own is None:
            del self._attributes[self._name]
        else:
            self._attributes[self._name] = self._own


def is_answer(attribute: Any) -> bool:
    """Returns True for what stands in for a method of a module."""
    first = getattr(attribute, "args", None) or (None,)
    return isinstance(attribute, functools.partial) and isinstance(
        first[0], _Answers
    )


def _dispatch(answers: _Answers, *args: Any, **kwargs: Any) -> Any:
    entry = answers.by_thread.get(threading.get_ident())
    if entry is None:
        return answers.before(*args, **kwargs)
    name, answer = entry
    return answer(name, args, kwargs)


def _dispatcher() -> Callable[..., Any]:
    # Otherwise nothing is compiled, and the import takes a second.
    has_compiler = "torch._dynamo" in sys.modules
    return _uncompiled_dispatch() if has_compiler else _dispatch


@functools.cache
def _uncompiled_dispatch() -> Callable[..., Any]:
    compiler: Any = torch.compiler  # untyped
    dispatch: Callable[..., Any] = compiler.disable(_dispatch)
    return dispatch


def _attribute(module: nn.Module) -> str:
    """Returns the attribute to replace, so that hooks do not run."""
    attributes = vars(module)
    if attributes.get("_compiled_call_impl") is not None:
        return "_compiled_call_impl"
    has_hooks = any(attributes[name] for name in HOOKS)
    return "_call_impl" if has_hooks else "forward"
