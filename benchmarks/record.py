"""Record of measurements: one JSON file, written after each round."""

from __future__ import annotations

import fnmatch
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("swift-hapi", "torch", "torchvision", "swift", "pyarrow", "scipy")
BENCHMARK = "suite"
FORMAT = 2
GRID = "grid"
ENTRIES = "entries"

Section = dict[str, Any]
"""One experiment's part of a record."""


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Writes a file completely or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(body, indent=2) + "\n")
    os.replace(partial, path)


def write_results(
    path: Path | None,
    benchmark: str,
    settings: Mapping[str, Any],
    results: Mapping[str, Any],
) -> None:
    """Writes the results of one command, with machine and versions.

    Without a path it writes nothing.
    """
    if path is not None:
        write_json(
            path,
            {
                "benchmark": benchmark,
                "settings": dict(settings),
                **stamp(),
                "machine": machine(),
                "versions": versions(),
                **results,
            },
        )


def machine() -> dict[str, Any]:
    """Hardware and kernel that the figures depend on."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE")
        * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        # Above 0: other programs ran at the same time.
        "load_at_start": os.getloadavg()[0],
    }


def processor() -> str:
    """Name of the processor, with family and model."""
    values: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    name = values.get("model name", platform.machine())
    if "cpu family" in values and "model" in values:
        name += f" (family {values['cpu family']}, model {values['model']})"
    return name


def commit() -> str | None:
    """Git commit of this checkout; None outside of one."""
    if shutil.which("git") is None:
        return None
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() if not described.returncode else None


def versions(more: Iterable[str] = ()) -> dict[str, str]:
    """Versions of Python and of distributions: ``PACKAGES`` and ``more``."""
    versions = {"python": platform.python_version()}
    for name in (*PACKAGES, *more):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def stamp() -> dict[str, Any]:
    """Date, commit and processor of an entry."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"date": now, "commit": commit(), "processor": processor()}


class SuiteRecord:
    """The sections of all experiments, in one JSON file.

    ``libraries`` are recorded with their versions, ``requested`` in ``begun``.
    Without ``resume`` the file must not exist.

    Raises:
        ValueError: naming the file, if it holds something else or was made
            with other settings or versions, at another commit, or on
            another processor.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        *,
        libraries: Iterable[str] = (),
        resume: bool = False,
        requested: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = path
        self.body: dict[str, Any] = {
            "benchmark": BENCHMARK,
            "format": FORMAT,
            "settings": dict(settings),
            # A record is of one commit and one kind of machine.
            "versions": {
                **versions(sorted({*libraries})),
                "commit": commit(),
                "processor": processor(),
            },
            "begun": [],
            "experiments": {},
        }
        if path.exists():
            if not resume:
                raise ValueError(
                    f"{path} exists; use --resume to continue it, or give"
                    " another file"
                )
            self._continue(load(path))
        self.body["begun"].append(
            {**stamp(), **machine(), **(requested or {})}
        )

    def _continue(self, old: Mapping[str, Any]) -> None:
        for part in ("settings", "versions"):
            wanted, stored = self.body[part], old[part]
            for key in sorted({*wanted, *stored}):
                if stored.get(key) != wanted.get(key):
                    raise ValueError(
                        f"{self._path} was made with"
                        f" {key}={stored.get(key)!r}, not"
                        f" {wanted.get(key)!r}; use the same, or another file"
                    )
        self.body["begun"] = [*old["begun"]]
        self.body["experiments"] = old["experiments"]

    def section(self, name: str) -> Section:
        """An experiment's section; :meth:`save` writes changes to it."""
        sections: dict[str, Section] = self.body["experiments"]
        return sections.setdefault(name, {"complete": False})

    @property
    def tuned(self) -> Mapping[str, Any]:
        """Settings of opponents that the grid has found, by network."""
        grid: Section = self.body["experiments"].get(GRID, {})
        opponents: Mapping[str, Any] = grid.get("opponents", {})
        return opponents

    def save(self) -> None:
        """Writes the file completely or not at all."""
        write_json(self._path, self.body)


def load(path: Path) -> dict[str, Any]:
    """Reads a record.

    Raises:
        ValueError: naming the file, if it is no record of this format.
    """
    try:
        body = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if (
        not isinstance(body, dict)
        or body.get("benchmark") != BENCHMARK
        or body.get("format") != FORMAT
    ):
        raise ValueError(
            f"{path} is no record of `python -m benchmarks run`, format"
            f" {FORMAT}"
        )
    return body


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Names that match a shell pattern; all of them without patterns."""
    return [
        name
        for name in names
        if not patterns
        or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


def missing(
    section: Section, names: Iterable[str], key: str = ENTRIES
) -> list[str]:
    """Names without a complete entry in a section."""
    section.setdefault(key, [])
    present = {entry["name"] for entry in complete(section, key)}
    return [name for name in names if name not in present]


def begin(
    section: Section, name: str, *, key: str = ENTRIES, **more: Any
) -> dict[str, Any]:
    """Adds a new entry, which replaces an earlier one of this name."""
    entry = {"name": name, **more, **stamp(), "complete": False}
    section[key] = [
        *(old for old in section[key] if old["name"] != name),
        entry,
    ]
    return entry


def complete(
    section: Mapping[str, Any], key: str = ENTRIES
) -> list[dict[str, Any]]:
    """The complete entries of a section."""
    return [entry for entry in section.get(key, ()) if entry["complete"]]
