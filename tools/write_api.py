"""Writes signatures into ``docs/reference/api.rst``.

A forge shows the page without what Sphinx's autodoc adds.  So each directive
has a block of text in front of it, with signatures and first sentences, which
the style sheet hides in HTML.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

API = Path(__file__).parents[1] / "docs" / "reference" / "api.rst"
HEAD = ".. code-block:: text\n   :class: forge\n\n"
_ENTRY = re.compile(
    rf"(?:{re.escape(HEAD)}(?:   .*\n|\n)*)?"
    r"(\.\. auto(class|function|module):: (?!hapi_protocol\.errors\.)(\S+)\n"
    r"((?:   .+\n)*))"
)


def written(text: str) -> str:
    """Returns the page with the blocks that belong into it."""
    return _ENTRY.sub(_with_block, text)


def _with_block(entry: re.Match[str]) -> str:
    directive, kind, path, options = entry.groups()
    documented = pkgutil.resolve_name(path)
    lines = [] if kind == "module" else [*_lines(path, documented)]
    for name, member in _members(documented, options):
        lines += _lines(name, member, "" if kind == "module" else "  ")
    if not lines:
        return directive
    return (
        f"{HEAD}{textwrap.indent(chr(10).join(lines), '   ')}\n\n{directive}"
    )


def _members(owner: Any, options: str) -> Iterator[tuple[str, Any]]:
    """Members that autodoc describes, special ones left out."""
    read = dict(re.findall(r":([\w-]+):((?:.|\n      )*)", options))
    names = re.findall(r"\w+", read.get("members", ""))
    if "members" in read and not names:
        inherits = "inherited-members" in read
        found = inspect.getmembers(owner) if inherits else vars(owner).items()
        names = [name for name, member in found if _is_ours(member, owner)]
    left_out = re.findall(r"\w+", read.get("exclude-members", ""))
    for name in names:
        if not name.startswith("_") and name not in left_out:
            yield name, getattr(owner, name)


def _is_ours(member: Any, owner: Any) -> bool:
    member = getattr(member, "__func__", getattr(member, "fget", member))
    module = getattr(inspect.unwrap(member), "__module__", None) or ""
    if inspect.ismodule(owner):
        return bool(module == owner.__name__)
    is_method = inspect.isroutine(member) and inspect.getdoc(member)
    return bool(is_method and module.startswith("hapi_"))


def _lines(path: str, documented: Any, margin: str = "") -> Iterator[str]:
    """The signature and the first sentence."""
    name = ("." if margin else "") + path.rpartition(".")[2]
    if callable(documented):
        parameters = inspect.signature(documented).parameters.values()
        name += f"({', '.join(_arguments(parameters))})"
    first = (inspect.getdoc(documented) or "").partition("\n\n")[0]
    first = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", first).replace("``", "`")
    for text, indent in ((name, margin), (first, margin + "    ")):
        yield from textwrap.wrap(
            text,
            76,
            initial_indent=indent,
            subsequent_indent=margin + "    ",
            break_on_hyphens=False,
        )


def _arguments(parameters: Any) -> Iterator[str]:
    """Arguments of a call; an optional one whose value is long has ``…``."""
    before = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for each in parameters:
        if each.kind == each.KEYWORD_ONLY and before < each.VAR_POSITIONAL:
            yield "*"
        before = each.kind
        if each.name == "self":
            continue
        value = repr(each.default)
        if each.default is each.empty:
            yield str(each.replace(annotation=each.empty))
        else:
            long = "<" in value or len(value) > 20
            yield f"{each.name}={'…' if long else value}"


if __name__ == "__main__":
    API.write_text(written(API.read_text()))
