"""The page of results: all of a file's figures, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.results_page import main

MACHINE = {
    "processor": "Some CPU",
    "cores": 2,
    "memory_bytes": 24_000_000_000,
    "kernel": "6.1",
}
VERSIONS = {"python": "3.11", "torch": "2.15", "swift": "2.38"}


def cell(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "complete": True,
        "samples": 192,
        "link_bytes_per_second": 640e3,
        "samples_per_second": {"auto": 24.7, "stream": 5.9, "cut-22": 22.2},
        "best_static": "cut-22",
        "predicted": {"auto": 29.1},
        "regret": -0.182,
        "interval": [-0.228, -0.012],
        "noise": {"regret": -0.0001},
        "missed": False,
        "above_best_static": True,
        "cold": {
            "auto": {"seconds": 35.3},
            "stream": {"seconds": 35.7},
            "cut-22": {"seconds": None, "at_least_seconds": 70.2},
        },
        **changes,
    }


SPLITS = {
    "machine": MACHINE,
    "versions": VERSIONS,
    "settings": {"rounds": 5, "floor": "lossless", "cold_epochs": 1},
    "cells": [
        cell("resnet18/backbone/0.25"),
        cell(
            "resnet18/backbone/2",
            missed=True,
            above_best_static=False,
            noise=None,
            cold={},
        ),
        cell("resnet18/inner/2", complete=False),
    ],
}
REPLAY = {
    "settings": {"links": [0.1, 10.0]},
    "error": {
        "auto": {"median": 0.05, "largest": 0.2},
        "fixed": {"median": 0.02, "largest": 0.1},
    },
    "cells": [
        {
            "model": "resnet18",
            "freeze": "backbone",
            "link": link,
            "regret": regret,
            "best_static": best,
        }
        for link, regret, best in (
            (0.1, 0.01, "cut-22"),
            (10.0, 0.0, "stream"),
        )
    ],
}
ADAPTATION = {
    "settings": {"model": "resnet18", "freeze": "layer4"},
    "link": {
        "events": [{"time": 40.0, "what": "link from 8.0 to 1.0 MB/s"}],
        "phases": [{"samples_per_second": 20.04}, {"samples_per_second": 9.0}],
        "lost": 0,
        "doubled": 0,
        "jobs": [{"plans": [{"time": 3.2, "mix": "100 % stream"}]}],
    },
    "tenants": {
        "samples_per_second": 120.0,
        "optimum": 124.5,
        "ratio": 0.971,
        "ratios": [0.962, 0.98],
        "interval": [0.962, 0.984],
        "rounds": [{}, {}],
        "goal": 0.95,
        "used": {"link": 0.97, "storage": 0.99},
        "dearer": {"storage": 1.12},
        "joint": {
            "samples_per_second": 118.4,
            "ratio": 0.966,
            "interval": [0.955, 0.977],
            "regret": -0.013,
            "regret_interval": [-0.04, 0.02],
            "used": {"link": 0.93, "storage": 0.98},
            "dearer": {"storage": 1.1},
        },
        "alone": {"optimum": 130.2, "ratio": 0.92},
        "lost": 0,
        "doubled": 0,
        "plan_changes_per_minute": [1.0, 0.0],
        "most_changes_per_minute": 16.0,
    },
}


def page_of(folder: Path, **bodies: dict[str, Any]) -> str:
    arguments = ["--rst", str(folder / "results.rst")]
    for name, body in bodies.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(body))
        arguments += [f"--{name}", str(path)]
    assert main(arguments) == 0
    return (folder / "results.rst").read_text()


def test_cells_are_rows_and_incomplete_ones_are_not(tmp_path: Path) -> None:
    page = page_of(tmp_path, splits=SPLITS)
    assert "Of 2 cells 1 are missed; in 1 the whole interval" in page
    rows = page.split("   * - ")
    (above,) = [row for row in rows if "backbone/0.25" in row and "%" in row]
    assert above.replace("     - ", "").split("\n")[:10] == [
        "``resnet18/backbone/0.25``",
        "0.64",
        "24.7",
        "29.1",
        "5.9",
        "cut-22 22.2",
        "-18.2 %",
        "-22.8 % … -1.2 %",
        "0.0 %",
        "above",
    ]
    assert "resnet18/inner/2" not in page
    assert page.count("``resnet18/backbone/2``") == 1  # none from cold
    assert "     - -\n     - missed\n" in page
    assert "     - cut-22 > 70\n" in page
    assert "replay" not in page.split("Plans against")[1]


def test_replay_and_adaptation_have_parts_of_their_own(tmp_path: Path) -> None:
    page = page_of(tmp_path, replay=REPLAY, adaptation=ADAPTATION)
    assert "Plans against fixed cuts" not in page
    assert "came out 5.0 % off in the median for\n``auto``, 20.0 % at" in page
    assert "   * - ``resnet18/backbone``\n     - 1.0 % (cut-22)\n" in page
    assert "   * - the start\n     - 20.0\n" in page
    assert "   * - link from 8.0 to 1.0 MB/s\n     - 9.0\n" in page
    assert "0 samples were lost and 0 doubled" in page
    assert "* 3 s: 100 % stream" in page
    text = " ".join(page.split())
    assert "mean of 2 rounds: 0.971 (0.962 … 0.984) of the optimum" in text
    assert "the goal is 0.95. By round: 0.96, 0.98." in text
    assert "(124.5 samples/s in the mean; without regard to speed" in text
    assert "130.2, of which the jobs had 0.920)" in text
    assert "had 118.4 samples/s, 0.966 (0.955 … 0.977) of the" in text
    assert "was -1.3 % slower in the median (-4.0 % … 2.0 %;" in text
    assert "changed their plans 1.0, 0.0 times a minute" in text
    assert "   * - link, used\n     - 97 %\n     - 93 %\n" in page
    assert "   * - storage, dearer than alone\n     - 1.12\n" in page


def test_a_file_that_is_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing.json"
    page = tmp_path / "page.rst"
    assert main(["--splits", str(missing), "--rst", str(page)]) == 1
    assert "missing.json" in capsys.readouterr().err
    assert not page.exists()
