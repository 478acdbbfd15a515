"""The file of ``python -m benchmarks run``: written as it goes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.results import commit, machine, versions, write_json
from benchmarks.suite.contenders import LIBRARIES

BENCHMARK = "suite"
FORMAT = 2
GRID = "grid"
Section = dict[str, Any]


def stamp() -> dict[str, Any]:
    """When, of which commit and on which processor an entry was begun."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"date": now, "commit": commit(), "processor": processor()}


def processor() -> str:
    """Of this machine; figures of another one are of another speed."""
    return str(machine()["processor"])


class SuiteResults:
    """All experiments' sections, in one JSON file.

    Args:
        path: of the file.
        settings: that all experiments share, JSON-able.
        resume: go on with what the file holds; else it must not exist.
        asked: which experiments and cells, JSON-able; kept beside date,
            commit and machine in ``begun``, an entry for each time it is gone
            on with.

    Raises:
        ValueError: naming the file, when it holds something else or was made
            with other settings, other versions, or another number of cores.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        *,
        resume: bool,
        asked: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = path
        self._machine = machine()
        self.body: dict[str, Any] = {
            "benchmark": BENCHMARK,
            "format": FORMAT,
            "settings": dict(settings),
            "versions": versions(sorted({*chain(*LIBRARIES.values())})),
            "begun": [],
            "experiments": {},
        }
        if path.exists():
            if not resume:
                raise ValueError(
                    f"{path} exists; --resume goes on with it, or give"
                    " another file"
                )
            self._take_over(load(path))
        self.body["begun"].append(
            {**stamp(), **self._machine, **(asked or {})}
        )

    def _take_over(self, old: Mapping[str, Any]) -> None:
        for part in ("settings", "versions"):
            self._check(part, self.body[part], old[part])
        for begun in old["begun"]:
            self._check(
                "machine",
                {"cores": self._machine["cores"]},
                {"cores": begun["cores"]},
            )
        self.body["begun"] = [*old["begun"]]
        self.body["experiments"] = old["experiments"]

    def _check(
        self, part: str, wanted: Mapping[str, Any], found: Mapping[str, Any]
    ) -> None:
        for key in sorted({*wanted, *found}):
            if found.get(key) != wanted.get(key):
                raise ValueError(
                    f"{self._path} was made with {key}={found.get(key)!r},"
                    f" not {wanted.get(key)!r} ({part}); use the same, or"
                    " another file"
                )

    def others(self, key: str) -> list[str]:
        """Of earlier runs that wrote to the file, and not of this one.

        Args:
            key: of ``begun``: ``commit`` or ``processor``.
        """
        *earlier, this = (each[key] for each in self.body["begun"])
        return sorted({str(each) for each in earlier if each != this})

    def section(self, name: str) -> Section:
        """An experiment's part of the file; changes are kept by :meth:`save`.

        ``complete`` in it says whether the experiment ended.
        """
        sections: dict[str, Section] = self.body["experiments"]
        return sections.setdefault(name, {"complete": False})

    @property
    def tuned(self) -> Mapping[str, Any]:
        """Settings of opponents that the grid has found, by network."""
        grid: Section = self.body["experiments"].get(GRID, {})
        found: Mapping[str, Any] = grid.get("opponents", {})
        return found

    def drop(self, name: str) -> None:
        """Forgets an experiment, to be measured again."""
        self.body["experiments"].pop(name, None)

    def save(self) -> None:
        """Writes the file, whole or not at all."""
        write_json(self._path, self.body)


def load(path: Path) -> dict[str, Any]:
    """What a file holds.

    Raises:
        ValueError: naming the file, when it is something else.
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
            f"{path} holds no results of `python -m benchmarks run`, format"
            f" {FORMAT}"
        )
    return body
