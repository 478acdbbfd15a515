"""What ``benchmarks/gpu.sh`` measured on a machine with a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.suite.report.cells import limits, verdicts
from benchmarks.suite.report.costs import cores_of, where
from benchmarks.suite.report.curves import curves
from benchmarks.suite.report.document import (
    Block,
    Listing,
    Part,
    Picture,
    Table,
    Text,
)
from benchmarks.suite.report.figures import (
    complete_cells,
    fixed,
    range_text,
    rate_text,
)
from benchmarks.suite.report.grid import by_workload
from benchmarks.suite.report.provenance import machine_lines
from benchmarks.suite.results import load

TITLE = "On a GPU"
SUITES: Mapping[str, str] = {
    "worker-on-gpu": "The worker on a GPU, the client on the CPU",
    "both-on-gpu": "Worker and client on the same GPU",
}
"""Files of the suite, without suffix, and what each is."""
WORKER = "worker-alone"
_GPU_TEXT = """\
Seconds of a GPU are not counted: what keeps no CPU and no link busy may wait
for it."""
_WORKER_TEXT = """\
Samples per second through the worker's socket over those of the tightest loop
around the eager model, both on the GPU; medians of the rounds. The goal is
{goal:g}."""


def gpu_part(folder: Path | None) -> Part:
    """All files that are there.

    Args:
        folder: that the script wrote; None where it did not run.

    Raises:
        ValueError: naming a file that is something else.
    """
    if folder is None:
        return Part(TITLE, [Text("Not run.")])
    parts = [
        *(
            _suite_part(name, title, path)
            for name, title in SUITES.items()
            if (path := folder / f"{name}.json").exists()
        ),
        *_worker(folder / f"{WORKER}.json"),
    ]
    if not parts:
        raise ValueError(
            f"{folder} has no results of benchmarks/gpu.sh: none of"
            f" {', '.join([*SUITES, WORKER])}.json"
        )
    return Part(TITLE, _summary(folder / "summary.txt"), parts)


def _summary(path: Path) -> list[Block]:
    if not path.exists():
        return [Text(_GPU_TEXT)]
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Text(_GPU_TEXT), Text("What became of each step:"), Listing(lines)]


def _suite_part(name: str, title: str, path: Path) -> Part:
    body = load(path)
    cells = complete_cells(body["experiments"].get("grid", {}))
    cores = cores_of(body["settings"])
    blocks: list[Block] = [Listing(machine_lines(body))]
    if not cells:
        return Part(title, [*blocks, Text("No cell was measured to its end.")])
    blocks.append(verdicts(cells))
    if found := list(limits(cells, cores)):
        blocks.append(Listing(found))
    for workload, each in by_workload(cells).items():
        blocks += [
            _renamed(curves(workload, each), name),
            _renamed(where(workload, each, cores), name),
        ]
    return Part(title, blocks)


def _renamed(picture: Picture, name: str) -> Picture:
    return Picture(f"{name}-{picture.name}", picture.figure, picture.text)


def _worker(path: Path) -> Iterator[Part]:
    if not path.exists():
        return
    body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    text = _WORKER_TEXT.format(goal=body["settings"]["goal"])
    yield Part(
        "The worker alone",
        [
            Text(" ".join(text.split())),
            Table(
                (
                    "Model",
                    "Clients",
                    "Worker, samples/s",
                    "Loop, samples/s",
                    "Efficiency",
                    "95 % interval",
                ),
                [
                    (
                        f"``{cell['model']}``",
                        str(cell["clients"]),
                        rate_text(cell["engine_samples_per_second"]),
                        rate_text(cell["loop_samples_per_second"]),
                        fixed(cell["efficiency"], 3),
                        range_text(cell["interval"], 3),
                    )
                    for cell in body["cells"]
                ],
            ),
        ],
    )
