"""The file of ``benchmarks.splits``: written as it goes, read to resume."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("swift-hapi", "torch", "torchvision", "swift", "pyarrow", "scipy")
FORMAT = 1


class Results:
    """All that was measured; kept in a file if there is a path.

    Args:
        path: None keeps it in memory.
        settings: what all cells have in common, JSON-able.
        resume: go on with what the file holds.

    Raises:
        ValueError: when the file was made with other settings.
    """

    def __init__(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        *,
        resume: bool = False,
    ) -> None:
        self._path = path
        self.body: dict[str, Any] = {
            "benchmark": "splits",
            "format": FORMAT,
            "settings": dict(settings),
            "machine": machine(),
            "versions": versions(),
            "calibration": {},
            "cells": [],
        }
        if resume and path is not None and path.exists():
            self._take_over(json.loads(path.read_text()))

    def _take_over(self, old: Mapping[str, Any]) -> None:
        wanted = self.body["settings"]
        found = old.get("settings", {})
        for key in sorted({*wanted, *found}):
            if found.get(key) != wanted.get(key):
                raise ValueError(
                    f"{self._path} was made with {key}={found.get(key)!r},"
                    f" not {wanted.get(key)!r}; use the same, or another file"
                )
        self.body["cells"] = [c for c in old["cells"] if c["complete"]]
        self.body["calibration"] = old["calibration"]

    @property
    def cells(self) -> Sequence[dict[str, Any]]:
        return list(self.body["cells"])

    def done(self, name: str) -> bool:
        """Whether a cell needs no further measurement."""
        return any(c["name"] == name and c["complete"] for c in self.cells)

    def put(self, entry: Mapping[str, Any]) -> None:
        """Keeps a cell's entry in the place of an earlier one."""
        others = [c for c in self.cells if c["name"] != entry["name"]]
        self.body["cells"] = [*others, dict(entry)]
        workload = f"{entry['model']}/{entry['freeze']}"
        if "calibration" in entry:
            found = self.body["calibration"].setdefault(workload, [])
            if entry["complete"]:
                found.append(entry["calibration"])
        self.save()

    def save(self) -> None:
        """Writes the file, whole or not at all."""
        if self._path is not None:
            write_json(self._path, self.body)


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Writes a file, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(body, indent=2) + "\n")
    os.replace(partial, path)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE")
        * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        # Beside an idle machine's 0, something else ran meanwhile.
        "load_at_start": os.getloadavg()[0],
    }


def _processor() -> str:
    """Its name, and what tells it from others that call themselves so."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    name = found.get("model name", platform.machine())
    if "cpu family" in found and "model" in found:
        name += f" (family {found['cpu family']}, model {found['model']})"
    return name


def commit() -> str | None:
    """Of the checkout that this is part of; None outside of one."""
    if shutil.which("git") is None:
        return None
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() if not found.returncode else None


def versions(more: Iterable[str] = ()) -> dict[str, str]:
    """Of Python, and of distributions: ``PACKAGES`` and ``more``."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *more):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Regret of each complete cell, a line each."""
    lines = [
        f"{'cell':34} {'auto':>7} {'stream':>7} {'best static':>16}"
        f" {'regret':>8} {'interval':>18}"
    ]
    for cell in cells:
        rates = cell.get("samples_per_second")
        if not cell["complete"] or rates is None:
            continue
        best = cell["best_static"]
        low, high = cell["interval"]
        verdict = "missed" if cell["missed"] else ""
        if cell["above_best_static"]:
            verdict = "above"
        lines.append(
            f"{cell['name']:34} {rates['auto']:7.1f} {rates['stream']:7.1f}"
            f" {best:>8} {rates[best]:7.1f} {cell['regret']:8.1%}"
            f" {f'{low:.1%} … {high:.1%}':>18} {verdict}"
        )
    return "\n".join(lines)


def cold_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Seconds of whole runs from cold; empty without any."""
    lines = []
    for cell in cells:
        shown = ", ".join(
            f"{name} {run['seconds']:.1f} s"
            if run["seconds"] is not None
            else f"{name} > {run['at_least_seconds']:.0f} s"
            for name, run in cell.get("cold", {}).items()
        )
        if shown:
            lines.append(f"{cell['name']:34} {shown}")
    return "\n".join(["from cold:", *lines]) if lines else ""
