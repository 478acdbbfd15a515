"""Parses the ``freeze`` argument: a name, a list of names, or a function."""

from __future__ import annotations

import difflib
import re
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import TypeAlias, Union

from torch import nn

from hapi_protocol.errors import FreezeError, cannot_freeze

Freeze: TypeAlias = Union[  # noqa: UP007 (evaluated by Python 3.10)
    str, Sequence[str], Callable[[str, nn.Module], bool]
]
"""A dotted module name freezes everything that runs up to the module's end. A
list of names freezes exactly these modules and parameters. A function of name
and module selects among the modules with parameters of their own."""

AUTO = "auto"
"""Freezes everything before the first trainable parameter."""
_COMPILED = "_orig_mod."
_MAX_TEXT_NAMES = 4
_MAX_SIMILAR = 5
_MAX_LARGE = 2
_LARGE = 4
"""A module is large with a quarter of the parameters."""
_CLOSE = 0.8
_NONE = "there are none"


@dataclass(frozen=True)
class FreezeSpec:
    """A specification of the modules to freeze.

    Args:
        names: dotted names of modules, or of parameters that a module with
            submodules holds itself.
        exact: True if nothing else may be frozen.
        from_function: True if a function selected the names; some may never
            run.
    """

    names: tuple[str, ...]
    exact: bool = False
    from_function: bool = False

    @property
    def text(self) -> str:
        """Names for messages and for :attr:`SplitModel.freeze`."""
        shown = ", ".join(self.names[:_MAX_TEXT_NAMES])
        more = len(self.names) - _MAX_TEXT_NAMES
        return f"{shown} and {more} more" if more > 0 else shown

    def covers(self, parameter: str) -> bool:
        """Returns True if a parameter is in one of the named modules."""
        return any(
            parameter == name or parameter.startswith(f"{name}.")
            for name in self.names
        )

    def outside(self, parameter: str) -> str:
        """Returns the outermost module of a parameter without named parts."""
        parts = parameter.split(".")
        for length in range(1, len(parts)):
            prefix = ".".join(parts[:length])
            inside = f"{prefix}."
            if not any(name.startswith(inside) for name in self.names):
                return prefix
        return parameter


def parse_freeze(model: nn.Module, freeze: Freeze | None) -> FreezeSpec:
    """Parses the ``freeze`` argument.

    Raises:
        FreezeError: ``unknown_freeze`` if it has another type,
            ``cannot_freeze`` if a function selects no module.
    """
    if isinstance(freeze, str) and freeze:
        name = freeze.removeprefix(_COMPILED)
        if name != AUTO:
            _check_names(model, [name])
        return FreezeSpec((name,))
    if callable(freeze) and not isinstance(freeze, nn.Module):
        names = tuple(_selected_names(model, freeze))
        return FreezeSpec(names, exact=True, from_function=True)
    if freeze is None or freeze == "":
        raise FreezeError(
            "unknown_freeze",
            f"a freeze point is needed to split a {type(model).__name__}; "
            "name a module, such as the result of default_freeze(model)",
        )
    if (
        not isinstance(freeze, Sequence)
        or not freeze
        or not all(isinstance(name, str) for name in freeze)
    ):
        raise FreezeError(
            "unknown_freeze",
            f"freeze {freeze!r:.80}: it must be a module's name, a list of at "
            "least one name, or a function of a name and a module",
        )
    unique = dict.fromkeys(name.removeprefix(_COMPILED) for name in freeze)
    _check_names(model, unique)
    return FreezeSpec(tuple(unique), exact=True)


def _check_names(model: nn.Module, names: Iterable[str]) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        if name not in modules and name not in parameters:
            raise FreezeError(
                "unknown_freeze",
                f"freeze {name!r}: that module is not in the model; similar "
                f"names: {similar(name, modules, model)}",
            )


def _selected_names(
    model: nn.Module, select: Callable[[str, nn.Module], bool]
) -> Iterator[str]:
    is_selected = {
        name: bool(select(name, module))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    if not any(is_selected.values()):
        raise cannot_freeze(
            f"freeze(name, module) is true for none of the {len(is_selected)} "
            f"modules of {type(model).__name__} that have parameters",
        )
    return _outermost_names(model, "", is_selected)


def _outermost_names(
    module: nn.Module, path: str, is_selected: Mapping[str, bool]
) -> Iterator[str]:
    """Yields the outermost modules and parameters that are selected whole."""
    prefix = f"{path}." if path else ""
    inside = [
        value
        for name, value in is_selected.items()
        if name == path or name.startswith(prefix)
    ]
    if path and inside and all(inside):
        yield path
        return
    if is_selected.get(path):
        for name, _ in module.named_parameters(path, recurse=False):
            yield name
    if any(inside):
        for name, child in module.named_children():
            yield from _outermost_names(child, prefix + name, is_selected)


def similar(name: str, valid: Iterable[str], model: nn.Module) -> str:
    """Returns valid names that may be meant by ``name``, for a message.

    They are spelt alike, or hold most of the parameters, as a backbone does,
    and do not contain the model's last layer.
    """
    names = [path for path in valid if path]
    sizes = {n: _num_parameters(model.get_submodule(n)) for n in names}
    total = _num_parameters(model)
    (*_, (last, _)) = model.named_modules()
    large = [
        path
        for path in names
        if _LARGE * sizes[path] >= total
        and not f"{last}.".startswith(f"{path}.")
    ]
    alike, close = (
        difflib.get_close_matches(
            _counted(name, names), names, _MAX_SIMILAR, cutoff
        )
        for cutoff in (0.0, _CLOSE)
    )
    suggestions = dict.fromkeys([*close, *large[:_MAX_LARGE], *alike])
    return ", ".join([*suggestions][:_MAX_SIMILAR]) or _NONE


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _counted(name: str, names: Sequence[str]) -> str:
    """Returns a name with ``layers[-1]`` or ``layers.-1`` counted."""
    name = re.sub(r"\[(-?\d+)\]", r".\1", name)
    before, separator, index = name.partition(".-")
    digits, _, after = index.partition(".")
    if not separator or not digits.isdigit():
        return name
    count = sum(
        other.rpartition(".")[0] == before
        and other.rpartition(".")[2].isdigit()
        for other in names
    )
    return f"{before}.{count - int(digits)}{after and f'.{after}'}"


def nearest(position: int, valid: Mapping[str, int]) -> str:
    """Returns the outermost valid names next to a position, for a message.

    Args:
        position: position of the refused freeze point.
        valid: names with the positions of their ends.
    """
    before = max((p for p in valid.values() if p < position), default=None)
    after = min((p for p in valid.values() if p > position), default=None)
    texts = []
    for side, end in (("before it", before), ("after it", after)):
        names = [name for name, ending in valid.items() if ending == end]
        if names:
            outermost = min(names, key=lambda name: name.count("."))
            texts.append(f"{outermost!r} {side}")
    return ", ".join(texts) or _NONE
