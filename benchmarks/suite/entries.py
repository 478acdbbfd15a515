"""Entries of an experiment's section, each with a name, done or not."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.suite.experiment import Context
from benchmarks.suite.results import Section, stamp

ENTRIES = "entries"


def missing(context: Context, names: Iterable[str]) -> list[str]:
    """Those names that are wanted and have no complete entry yet."""
    section = context.section
    section.setdefault(ENTRIES, [])
    wanted = matching(list(names), context.only)
    if not wanted:
        context.note(f"nothing here matches {' '.join(context.only)}")
    there = {each["name"] for each in complete(section)}
    return [name for name in wanted if name not in there]


def matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Names that match a pattern as of a shell; all without patterns."""
    return [
        name
        for name in names
        if not patterns
        or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


def begin(section: Section, name: str, **more: Any) -> dict[str, Any]:
    """A new entry, which takes the place of an incomplete one."""
    entry = {"name": name, **more, **stamp(), "complete": False}
    section[ENTRIES] = [
        *(each for each in section[ENTRIES] if each["name"] != name),
        entry,
    ]
    return entry


def complete(section: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries that are done."""
    return [each for each in section.get(ENTRIES, ()) if each["complete"]]
