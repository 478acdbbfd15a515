"""Notices when what frozen modules read changes after a split.

Next to weights (:mod:`hapi_splitter.freezing.frozen_weights`) they read
attributes of their own and of their classes, and global variables. Features
are computed with what these were when the model was split.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hapi_protocol.errors import cannot_freeze
from hapi_splitter.freezing.code_form import is_librarys
from hapi_splitter.freezing.model_checks import (
    SplitWarning,
    hooks_of,
    is_users_hook,
)
from hapi_splitter.freezing.module_answers import is_answer
from hapi_splitter.freezing.readable_state import (
    CHECKPOINTING,
    MISSING,
    OWN,
    PLAIN_TYPES,
    ReadableState,
    is_same_value,
    names_in_code,
)

_REMEDY = (
    "set it before the split, split the model again, or freeze before "
    "what reads it"
)


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
            name: ReadableState(name, model.get_submodule(name), seen)
            for name in modules
        }
        self._modules = {
            name: module
            for state in self._read.values()
            for name, module in state.modules.items()
        }
        self._kinds = [*map(type, self._modules.values())]
        self._spaces: list[Any] = [*map(vars, self._modules.values())]
        self._owners = [*self._modules.items()]
        for kind in {base for k in set(self._kinds) for base in k.__mro__}:
            if not is_librarys(kind):
                self._spaces.append(vars(kind))
                self._owners.append((kind.__qualname__, kind))
        self._sizes = [*map(len, self._spaces)]
        self._keys = [*map(set, self._spaces)]
        self._hooks = [
            hooks
            for space in map(vars, self._modules.values())
            for hooks in (space["_forward_hooks"], space["_forward_pre_hooks"])
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
                if known is None or is_same_value(now, known):
                    continue
            change = f"from {_text(before)} to {_text(now)}"
            if now is before:
                change = "by a write to its numbers"
            raise cannot_freeze(
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
            for state in self._read.values()
            for label, _, now in state.differences()
        }

    def _check_added(self) -> None:
        for module, kind in zip(
            self._modules.items(), self._kinds, strict=True
        ):
            name, now = module[0], type(module[1])
            if now is not kind:
                raise cannot_freeze(
                    f"{name!r} was a {kind.__name__} when the model was "
                    f"split, and is a {now.__name__} now; {_REMEDY}",
                )
        for (name, owner), keys in zip(self._owners, self._keys, strict=True):
            kind = owner if isinstance(owner, type) else type(owner)
            for key in vars(owner).keys() - keys - OWN:
                is_read = key in names_in_code(kind) or (
                    # It hides one, such as a forward.
                    hasattr(super(kind, kind) if kind is owner else kind, key)
                    and not is_answer(vars(owner)[key])
                )
                if is_read and CHECKPOINTING not in key:
                    raise cannot_freeze(
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


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {[*value.shape]}"
    return (
        "nothing" if value is MISSING else " ".join(f"{value!r:.60}".split())
    )


def _plain(value: Any) -> Any:
    """Returns a value that can be compared later, None for others."""
    if isinstance(value, list | tuple):
        copied = [*map(_plain, value)]
        return None if None in copied else type(value)(copied)
    return value if isinstance(value, PLAIN_TYPES) else None
