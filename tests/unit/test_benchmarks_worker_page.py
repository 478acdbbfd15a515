"""The page of a worker's results: what the files hold, and no more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks.worker_page import main

COMMON = {
    "machine": {
        "processor": "Some CPU",
        "cores": 2,
        "memory_bytes": 24_000_000_000,
        "kernel": "6.1",
    },
    "versions": {"python": "3.11", "torch": "2.15"},
}
WORKER = {
    **COMMON,
    "benchmark": "worker",
    "settings": {"rounds": 4, "goal": 0.9},
    "cells": [
        {
            "model": "resnet18",
            "clients": clients,
            "engine_samples_per_second": 48.0,
            "loop_samples_per_second": 50.0,
            "efficiency": efficiency,
            "interval": [0.8, 1.2],
        }
        for clients, efficiency in ((1, 0.96), (4, 0.88))
    ],
}
REQUESTS = {
    **COMMON,
    "benchmark": "requests",
    "settings": {"rounds": 3, "requests": 500},
    "goal_seconds": 0.005,
    "met": False,
    "found": {
        "request": {
            "median": 0.00612,
            "interval": [0.006, 0.0065],
            "percentile_95": 0.0071,
        },
        "worker_cpu": {"median": 0.003, "interval": [0.003, 0.003]},
    },
}
FAIRNESS = {
    **COMMON,
    "benchmark": "fairness",
    "settings": {"rounds": 3},
    "scenarios": [
        {
            "scenario": "greedy",
            "jain": 0.9312,
            "goal": {"ratio": 0.9, "jain": 0.95},
            "met": False,
            "accounts": [
                {
                    "account": "AUTH_a",
                    "guarded": True,
                    "streams": 2,
                    "weight": 0.25,
                    "samples_per_second": 13.4,
                    "ratio": 0.777,
                    "interval": [0.7, 0.8],
                }
            ],
        },
        {
            "scenario": "makespan",
            "makespan_seconds": 23.0,
            "tenants": [{}, {}],
            "ratio": 0.97,
            "interval": [0.95, 0.99],
            "met": True,
        },
    ],
}
MEMORY = {
    **COMMON,
    "benchmark": "memory",
    "settings": {"goal": [1, 1.5]},
    "cells": [
        {"model": "vit_b_16", "ratio": 1.151, "met": True},
        {"model": "vit_b_16", "ratio": 0.987, "met": False},
    ],
}
SOAK = {
    **COMMON,
    "benchmark": "memory",
    "settings": {"soak_minutes": 20.0},
    "soak": {
        "memory_limit_bytes": 64 << 20,
        "limit_bytes": 1400 << 20,
        "peak_bytes": 1401 << 20,
        "growth": 0.015,
        "shards": 7848,
        "refused": 104,
        "uploads": 110,
        "unfinished": 1,
        "longest_seconds": 52.04,
        "goal": {"growth": 0.05, "longest_seconds": 180.0, "unfinished": 0},
        "met": False,
    },
}


def page_of(folder: Path, *bodies: Mapping[str, Any]) -> str:
    paths = []
    for number, body in enumerate(bodies):
        paths.append(folder / f"{number}.json")
        paths[-1].write_text(json.dumps(body))
    page = folder / "page.rst"
    assert main([*map(str, paths), "--rst", str(page)]) == 0
    return page.read_text()


def row(*cells: str) -> str:
    first, *others = cells
    return "\n".join([f"   * - {first}", *(f"     - {c}" for c in others)])


def test_page_holds_what_the_files_say(tmp_path: Path) -> None:
    page = page_of(tmp_path, WORKER, REQUESTS, FAIRNESS, MEMORY, SOAK)
    for wanted in (
        row("``resnet18``", "1", "48.0", "50.0", "0.960"),
        row("request", "6.12", "6.00 … 6.50", "7.10"),
        row("``greedy``", "``AUTH_a`` \\*", "2", "0.25", "13.4", "0.777"),
        row("``vit_b_16``", "2", "0.99", "1.15", "1"),
    ):
        assert wanted in page
    text = " ".join(page.split())
    for wanted in (
        "Some CPU, 2 cores, 24 GB",
        "* 2 tenants together took 0.970 (0.950 … 0.990) of the sum",
        "7848 shards were computed, 104 requests refused",
        "1 shards were left undone, and the longest took 52 s (goal 180)",
        "at most 1401 MiB of 1400",
        "1.5 % more than in the second (goal at most 5 %)",
    ):
        assert wanted in text
    assert "worker_cpu" not in page


@pytest.mark.parametrize(
    ("body", "missed"),
    [(WORKER, 1), (REQUESTS, 1), (FAIRNESS, 1), (MEMORY, 0), (SOAK, 1)],
)
def test_missed_goals_are_told(
    tmp_path: Path, body: Mapping[str, Any], missed: int
) -> None:
    assert page_of(tmp_path, body).count("missed") == missed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting"),
        (json.dumps({**COMMON, "benchmark": "splits"}), "'splits'"),
        (json.dumps({"benchmark": "worker"}), "'machine'"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    message: str,
) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    page = tmp_path / "page.rst"
    assert main([str(path), "--rst", str(page)]) == 1
    assert message in capsys.readouterr().err
    assert not page.exists()
