"""Checks names and prose for retired words and riddling first lines.

    python tools/check_language.py [PATH ...]

Reads Python files (names, strings, comments) and rst and md files.  Prints
``file:line: message`` for each finding; exits with 1 if there is one.  The
words and their replacements are those of the project's glossary; a first line
of a docstring states what the thing is or does.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FIRST_WORDS = {
    *("What", "Whether", "How", "Who", "Whose", "Which", "That"),
    *("Of", "As", "Where", "Likewise"),
}
"""A docstring that begins with one of these does not state its subject."""

RETIRED_NAMES = {
    "feeder": "loader factory",
    "tally": "epoch recorder",
    "horizon": "remaining epochs or samples",
    "pace": "throughput",
    "keeper": "cache writer",
    "asker": "caller or client",
    "luck": "hit rate of unknown spans",
    "heed": "defer, obey",
    "midst": "during",
    "beside": "next to, concurrently with",
    "overruns": "quarantine",
    "residency": "device models",
    "mixer": "route scheduler",
}
"""Parts of names (``snake_case`` or ``CamelCase``) and their replacements."""

RETIRED_PROSE = {
    "likewise": "repeat the words",
    "beside": "next to, in addition to, concurrently with",
    "anew": "again",
    "thereby": "by this",
    "heed": "obey",
    "heeds": "obeys",
    "forgo": "cancel",
    "forgoes": "cancels",
    "midst": "during",
    "feeder": "loader factory",
    "horizon": "remaining epochs or samples",
    "tally": "epoch recorder",
    "asker": "caller or client",
    "it be": "it is",
    "is told": "is reported",
    "are told": "are reported",
    "goes away": "disconnects",
    "went away": "disconnected",
    "is gone": "disconnected, missing",
    "owed": "deficit",
    "turning link": "crossover bandwidth",
    "one-off": "startup cost",
}
"""Words and phrases of prose and their replacements."""

_PROSE = re.compile(
    r"\b(" + "|".join(map(re.escape, RETIRED_PROSE)) + r")\b", re.IGNORECASE
)
_PROSE_TOKENS = {
    tokenize.COMMENT,
    tokenize.STRING,
    # A part of an f-string is a token from Python 3.12 on.
    getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),
}
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (ast.Module, ast.ClassDef, *_FUNCTIONS)

Finding = tuple[int, str]


def check_name(name: str) -> str | None:
    """Returns a message for a name with a retired part."""
    if name.lstrip("_").startswith(("LEAST_", "MOST_")):
        return f"name {name}: write 'MIN_' or 'MAX_'"
    for part in _PART.findall(name):
        better = RETIRED_NAMES.get(part.lower())
        if better:
            return f"name {name}: write {better!r} for {part.lower()!r}"
    return None


def check_prose(text: str, line: int) -> Iterator[Finding]:
    """Yields a finding for each retired word; code in backticks is exempt."""
    for offset, content in enumerate(text.splitlines()):
        for match in _PROSE.finditer(re.sub(r"`[^`]*`", "", content)):
            word = match[0].lower()
            yield line + offset, f"{word!r}: write {RETIRED_PROSE[word]!r}"


def check_docstrings(tree: ast.Module) -> Iterator[Finding]:
    """Yields findings about the first lines of all docstrings.

    A string behind an assignment documents the constant and counts as one.
    """
    for node in ast.walk(tree):
        if not isinstance(node, _SCOPES):
            continue
        for value in node.body:
            if not isinstance(value, ast.Expr):
                continue
            constant = value.value
            if not isinstance(constant, ast.Constant):
                continue
            text = constant.value
            if not isinstance(text, str):
                continue
            first = text.strip().split(None, 1)[:1]
            if first and first[0] in FIRST_WORDS:
                yield value.lineno, f"docstring begins with {first[0]!r}"


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and name of all definitions, parameters and targets."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(
            node.ctx, ast.Store
        ):
            yield node.lineno, node.attr


def check_python(source: str) -> Iterator[Finding]:
    """Yields the findings of one Python file."""
    tree = ast.parse(source)
    yield from check_docstrings(tree)
    for line, name in defined_names(tree):
        message = check_name(name)
        if message:
            yield line, message
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _PROSE_TOKENS:
            yield from check_prose(token.string, token.start[0])


def check_file(path: Path) -> list[Finding]:
    """Returns the findings of one file, each once, in the order of lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return sorted(set(check_python(text)))
    return sorted(set(check_prose(text, 1)))


def tracked_files() -> list[Path]:
    """Returns the Python, rst and md files under version control."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.rst", "*.md"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(name) for name in listed.stdout.split()]


def main() -> int:
    """Prints all findings; returns the exit status."""
    paths = [Path(name) for name in sys.argv[1:]] or tracked_files()
    num_findings = 0
    for path in paths:
        if path.name == Path(__file__).name:
            continue
        for line, message in check_file(path):
            print(f"{path}:{line}: {message}")
            num_findings += 1
    print(f"{num_findings} findings in {len(paths)} files", file=sys.stderr)
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
