"""Describes code as JSON, and tells the user's own from that of libraries."""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

import hapi_protocol
import hapi_splitter

_GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME")
_SITE_FOLDERS = frozenset(("site-packages", "dist-packages"))


def file_of(module: ModuleType | None) -> str | None:
    """Returns the path of a module's file, None without one."""
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and os.path.isfile(file) else None


@functools.cache
def is_library(file: str) -> bool:
    """Returns True for files of installed packages, torch and Python."""
    folders = (
        sysconfig.get_path("stdlib"),
        *(
            p
            for package in (torch, hapi_splitter, hapi_protocol)
            for p in package.__path__
        ),
    )
    return bool(_SITE_FOLDERS & set(Path(file).parts)) or any(
        file.startswith(f"{folder}{os.sep}") for folder in folders
    )


def is_librarys(kind: Any) -> bool:
    """Returns True for a class or function of an installed package."""
    return is_library(file_of(sys.modules.get(kind.__module__)) or "")


def is_users(function: FunctionType) -> bool:
    """Returns True for a function of the user's own code.

    Its module tells nothing: ``functools.wraps`` copies that of another one.
    """
    file = function.__code__.co_filename
    if not os.path.isabs(file):
        name = str(function.__globals__.get("__name__"))
        file = file_of(sys.modules.get(name)) or ""
    return not is_library(file)


def functions_in(held: Any) -> list[FunctionType]:
    """Returns the functions of a method, property or the like."""
    names = ("__func__", "fget", "fset", "func", "__wrapped__")
    parts = [held, *(getattr(held, name, None) for name in names)]
    return [item for item in parts if isinstance(item, FunctionType)]


def code_form(code: CodeType) -> Any:
    """Returns code as JSON, without its file and lines."""
    constants = [
        code_form(item)
        if isinstance(item, CodeType)
        else sorted(map(repr, item))
        if isinstance(item, frozenset)
        else repr(item)
        for item in code.co_consts
    ]
    names = [code.co_names, code.co_varnames, code.co_freevars]
    return [code.co_code.hex(), code.co_flags, *names, constants]


def codes_in(function: FunctionType) -> list[CodeType]:
    """Returns a function's code and that of functions inside it."""
    codes = [function.__code__]
    for code in codes:
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
    return codes


def globals_read(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields globals that a function names, and attributes of modules."""
    codes = codes_in(function)
    names = {
        read.argval
        for code in codes
        for read in dis.get_instructions(code)
        if read.opname in _GLOBAL_READS
    }
    attributes = {name for code in codes for name in code.co_names}
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        yield name, value
        file = file_of(value) if isinstance(value, ModuleType) else None
        if file and not is_library(file):
            for key in sorted(attributes & vars(value).keys()):
                yield f"{name}.{key}", vars(value)[key]
