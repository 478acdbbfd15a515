"""What a user asks to be frozen: a name, a list of them, or a function."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, Union

from torch import nn

from hapi_protocol.errors import FreezeError

Freeze: TypeAlias = Union[  # noqa: UP007 (evaluated by Python 3.10)
    str, Sequence[str], Callable[[str, nn.Module], bool]
]
"""A dotted module name: all that runs up to its end is frozen. A list of
names: exactly these modules (and parameters) are. A function of a name and
a module: asked for each module with parameters of its own."""

_COMPILED = "_orig_mod."
_MAX_NAMES = 4


@dataclass(frozen=True)
class FreezeSpec:
    """What is to be frozen.

    Args:
        names: dotted names of modules, or of parameters that a module with
            submodules holds itself.
        exact: whether nothing else may be frozen.
        asked: whether a function chose the names; some may never run.
    """

    names: tuple[str, ...]
    exact: bool = False
    asked: bool = False

    @property
    def text(self) -> str:
        """For messages, and for :attr:`SplitModel.freeze`."""
        shown = ", ".join(self.names[:_MAX_NAMES])
        more = len(self.names) - _MAX_NAMES
        return f"{shown} and {more} more" if more > 0 else shown

    def covers(self, parameter: str) -> bool:
        """Whether a parameter is in what was chosen."""
        return any(
            parameter == name or parameter.startswith(f"{name}.")
            for name in self.names
        )

    def outside(self, parameter: str) -> str:
        """The outermost module with a parameter and nothing chosen in it."""
        parts = parameter.split(".")
        for length in range(1, len(parts)):
            prefix = ".".join(parts[:length])
            inside = f"{prefix}."
            if not any(name.startswith(inside) for name in self.names):
                return prefix
        return parameter


def choose(model: nn.Module, freeze: Freeze | None) -> FreezeSpec:
    """Reads the ``freeze`` argument.

    Raises:
        FreezeError: ``unknown_freeze`` where it is none of the three.
    """
    if isinstance(freeze, str) and freeze:
        return FreezeSpec((freeze.removeprefix(_COMPILED),))
    if callable(freeze) and not isinstance(freeze, nn.Module):
        return FreezeSpec(tuple(_asked(model, freeze)), exact=True, asked=True)
    if freeze is None or freeze == "":
        raise FreezeError(
            "unknown_freeze",
            f"a freeze point is needed to split a {type(model).__name__}; "
            "name a module, such as the one that default_freeze(model) finds",
        )
    if not isinstance(freeze, Sequence) or not freeze:
        raise _unreadable(freeze)
    if not all(isinstance(name, str) for name in freeze):
        raise _unreadable(freeze)
    names = dict.fromkeys(name.removeprefix(_COMPILED) for name in freeze)
    return FreezeSpec(tuple(names), exact=True)


def _unreadable(freeze: object) -> FreezeError:
    return FreezeError(
        "unknown_freeze",
        f"freeze {freeze!r:.80}: it must be a module's name, a list of at "
        "least one name, or a function of a name and a module",
    )


def _asked(
    model: nn.Module, freeze: Callable[[str, nn.Module], bool]
) -> Iterator[str]:
    answers = {
        name: bool(freeze(name, module))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    if not any(answers.values()):
        raise FreezeError(
            "cannot_freeze",
            f"freeze(name, module) is true for none of the {len(answers)} "
            f"modules of {type(model).__name__} that have parameters",
        )
    return _collapsed(model, "", answers)


def _collapsed(
    module: nn.Module, path: str, answers: Mapping[str, bool]
) -> Iterator[str]:
    """The outermost names that stand for all answers that are true."""
    inside = f"{path}." if path else ""
    found = [
        answer
        for name, answer in answers.items()
        if name == path or name.startswith(inside)
    ]
    if path and found and all(found):
        yield path
        return
    if answers.get(path):
        for name, _ in module.named_parameters(inside[:-1], recurse=False):
            yield name
    if any(found):
        for name, child in module.named_children():
            yield from _collapsed(child, inside + name, answers)


_MAX_NAMES = 5
_NONE = "there are none"


def similar(name: str, valid: Mapping[str, int]) -> str:
    """Valid names spelt like an unknown one, for a message."""
    near = difflib.get_close_matches(name, valid, _MAX_NAMES, cutoff=0.0)
    return ", ".join(near) or _NONE


def nearest(position: int, valid: Mapping[str, int]) -> str:
    """The valid names next to a position, the outermost on each side.

    Args:
        position: where the refused freeze point would be.
        valid: names with the positions of their ends.
    """
    sides = {
        "before it": max(
            (p for p in valid.values() if p < position), default=None
        ),
        "behind it": min(
            (p for p in valid.values() if p > position), default=None
        ),
    }
    found = []
    for side, place in sides.items():
        names = [name for name, end in valid.items() if end == place]
        if names:
            outermost = min(names, key=lambda name: name.count("."))
            found.append(f"{outermost!r} {side}")
    return ", ".join(found) or _NONE
