"""Options of a daemon: fields of a frozen dataclass, with default and parser.

A parser takes the text of an option and raises ValueError with what is
allowed, which completes the sentence "it must be …".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from types import MappingProxyType
from typing import Any, TypeVar

_Config = TypeVar("_Config")
_NOTHING: Mapping[str, str] = MappingProxyType({})
MAX_SOCKET_PATH_BYTES = 107
"""Limit of the kernel, for paths of unix sockets."""


def option(
    default: str, parse: Callable[[str], Any], *, reloads: bool = False
) -> Any:
    """Declares an option, as a field of a dataclass.

    Args:
        default: text of the default.
        parse: makes the typed value from a text.
        reloads: a running process can take over another value.
    """
    return field(
        default=parse(default),
        metadata={"text": default, "parse": parse, "reloads": reloads},
    )


def read_options(
    kind: type[_Config],
    section: str,
    texts: Mapping[str, str],
    *,
    inherited: Mapping[str, str] = _NOTHING,
    is_foreign: Callable[[str], bool] = lambda name: False,
) -> _Config:
    """Parses the texts of options.

    Args:
        kind: the dataclass; all its fields are made by :func:`option`.
        section: name of the options' section, for messages.
        texts: texts by name; every name must be known.
        inherited: other texts by name, of which unknown ones are ignored.
        is_foreign: returns True for names that others read.

    Raises:
        ValueError: names each bad option, its value and what is allowed.
    """
    parsers = {
        field.name: field.metadata["parse"]
        for field in fields(kind)  # type: ignore[arg-type]
    }
    unknown = [
        f"{name} = {text}"
        for name, text in texts.items()
        if name not in parsers and not is_foreign(name)
    ]
    problems = []
    if unknown:
        problems.append(
            f"[{section}] has the unknown option {', '.join(unknown)}; "
            f"allowed are {', '.join(sorted(parsers))}"
        )
    values = {}
    for name, text in {**inherited, **texts}.items():
        if name in parsers:
            try:
                values[name] = parsers[name](str(text).strip())
            except ValueError as error:
                problems.append(
                    f"[{section}] {name} = {text}: it must be {error}"
                )
    if problems:
        raise ValueError("; ".join(problems))
    return kind(**values)


def count(smallest: int, largest: int | None = None) -> Callable[[str], int]:
    """Makes a parser of whole numbers."""

    def parse(text: str) -> int:
        value = int(text) if re.fullmatch("[0-9]{1,15}", text) else -1
        if not smallest <= value <= (largest or value):
            end = f"to {largest}" if largest else "on"
            raise ValueError(f"a whole number from {smallest} {end}")
        return value

    return parse


def seconds(text: str) -> float:
    """Parses a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError("a positive number of seconds")
    return value


def absolute_path(max_bytes: int = 4096) -> Callable[[str], str]:
    """Makes a parser of absolute paths."""

    def parse(text: str) -> str:
        if not text.startswith("/") or len(text.encode()) > max_bytes:
            raise ValueError(f"an absolute path of at most {max_bytes} bytes")
        return text

    return parse
